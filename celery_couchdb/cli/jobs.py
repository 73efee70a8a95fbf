"""The commands `celery couchdb jobs`, `remove` and `dead`: list, show and change jobs, among them dead letters.

A dead letter is a job in the state `dead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import click
from celery import states
from celery.exceptions import ImproperlyConfigured

from kombu_couchdb.admin import dead
from kombu_couchdb.admin.edit import UNCHANGED
from kombu_couchdb.admin.jobs import STATES, complete, find
from kombu_couchdb.admin.listing import JobFilter, listing, workers_of
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import concurrency, workitem
from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.values import date_of

from ..jobs import Jobs, Unreadable
from ..worker.history import LAST_ERROR
from .clients import jobs_of
from .resource import (
    Resource,
    Selection,
    change,
    counted,
    json_option,
    limit_option,
    selection_options,
    since_option,
    yes_option,
)
from .tables import (
    Cell,
    Column,
    Duration,
    Json,
    Row,
    confirm,
    echo,
    format_ago,
    format_date,
    format_duration,
)

#: The minimum length of an abbreviated id, in characters.
_MIN_CHARACTERS = 4

#: The maximum number of ids that the error for an ambiguous abbreviation lists.
_MAX_LISTED = 10

#: The members of a job that are dates, and those that the details leave out.
_DATES = ('published', 'due', 'expires', 'claimed', 'failed', 'started', 'finished')
_HIDDEN = ('behind', 'headers')

_NOTES = {'behind': ' (waits behind one that runs)', 'gone': ' (it has expired)'}

_COLOURS = {'running': 'green', 'pending': None, 'scheduled': 'cyan', 'dead': 'red', 'done': 'blue', 'gone': None}


@click.group('jobs')
def command() -> None:
    """List jobs; show, move or edit one."""


@command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only jobs of this queue.')
@click.option('--task', metavar='NAME', help='List only jobs of the task with this name.')
@click.option(
    '--state',
    '-s',
    'states',
    multiple=True,
    type=click.Choice(STATES[:5]),
    help='List only jobs in this state. Can be given several times. Default: running, pending and scheduled.',
)
@since_option('List only jobs that were published, failed or finished')
@click.option('--args', metavar='TEXT', help='List only jobs whose arguments, as Python shows them, contain this text.')
@limit_option
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    queue: str | None,
    task: str | None,
    states: tuple[str, ...],
    age: float | None,
    args: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs: first the running ones, then the waiting ones in the order in which workers claim them.

    With --task, --since, --args or the state "done", the latest come first.
    """
    jobs = jobs_of(ctx)
    since = None if age is None else jobs.client.clock.now() - age
    _print_list(jobs, JobFilter(states or STATES[:3], queue, task, since, args), limit, as_json, 'There are none.')


def _print_list(jobs: Jobs, wanted: JobFilter, limit: int, as_json: bool, empty: str) -> None:
    _resource(jobs).print_list(listing(jobs.client, wanted, limit + 1), as_json, empty=empty, limit=limit)


