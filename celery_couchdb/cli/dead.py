"""The commands `celery couchdb dead`: rejected, malformed and repeatedly failing messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice

import click

from kombu_couchdb.admin import dead
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents.workitem import task_id

from ..jobs import Jobs
from .databases import jobs_of
from .job_ids import resolve_id
from .job_view import DEAD_LETTER_COLUMNS, dead_letter_row, describe_all, format_jobs
from .selection import print_dropped, print_replayed, selection_options
from .tables import confirm, echo_styled, print_list

__all__ = ['command']

#: Dead letters that are read and changed together.
_BATCH_DOCS = 200

#: A progress bar is shown for more dead letters than this.
_PROGRESS_BAR_FROM = 200


@click.group('dead')
def command() -> None:
    """List, show, replay or drop dead letters."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only dead letters of this queue.')
@click.option('--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The maximum to list.')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one object per line.')
@click.pass_context
def list_(ctx: click.Context, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the oldest of each queue first."""
    jobs = jobs_of(ctx)
    now = jobs.client.clock.now()
    print_list(
        dead.letters(jobs.client, queue),
        limit,
        partial(describe_all, jobs) if as_json else None,
        DEAD_LETTER_COLUMNS,
        lambda docs: [dead_letter_row(doc, now) for doc in docs],
        empty='There are no dead letters.',
        more=lambda: f'These are {limit} of {dead.count(jobs.client, queue):,} (--limit).',
    )


@command.command('show')
@click.argument('name', metavar='ID')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, one object per line.')
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a dead letter with its decoded message.

    ID is the id of the task or of the document, or its first characters.
    """
    jobs = jobs_of(ctx)
    echo_styled(format_jobs(jobs, _find(jobs, [name]), as_json))


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
    refused: dict[str, str] = {}

    def replay_batch(docs: Sequence[Document]) -> int:
        replayed, reasons = jobs.replay(docs)
        refused.update(reasons)
        return len(replayed)

    done, _ = _for_selected(jobs, names, queue, every, yes, 'Replay', replay_batch)
    print_replayed(ctx, done, refused)


@command.command('drop')
@_selection_options
@click.pass_context
def drop(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Delete dead letters for good.

    ID is the id of a task or of a document, or its first characters.
    """
    jobs = jobs_of(ctx)
    print_dropped(*_for_selected(jobs, names, queue, every, yes, 'Drop', lambda docs: dead.drop(jobs.client, docs)))


def _find(jobs: Jobs, names: Sequence[str]) -> list[Document]:
    found: dict[str, Document] = {}
    for name in names:
        full = resolve_id(jobs.client, name, dead=True)
        letters = [dead.as_letter(doc) for doc in find(jobs.client, full) if dead.is_letter(doc)]
        if not letters:
            raise click.ClickException(f'there is no dead letter {name!r}')
        found |= {doc['_id']: doc for doc in letters}
    return list(found.values())


def _for_selected(
    jobs: Jobs,
    names: Sequence[str],
    queue: str | None,
    every: bool,
    yes: bool,
    verb: str,
    act: Callable[[Sequence[Document]], int],
) -> tuple[int, int]:
    """Ask for confirmation, and call `act` with batches of the selected dead letters.

    Return the sum of the numbers that `act` returns, and the number of selected dead letters. *Raises* `UsageError`
    unless exactly one of `names`, `queue` and `every` is given.
    """
    if sum((bool(names), queue is not None, every)) != 1:
        raise click.UsageError('Name dead letters by id, or give --queue NAME, or --all.')
    named, now = _find(jobs, names), jobs.client.clock.now()
    # Skip messages that become dead letters while this runs: otherwise a replayed message that fails again would be
    # replayed forever.
    letters: Iterator[Document] = (
        iter(named) if names else (doc for doc in dead.letters(jobs.client, queue) if not _failed_after(doc, now))
    )
    total = len(named) or dead.count(jobs.client, queue)
    if not total:
        return 0, 0
    which = f'{total:,} dead letter{"s" if total > 1 else ""}' + (f' of queue {queue}' if queue else '')
    if len(named) == 1:
        which = f'dead letter {task_id(named[0]) or named[0]["_id"]}'
    if not yes:
        confirm(f'{verb} {which}?')
    done = selected = 0
    show_bar = total > _PROGRESS_BAR_FROM
    with click.progressbar(length=total, label=verb, file=sys.stderr) if show_bar else nullcontext() as bar:
        while batch := list(islice(letters, _BATCH_DOCS)):
            done += act(batch)
            selected += len(batch)
            if bar:
                bar.update(len(batch))
    return done, selected


def _failed_after(doc: Document, date: float) -> bool:
    failed = doc.get('failed')
    return isinstance(failed, (int, float)) and failed > date
