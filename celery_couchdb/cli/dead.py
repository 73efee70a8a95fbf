"""`celery couchdb dead`: what was refused, was spoilt or failed too often."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import click

from kombu_couchdb.admin import dead
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents.workitem import task_id

from ..jobs import Jobs
from .databases import jobs_of
from .job_view import described, letters_table, shown
from .named import whole
from .tables import asked, json_line, say, show, width

__all__ = ['command']

#: How many dead letters are read and changed at a time.
_BATCH = 200

#: More than this are shown with a progress bar.
_MANY = 200


@click.group('dead')
def command() -> None:
    """List, show, replay or drop dead letters."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='Only those of this queue.')
@click.option('--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The most to list.')
@click.option('--json', 'as_json', is_flag=True, help='One JSON object a line.')
@click.pass_context
def list_(ctx: click.Context, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the oldest of each queue first."""
    jobs = jobs_of(ctx)
    docs = list(islice(dead.letters(jobs.client, queue), limit))
    if as_json:
        for doc in docs:
            show(json_line(described(jobs, doc)))
        return
    if not docs:
        say('There are no dead letters.')
        return
    show(letters_table(docs, jobs.client.clock.now(), width()))
    if (total := dead.count(jobs.client, queue)) > len(docs):
        say(f'These are {len(docs)} of {total:,} (--limit).', err=True)


@command.command('show')
@click.argument('name', metavar='ID')
@click.option('--json', 'as_json', is_flag=True, help='One JSON object a line.')
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a dead letter, with its message decoded. ID is that of its task or of its document, or how it begins."""
    jobs = jobs_of(ctx)
    show(shown(jobs, _named(jobs, [name]), as_json))


def _choosing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what says which dead letters it is about."""
    for decorator in (
        click.option('--yes', '-y', is_flag=True, help='Do not ask.'),
        click.option('--all', 'every', is_flag=True, help='All dead letters of all queues.'),
        click.option('--queue', '-Q', metavar='NAME', help='All dead letters of this queue.'),
        click.argument('names', metavar='[ID…]', nargs=-1),
    ):
        function = decorator(function)
    return function


@command.command('replay')
@_choosing
@click.pass_context
def replay(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Give dead letters back to their queues, at the end, as if they had never been delivered.

    ID is that of a task or of a document, or how it begins. What they may have left as results is forgotten, and they do not
    expire any more.
    """
    jobs = jobs_of(ctx)
    refused: dict[str, str] = {}

    def back(docs: Sequence[Document]) -> int:
        done, left = jobs.replay(docs)
        refused.update(left)
        return len(done)

    done, _ = _each(jobs, names, queue, every, yes, 'Replay', back)
    for name, reason in refused.items():
        say(f'{name}: {reason}', err=True)
    say(f'{done:,} replayed.')
    if refused:
        ctx.exit(1)


@command.command('drop')
@_choosing
@click.pass_context
def drop(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Delete dead letters for good. ID is that of a task or of a document, or how it begins."""
    jobs = jobs_of(ctx)
    done, chosen = _each(jobs, names, queue, every, yes, 'Drop', lambda docs: dead.drop(jobs.client, docs))
    say(f'{done:,} dropped.')
    if done < chosen:
        raise click.ClickException(f'{chosen - done:,} were changed by somebody else just now')


def _named(jobs: Jobs, names: Sequence[str]) -> list[Document]:
    found: dict[str, Document] = {}
    for name in names:
        full = whole(jobs.client, name, dead=True)
        letters = [dead.as_letter(doc) for doc in find(jobs.client, full) if dead.is_letter(doc)]
        if not letters:
            raise click.ClickException(f'there is no dead letter {name!r}')
        found |= {doc['_id']: doc for doc in letters}
    return list(found.values())


def _each(
    jobs: Jobs,
    names: Sequence[str],
    queue: str | None,
    every: bool,
    yes: bool,
    verb: str,
    act: Callable[[Sequence[Document]], int],
) -> tuple[int, int]:
    """Ask, and do something with the dead letters that were chosen, some at a time.

    Return the sum of what it returns, and how many were chosen.
    """
    if sum((bool(names), queue is not None, every)) != 1:
        raise click.UsageError('Name dead letters by id, or give --queue NAME, or --all.')
    named, now = _named(jobs, names), jobs.client.clock.now()
    # What dies again meanwhile is for the next time.
    letters: Iterator[Document] = (
        iter(named) if names else (doc for doc in dead.letters(jobs.client, queue) if not _died_after(doc, now))
    )
    total = len(named) or dead.count(jobs.client, queue)
    if not total:
        return 0, 0
    which = f'{total:,} dead letter{"s" if total > 1 else ""}' + (f' of queue {queue}' if queue else '')
    if len(named) == 1:
        which = f'dead letter {task_id(named[0]) or named[0]["_id"]}'
    if not yes:
        asked(f'{verb} {which}?')
    done = chosen = 0
    with click.progressbar(length=total, label=verb, file=sys.stderr) if total > _MANY else nullcontext() as bar:
        while part := list(islice(letters, _BATCH)):
            done += act(part)
            chosen += len(part)
            if bar:
                bar.update(len(part))
    return done, chosen


def _died_after(doc: Document, date: float) -> bool:
    failed = doc.get('failed')
    return isinstance(failed, (int, float)) and failed > date