@command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a job with its decoded message.

    ID is the id of the task or of the document, or its first characters.
    """
    jobs = jobs_of(ctx)
    name = _resolve_id(jobs.client, name)
    docs = find(jobs.client, name)
    if not docs:
        holders = ', '.join(f'{worker} ({how})' for worker, how in jobs.workers(name).items())
        raise click.ClickException(
            f'job {name!r} is not in a queue'
            + (
                f': it was acknowledged early, and is with {holders}'
                if holders
                else ' and with no worker: it is done, has expired or was removed, or was never here'
            )
        )
    _resource(jobs).show(docs, as_json)


@command.command('move')
@click.argument('name', metavar='ID')
@click.option('--queue', '-Q', metavar='NAME', help='Move the job to this queue, which must be declared.')
@click.option('--eta', metavar='DATE', help='Make it due at this date, such as 2026-01-31T08:00+01:00, or "now".')
@click.option('--countdown', metavar='SECONDS', type=Duration(), help='Make it due in so many seconds.')
@click.option('--priority', metavar='0-9', type=click.IntRange(0, 9), help='Give it this priority; 9 is the highest.')
@click.pass_context
def move_(
    ctx: click.Context,
    name: str,
    queue: str | None,
    eta: str | None,
    countdown: float | None,
    priority: int | None,
) -> None:
    """Move a waiting job to another queue, due date or priority.

    ID is the id of the task or of the document, or its first characters.
    """
    if eta is not None and countdown is not None:
        raise click.UsageError('Give --eta or --countdown, not both.')
    if all(given is None for given in (queue, eta, countdown, priority)):
        raise click.UsageError('Give --queue, --eta, --countdown or --priority.')
    date = UNCHANGED if eta is None else _date(eta)
    _change(
        ctx, name, lambda jobs, full: jobs.move(full, queue=queue, eta=date, countdown=countdown, priority=priority)
    )


@command.command('edit')
@click.argument('name', metavar='ID')
@click.option(
    '--args', metavar='JSON', type=Json(list), help='The positional arguments, as a JSON list: \'[1, "two"]\'.'
)
@click.option(
    '--kwargs', metavar='JSON', type=Json(dict), help='The keyword arguments, as a JSON object: \'{"name": "value"}\'.'
)
@click.pass_context
def edit_(ctx: click.Context, name: str, args: list[Any] | None, kwargs: dict[str, Any] | None) -> None:
    """Replace the arguments of a waiting job.

    ID is the id of the task or of the document, or its first characters. Without --args or --kwargs, these stay as they
    are.
    """
    if args is None and kwargs is None:
        raise click.UsageError('Give --args or --kwargs.')
    _change(ctx, name, lambda jobs, full: jobs.edit(full, args=args, kwargs=kwargs))


def _change(ctx: click.Context, name: str, act: Callable[[Jobs, str], Document]) -> None:
    """Change a job by `act(jobs, full id)` and show it."""
    jobs = jobs_of(ctx)
    try:
        doc = act(jobs, _resolve_id(jobs.client, name))
    except Unreadable as exc:
        raise click.ClickException(str(exc)) from exc
    _resource(jobs).show([doc], as_json=False)


def _date(text: str) -> datetime | None:
    if text == 'now':
        return None
    try:
        return date_of(text)
    except ValueError as exc:
        raise click.UsageError(
            f'--eta must be a date such as 2026-01-31T08:00+01:00, or "now", not {text!r:.80}'
        ) from exc


# -- remove


@click.command('remove')
@click.argument('names', metavar='ID…', nargs=-1, required=True)
@click.option('--terminate', '-t', is_flag=True, help='Stop running jobs, too: terminate their pool process.')
@click.option('--signal', default='SIGTERM', show_default=True, help='The signal that terminates the pool process.')
@yes_option
@click.pass_context
def remove_command(ctx: click.Context, names: tuple[str, ...], terminate: bool, signal: str, yes: bool) -> None:
    """Remove jobs by the ids of their tasks.

    ID is the id of a task, or its first characters. Pending and scheduled jobs are deleted for good, and their results
    become REVOKED. Jobs that a worker holds are revoked; with --terminate the worker also stops them if they run. An id
    that is in no queue is revoked, too, because a worker may be running the task. Dead letters are kept; see "dead
    drop". A job that is done is kept as it is.
    """
    jobs = jobs_of(ctx)
    names = tuple(_resolve_id(jobs.client, name) for name in names)
    if not yes:
        confirm(f'Remove {names[0]}?' if len(names) == 1 else f'Remove {len(names)} jobs?')
    left = 0
    for name in names:
        removal = jobs.remove(name, terminate=terminate, signal=signal)
        if removal.running:
            echo(f'{name}: a worker holds it; it was told to {"terminate" if terminate else "revoke"} it')
        elif removal.removed:
            echo(f'{name}: removed')
        elif removal.dead:
            left += 1
            echo(f'{name}: is a dead letter; see "dead drop"', err=True)
        elif removal.done and not removal.revoked:
            left += 1
            echo(f'{name}: is done: there is nothing to remove', err=True)
        else:
            echo(
                f'{name}: is not in a queue; the workers were told to {"terminate" if terminate else "revoke"} it, '
                f'should one run it'
            )
    if left:
        ctx.exit(1)


# -- dead letters


@click.group('dead')
def dead_command() -> None:
    """List, show, replay or drop dead letters."""


@dead_command.command('list')
@click.option('--queue', '-Q', metavar='NAME', help='List only dead letters of this queue.')
@limit_option
@json_option
@click.pass_context
def list_dead(ctx: click.Context, queue: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, the oldest of each queue first."""
    _print_list(jobs_of(ctx), JobFilter(['dead'], queue), limit, as_json, 'There are no dead letters.')


@dead_command.command('show')
@click.argument('name', metavar='ID')
@json_option
@click.pass_context
def show_dead(ctx: click.Context, name: str, as_json: bool) -> None:
    """Show a dead letter with its decoded message.

    ID is the id of the task or of the document, or its first characters.
    """
    jobs = jobs_of(ctx)
    _resource(jobs).show(_find_dead(jobs, [name]), as_json)


