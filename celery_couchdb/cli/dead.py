"""The commands `celery couchdb dead`: rejected, malformed and repeatedly failing messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import click

from kombu_couchdb.admin import dead
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents.workitem import task_id

from ..jobs import Jobs
from .databases import jobs_of
from .job_resource import dead_letter_resource, resolve_id
from .resource import change, counted, json_option, limit_option, selection_options

__all__ = ['command']

#: Changes dead letters. Returns how many were changed, and why others were refused.
Act = Callable[[Sequence[Document]], tuple[int, Mapping[str, str]]]


@click.group('dead')
def command() -> None:
    """List, show, replay or drop dead letters."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only dead letters of this queue.')
@limit_option
@json_option
@click.pass_context
def list_(ctx: click.Context, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the oldest of each queue first."""
    jobs = jobs_of(ctx)
    dead_letter_resource(jobs).print_list(
        dead.letters(jobs.client, queue),
        as_json,
        empty='There are no dead letters.',
        limit=limit,
        more=lambda: f'These are {limit} of {dead.count(jobs.client, queue):,} (--limit).',
    )


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a dead letter with its decoded message.

    ID is the id of the task or of the document, or its first characters.
    """
    jobs = jobs_of(ctx)
    dead_letter_resource(jobs).show(_find(jobs, [name]), as_json)


#: The options that select dead letters.
_selection_options = selection_options(
    'Select all dead letters of all queues.',
    click.option('--queue', '-Q', metavar='NAME', help='Select all dead letters of this queue.'),
)


@command.command('replay')
@_selection_options
@click.pass_context
def replay(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Put dead letters back at the end of their queues, as if they had never been delivered.

    ID is the id of a task or of a document, or its first characters. Stored results of these tasks are deleted, and the
    messages no longer expire.
    """
    jobs = jobs_of(ctx)

    def act(docs: Sequence[Document]) -> tuple[int, Mapping[str, str]]:
        replayed, refused = jobs.replay(docs)
        return len(replayed), refused

    _change(ctx, jobs, names, queue, every, yes, 'Replay', act, 'replayed')


@command.command('drop')
@_selection_options
@click.pass_context
def drop(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Delete dead letters for good.

    ID is the id of a task or of a document, or its first characters.
    """
    jobs = jobs_of(ctx)
    _change(ctx, jobs, names, queue, every, yes, 'Drop', lambda docs: (dead.drop(jobs.client, docs), {}), 'dropped')


def _find(jobs: Jobs, names: Sequence[str]) -> list[Document]:
    found: dict[str, Document] = {}
    for name in names:
        full = resolve_id(jobs.client, name, dead=True)
        letters = [dead.as_letter(doc) for doc in find(jobs.client, full) if dead.is_letter(doc)]
        if not letters:
            raise click.ClickException(f'there is no dead letter {name!r}')
        found |= {doc['_id']: doc for doc in letters}
    return list(found.values())


def _change(
    ctx: click.Context,
    jobs: Jobs,
    names: Sequence[str],
    queue: str | None,
    every: bool,
    yes: bool,
    verb: str,
    act: Act,
    done: str,
) -> None:
    """Change the selected dead letters by `act`; *raises* `UsageError` unless one of names, queue and all is given."""
    if sum((bool(names), queue is not None, every)) != 1:
        raise click.UsageError('Name dead letters by id, or give --queue NAME, or --all.')
    named, now = _find(jobs, names), jobs.client.clock.now()
    # Skip messages that become dead letters while this runs: otherwise a replayed message that fails again would be
    # replayed forever.
    letters = named or (doc for doc in dead.letters(jobs.client, queue) if not _failed_after(doc, now))
    total = len(named) or dead.count(jobs.client, queue)
    which = counted(total, 'dead letter') + (f' of queue {queue}' if queue else '')
    if len(named) == 1:
        which = f'dead letter {task_id(named[0]) or named[0]["_id"]}'
    change(ctx, verb, which, letters, total, act, done, yes=yes)


def _failed_after(doc: Document, date: float) -> bool:
    failed = doc.get('failed')
    return isinstance(failed, (int, float)) and failed > date
