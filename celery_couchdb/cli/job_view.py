"""Jobs and dead letters as output: tables, details of one job, and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from celery import states
from celery.exceptions import ImproperlyConfigured

from kombu_couchdb.admin.listing import workers_of
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents import concurrency, workitem
from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.errors import CouchDBError

from ..jobs import Jobs, Unreadable
from ..worker.history import LAST_ERROR
from .tables import NO_VALUE, Cell, Column, echo, format_duration, json_line, printable

__all__ = ['DEAD_LETTER_COLUMNS', 'JOB_COLUMNS', 'dead_letter_row', 'describe_all', 'format_jobs', 'job_rows']

#: The columns of `job_rows`.
JOB_COLUMNS = [
    Column('ID', min_width=36),
    Column('TASK', min_width=8),
    Column('QUEUE', min_width=6),
    Column('STATE'),
    Column('WHEN', right=True),
    Column('TRY', right=True),
    Column('WORKER OR ERROR', min_width=15),
]

#: The columns of `dead_letter_row`.
DEAD_LETTER_COLUMNS = [
    Column('ID', min_width=36),
    Column('TASK', min_width=6),
    Column('QUEUE', min_width=6),
    Column('AGE', right=True),
    Column('TRY', right=True),
    Column('REASON', min_width=10),
]

#: The maximum length of one value in the details of a job; longer values are cut.
_MAX_VALUE_CHARACTERS = 2000

_NOTES = {'behind': ' (waits behind one that runs)', 'gone': ' (it has expired)'}

_COLOURS = {'running': 'green', 'pending': None, 'scheduled': 'cyan', 'dead': 'red', 'done': 'blue', 'gone': None}


def describe_all(jobs: Jobs, docs: Sequence[Document]) -> list[dict[str, Any]]:
    """Return all facts about jobs as dictionaries for JSON. Dates are seconds since the epoch."""
    workers, results = workers_of(jobs.client, docs), _results_of(jobs, docs)
    return [_describe(jobs, doc, workers, results) for doc in docs]


def _results_of(jobs: Jobs, docs: Sequence[Document]) -> dict[str, str]:
    """Return the states of the results of the completed jobs among these, by task id: those that can be read."""
    done = [task_id for doc in docs if workitem.is_done(doc) and (task_id := workitem.task_id(doc))]
    try:
        return jobs.result_states(done) if done else {}
    except (CouchDBError, ImproperlyConfigured) as exc:
        echo(f'The states of the results are not shown: {exc}', err=True)
        return {}


def _describe(jobs: Jobs, doc: Document, workers: Mapping[str, str], results: Mapping[str, str]) -> dict[str, Any]:
    message = doc.get('message')
    headers = message.get('headers') if isinstance(message, dict) else None
    try:
        body, unreadable = jobs.decode(doc), None
    except Unreadable as exc:
        body, unreadable = None, str(exc)
    task = isinstance(body, (list, tuple)) and len(body) == 3
    consumer = workitem.claimant(doc) or doc.get('consumer')
    return {
        'id': workitem.task_id(doc),
        'document': doc['_id'],
        'task': workitem.task_name(doc),
        'queue': doc.get('queue'),
        'state': workitem.state(doc, jobs.client.clock.now()),
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
        'headers': headers,
        'args': body[0] if task else None,
        'kwargs': body[1] if task else None,
        'body': None if task else body,
        'unreadable': unreadable,
    }


def format_jobs(jobs: Jobs, docs: Sequence[Document], as_json: bool) -> str:
    """Return the details of jobs: with `as_json` one JSON object per line, otherwise one block of lines per job."""
    found = describe_all(jobs, docs)
    return (
        '\n'.join(map(json_line, found))
        if as_json
        else '\n\n'.join(_format_job(job, jobs.client.clock.now()) for job in found)
    )


def _format_job(job: Mapping[str, Any], now: float) -> str:
    """Return the details of a job, one value per line; `now` is in seconds since the epoch."""
    lines = []
    for name in (
        'id',
        'task',
        'queue',
        'state',
        'result',
        'job_key',
        'waits_for',
        'priority',
        'published',
        'due',
        'expires',
        'attempts',
        'consumer',
        'worker',
        'claimed',
        'started',
        'finished',
        'reason',
        'failed',
        'error',
        'args',
        'kwargs',
        'body',
        'unreadable',
        'document',
    ):
        value = job[name]
        if value is None or (name == 'document' and value == job['id']):
            continue
        if name == 'consumer':
            value = str(value).removeprefix(CONSUMER)
        if name in ('published', 'due', 'expires', 'claimed', 'failed', 'started', 'finished'):
            text = _format_date(value, now)
        elif name in ('args', 'kwargs', 'body'):
            text = json_line(value)
        else:
            text = str(value) + (_NOTES.get('behind' if job['behind'] else value, '') if name == 'state' else '')
        text = printable(text)
        if len(text) > _MAX_VALUE_CHARACTERS:
            text = f'{text[:_MAX_VALUE_CHARACTERS]}… (see --json)'
        lines.append(f'{name:<10} {text}')
    return '\n'.join(lines)


def _format_date(value: Any, now: float) -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    try:
        date = datetime.fromtimestamp(value, timezone.utc).isoformat(sep=' ', timespec='seconds')
    except (ValueError, OverflowError, OSError):
        return str(value)
    return (
        f'{date} ({format_duration(now - value)} ago)'
        if value <= now
        else f'{date} (in {format_duration(value - now)})'
    )


def _error(doc: Document) -> str | None:
    """Return the error of the last attempt that a waiting retry carries, such as `ValueError: no such customer`."""
    error = headers_of(doc).get(LAST_ERROR)
    return f'{error.get("type")}: {error.get("text")}' if isinstance(error, dict) else None


def job_rows(jobs: Jobs, docs: Sequence[Document], now: float) -> list[list[Cell | str]]:
    """Return jobs as rows of a table; `now` is in seconds since the epoch."""
    workers, results = workers_of(jobs.client, docs), _results_of(jobs, docs)
    rows: list[list[Cell | str]] = []
    for doc in docs:
        state = workitem.state(doc, now)
        rows.append(
            [
                workitem.task_id(doc) or doc['_id'],
                workitem.task_name(doc) or NO_VALUE,
                str(doc.get('queue')),
                _state(state, results.get(workitem.task_id(doc) or '') if state == 'done' else None),
                _when(doc, state, now),
                _attempts(doc),
                _note(doc, state, workers),
            ]
        )
    return rows


def _state(state: str, result: str | None) -> Cell:
    colour = 'red' if result in states.PROPAGATE_STATES else _COLOURS[state]
    return Cell(state if result is None else f'{state} ({result})', {'fg': colour} if colour else {})


def _note(doc: Document, state: str, workers: Mapping[str, str]) -> str:
    if state in ('running', 'done'):
        return workers.get(workitem.claimant(doc) or str(doc.get('consumer')), '')
    return str(doc.get('reason') or '') if state == 'dead' else _error(doc) or ''


def dead_letter_row(doc: Document, now: float) -> list[Cell | str]:
    """Return a dead letter as a row of a table; `now` is in seconds since the epoch."""
    return [
        workitem.task_id(doc) or doc['_id'],
        workitem.task_name(doc) or NO_VALUE,
        str(doc.get('queue')),
        _ago(doc.get('failed'), now),
        _attempts(doc),
        Cell(str(doc.get('reason')), {'fg': 'red'}),
    ]


def _attempts(doc: Document) -> str:
    return str(doc.get('attempts', NO_VALUE))


def _when(doc: Document, state: str, now: float) -> str:
    if state == 'scheduled':
        return f'in {format_duration(doc["date"] - now)}'
    if state == 'running':
        return _ago(doc['claimed'].get('date'), now)
    ended = {'dead': 'failed', 'done': 'finished'}
    return _ago(doc.get(ended[state]) if state in ended else workitem.ready_since(doc), now)


def _ago(date: Any, now: float) -> str:
    return format_duration(now - date) if isinstance(date, (int, float)) else NO_VALUE