#: The options that select dead letters.
_dead_options = selection_options(
    'Select all dead letters of all queues.',
    click.option('--queue', '-Q', metavar='NAME', help='Select all dead letters of this queue.'),
)


@dead_command.command('replay')
@_dead_options
@click.pass_context
def replay_dead(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Put dead letters back at the end of their queues, as if they had never been delivered.

    ID is the id of a task or of a document, or its first characters. Stored results of these tasks are deleted, and the
    messages no longer expire.
    """
    jobs = jobs_of(ctx)

    def act(docs: Sequence[Document]) -> tuple[int, Mapping[str, str]]:
        replayed, refused = jobs.replay(docs)
        return len(replayed), refused

    change(ctx, 'Replay', _selected_dead(jobs, names, queue, every), act, 'replayed', yes=yes)


@dead_command.command('drop')
@_dead_options
@click.pass_context
def drop_dead(ctx: click.Context, names: tuple[str, ...], queue: str | None, every: bool, yes: bool) -> None:
    """Delete dead letters for good.

    ID is the id of a task or of a document, or its first characters.
    """
    jobs = jobs_of(ctx)
    selected = _selected_dead(jobs, names, queue, every)
    change(ctx, 'Drop', selected, lambda docs: (dead.drop(jobs.client, docs), {}), 'dropped', yes=yes)


def _find_dead(jobs: Jobs, names: Sequence[str]) -> list[Document]:
    found: dict[str, Document] = {}
    for name in names:
        full = _resolve_id(jobs.client, name, dead=True)
        letters = [dead.as_letter(doc) for doc in find(jobs.client, full) if dead.is_letter(doc)]
        if not letters:
            raise click.ClickException(f'there is no dead letter {name!r}')
        found |= {doc['_id']: doc for doc in letters}
    return list(found.values())


def _selected_dead(jobs: Jobs, names: Sequence[str], queue: str | None, every: bool) -> Selection[Document]:
    """Return dead letters; *raises* `UsageError` unless one of names, a queue, and all is given."""
    if sum((bool(names), queue is not None, every)) != 1:
        raise click.UsageError('Name dead letters by id, or give --queue NAME, or --all.')
    named, now = _find_dead(jobs, names), jobs.client.clock.now()
    # Skip messages that become dead letters while this runs: otherwise a replayed message that fails again would be
    # replayed forever.
    letters = named or (doc for doc in dead.letters(jobs.client, queue) if not _failed_after(doc, now))
    total = len(named) or dead.count(jobs.client, queue)
    which = counted(total, 'dead letter') + (f' of queue {queue}' if queue else '')
    if len(named) == 1:
        which = f'dead letter {workitem.task_id(named[0]) or named[0]["_id"]}'
    return Selection(which, letters, total)


def _failed_after(doc: Document, date: float) -> bool:
    failed = doc.get('failed')
    return isinstance(failed, (int, float)) and failed > date


# -- the resource


def _resource(jobs: Jobs) -> Resource[Document]:
    """Return the resource of jobs, which are given as items."""
    now = jobs.client.clock.now()
    columns = [
        Column('ID', None, lambda job: job['id'] or job['document'], min_width=36),
        Column('TASK', 'task', min_width=8),
        Column('QUEUE', 'queue', min_width=6),
        Column('STATE', None, _state),
        Column('WHEN', None, partial(_when, now=now), right=True),
        Column('TRY', 'attempts', right=True),
        Column('WORKER OR ERROR', None, _note, min_width=15),
    ]
    return Resource(
        partial(_describe_all, jobs, decode=jobs.decode),
        columns,
        summarize=partial(_describe_all, jobs, decode=lambda doc: None),
        details=partial(_details, now=now),
    )


def _resolve_id(client: Client, name: str, *, dead: bool = False) -> str:
    """Return the full id of the job whose id is `name` or begins with it. With `dead`, search dead letters only.

    Return `name` itself if there is no such job. *Raises* `ClickException` if several ids begin with `name`, or if one
    does and `name` has fewer than 4 characters.
    """
    if any(doc.get('status') or not dead for doc in find(client, name)):
        return name
    found = complete(client, name, dead=dead)
    if found and len(name) < _MIN_CHARACTERS:
        raise click.ClickException(f'{name!r} is too short: give at least {_MIN_CHARACTERS} characters of an id')
    if len(found) > 1:
        more = f' and {len(found) - _MAX_LISTED} more' if len(found) > _MAX_LISTED else ''
        raise click.ClickException(f'several ids begin with {name!r}: {", ".join(found[:_MAX_LISTED])}{more}')
    return found[0] if found else name


def _describe_all(jobs: Jobs, docs: Sequence[Document], decode: Callable[[Document], Any]) -> Iterator[Row]:
    """Yield all facts about jobs. Dates are seconds since the epoch."""
    workers, results = workers_of(jobs.client, docs), _results_of(jobs, docs)
    return (_describe(doc, jobs.client.clock.now(), decode, workers, results) for doc in docs)


def _results_of(jobs: Jobs, docs: Sequence[Document]) -> dict[str, str]:
    """Return the states of the results of the completed jobs among these, by task id: those that can be read."""
    done = [task_id for doc in docs if workitem.is_done(doc) and (task_id := workitem.task_id(doc))]
    try:
        return jobs.result_states(done) if done else {}
    except (CouchDBError, ImproperlyConfigured) as exc:
        echo(f'The states of the results are not shown: {exc}', err=True)
        return {}


def _describe(
    doc: Document,
    now: float,
    decode: Callable[[Document], Any],
    workers: Mapping[str, str],
    results: Mapping[str, str],
) -> Row:
    message = doc.get('message')
    try:
        body, unreadable = decode(doc), None
    except Unreadable as exc:
        body, unreadable = None, str(exc)
    task = isinstance(body, (list, tuple)) and len(body) == 3
    consumer = workitem.claimant(doc) or doc.get('consumer')
    # The details of a job have this order.
    return {
        'id': workitem.task_id(doc),
        'task': workitem.task_name(doc),
        'queue': doc.get('queue'),
        'state': workitem.state(doc, now),
        'behind': bool(doc.get('behind')),
        'result': results.get(workitem.task_id(doc) or '') if workitem.is_done(doc) else None,
        'job_key': doc.get('key'),
        'waits_for': concurrency.parked_key(doc),
        'priority': doc.get('priority'),
        'published': doc.get('published'),
        'due': doc.get('date'),
        'expires': doc.get('expires'),
        'attempts': doc.get('attempts'),
        'consumer': consumer,
        'worker': workers.get(consumer) if isinstance(consumer, str) else None,
        'claimed': doc['claimed'].get('date') if workitem.claimant(doc) else None,
        'started': doc.get('started'),
        'finished': doc.get('finished'),
        'reason': doc.get('reason'),
        'failed': doc.get('failed'),
        'error': _error(doc),
        'headers': message.get('headers') if isinstance(message, dict) else None,
        'args': body[0] if task else None,
        'kwargs': body[1] if task else None,
        'body': None if task else body,
        'unreadable': unreadable,
        'document': doc['_id'],
    }


def _error(doc: Document) -> str | None:
    """Return the error of the last attempt that a waiting retry carries, such as `ValueError: no such customer`."""
    error = headers_of(doc).get(LAST_ERROR)
    return f'{error.get("type")}: {error.get("text")}' if isinstance(error, dict) else None


def _details(job: Row, now: float) -> Row:
    shown = {name: value for name, value in job.items() if value is not None and name not in _HIDDEN}
    if shown['document'] == shown.get('id'):
        del shown['document']
    shown |= {name: _dated(shown[name], now) for name in _DATES if name in shown}
    shown['state'] += _NOTES.get('behind' if job['behind'] else job['state'], '')
    if 'consumer' in shown:
        shown['consumer'] = str(shown['consumer']).removeprefix(CONSUMER)
    return shown


def _dated(value: Any, now: float) -> str:
    date = format_date(value, form='%Y-%m-%d %H:%M:%S+00:00')
    if not isinstance(value, (int, float)):
        return date
    return f'{date} ({format_ago(value, now)} ago)' if value <= now else f'{date} (in {format_duration(value - now)})'


def _state(job: Row) -> Cell:
    state, result = job['state'], job['result']
    colour = 'red' if result in states.PROPAGATE_STATES else _COLOURS[state]
    return Cell(state if result is None else f'{state} ({result})', {'fg': colour} if colour else {})


def _when(job: Row, now: float) -> str:
    if job['state'] == 'scheduled':
        return f'in {format_duration(job["due"] - now)}'
    names = {'running': 'claimed', 'dead': 'failed', 'done': 'finished'}
    ready = job['published'] if job['due'] is None else job['due']
    return format_ago(job[names[job['state']]] if job['state'] in names else ready, now)


def _note(job: Row) -> str:
    if job['state'] in ('running', 'done'):
        return job['worker'] or ''
    return str((job['reason'] if job['state'] == 'dead' else job['error']) or '')
