"""The resources of jobs and of dead letters, which are jobs in the state `dead`, and ids on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click
from celery import states
from celery.exceptions import ImproperlyConfigured

from kombu_couchdb.admin.jobs import complete, find
from kombu_couchdb.admin.listing import workers_of
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import concurrency, workitem
from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.errors import CouchDBError

from ..jobs import Jobs, Unreadable
from ..worker.history import LAST_ERROR
from .resource import Resource
from .tables import Cell, Column, Row, echo, format_ago, format_date, format_duration

#: The minimum length of an abbreviated id, in characters.
_MIN_CHARACTERS = 4

#: The maximum number of ids that the error for an ambiguous abbreviation lists.
_MAX_LISTED = 10

#: The members in the details of a job, in this order, and those of them that are dates.
_DETAILS = (
    *('id', 'task', 'queue', 'state', 'result', 'job_key', 'waits_for', 'priority', 'published', 'due', 'expires'),
    *('attempts', 'consumer', 'worker', 'claimed', 'started', 'finished', 'reason', 'failed', 'error', 'args'),
    *('kwargs', 'body', 'unreadable', 'document'),
)
_DATES = ('published', 'due', 'expires', 'claimed', 'failed', 'started', 'finished')

_NOTES = {'behind': ' (waits behind one that runs)', 'gone': ' (it has expired)'}

_COLOURS = {'running': 'green', 'pending': None, 'scheduled': 'cyan', 'dead': 'red', 'done': 'blue', 'gone': None}

_ID = Column('ID', None, lambda job: job['id'] or job['document'], min_width=36)
_QUEUE = Column('QUEUE', 'queue', min_width=6)
_TRY = Column('TRY', 'attempts', right=True)


def job_resource(jobs: Jobs) -> Resource[Document]:
    """Return the resource of jobs, which are given as items."""
    now = jobs.client.clock.now()
    when = Column('WHEN', None, partial(_when, now=now), right=True)
    state, note = Column('STATE', None, _state), Column('WORKER OR ERROR', None, _note, min_width=15)
    return _resource(jobs, now, [_ID, Column('TASK', 'task', min_width=8), _QUEUE, state, when, _TRY, note])


def dead_letter_resource(jobs: Jobs) -> Resource[Document]:
    """Return the resource of dead letters, which are given as items."""
    now = jobs.client.clock.now()
    age = Column('AGE', 'failed', partial(format_ago, now=now), right=True)
    reason = Column('REASON', 'reason', lambda reason: Cell(str(reason), {'fg': 'red'}), min_width=10)
    return _resource(jobs, now, [_ID, Column('TASK', 'task', min_width=6), _QUEUE, age, _TRY, reason])


def _resource(jobs: Jobs, now: float, columns: Sequence[Column]) -> Resource[Document]:
    return Resource(
        partial(_describe_all, jobs, decode=jobs.decode),
        columns,
        summarize=partial(_describe_all, jobs, decode=lambda doc: None),
        details=partial(_details, now=now),
    )


def resolve_id(client: Client, name: str, *, dead: bool = False) -> str:
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
    return {
        'id': workitem.task_id(doc),
        'document': doc['_id'],
        'task': workitem.task_name(doc),
        'queue': doc.get('queue'),
        'state': workitem.state(doc, now),
        'result': results.get(workitem.task_id(doc) or '') if workitem.is_done(doc) else None,
        'behind': bool(doc.get('behind')),
        'priority': doc.get('priority'),
        'published': doc.get('published'),
        'due': doc.get('date'),
        'expires': doc.get('expires'),
        'attempts': doc.get('attempts'),
        'consumer': consumer,
        'worker': workers.get(consumer) if isinstance(consumer, str) else None,
        'claimed': doc['claimed'].get('date') if workitem.claimant(doc) else None,
        'job_key': doc.get('key'),
        'waits_for': concurrency.parked_key(doc),
        'reason': doc.get('reason'),
        'failed': doc.get('failed'),
        'error': _error(doc),
        'started': doc.get('started'),
        'finished': doc.get('finished'),
        'headers': message.get('headers') if isinstance(message, dict) else None,
        'args': body[0] if task else None,
        'kwargs': body[1] if task else None,
        'body': None if task else body,
        'unreadable': unreadable,
    }


def _error(doc: Document) -> str | None:
    """Return the error of the last attempt that a waiting retry carries, such as `ValueError: no such customer`."""
    error = headers_of(doc).get(LAST_ERROR)
    return f'{error.get("type")}: {error.get("text")}' if isinstance(error, dict) else None


def _details(job: Row, now: float) -> Row:
    shown = {name: job[name] for name in _DETAILS if job[name] is not None}
    if shown['document'] == shown.get('id'):
        del shown['document']
    shown |= {name: _date(shown[name], now) for name in _DATES if name in shown}
    shown['state'] += _NOTES.get('behind' if job['behind'] else job['state'], '')
    if 'consumer' in shown:
        shown['consumer'] = str(shown['consumer']).removeprefix(CONSUMER)
    return shown


def _date(value: Any, now: float) -> str:
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
