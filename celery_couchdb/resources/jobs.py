"""The resource of jobs, among them dead letters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from celery import states
from celery.exceptions import ImproperlyConfigured

from kombu_couchdb.admin.claimants import Claimants
from kombu_couchdb.admin.listing import workers_of
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.documents import concurrency, dead_letter, workitem
from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.documents.task_message import arguments_in, headers_of
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import get_logger

from ..jobs import Jobs, Unreadable
from ..worker.history import tries_in
from .columns import Cell, Column, Row, Tone, format_ago, format_dated, format_duration
from .resource import Resource

logger = get_logger(__name__)

#: The members of a job that are dates, and those that the details leave out.
_DATES = ('published', 'due', 'expires', 'parked', 'claimed', 'failed', 'started', 'finished')
_HIDDEN = ('behind', 'headers')

_NOTES = {'behind': ' (waits behind one that runs)', 'gone': ' (it has expired)'}

#: What the states mean to their readers.
STATE_TONES: Mapping[str, Tone] = {
    'running': 'good',
    'scheduled': 'info',
    'parked': 'warning',
    'dead': 'bad',
    'done': 'dim',
}


def job_resource(jobs: Jobs, *, arguments: bool = False) -> Resource[Document]:
    """Return the resource of jobs, which are given as items; with a column for their `arguments` on wish."""
    now = jobs.client.clock.now()
    columns = [
        Column('ID', None, lambda job: job['id'] or job['document'], min_width=9),
        Column('TASK', 'task', min_width=8),
        *(
            [Column('ARGUMENTS', 'headers', lambda headers: arguments_in(headers or {}), min_width=8)]
            if arguments
            else []
        ),
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


def without_arguments(job: Row) -> Row:
    """Return the description of a job without its arguments and its message, for those who may not see them."""
    return {**job, **dict.fromkeys(('args', 'kwargs', 'body', 'headers'))}


def stored_states(jobs: Jobs, task_ids: Collection[str]) -> dict[str, str]:
    """Return the states of the results of these tasks by id: those that are stored, and can be read."""
    try:
        return jobs.result_states(task_ids) if task_ids else {}
    except (CouchDBError, ImproperlyConfigured) as exc:
        logger.warning('the states of the results are not shown: %s', exc)
        return {}


def _describe_all(jobs: Jobs, docs: Sequence[Document], decode: Callable[[Document], Any]) -> Iterator[Row]:
    """Yield all facts about jobs. Dates are seconds since the epoch."""
    done = [task_id for doc in docs if workitem.is_done(doc) and (task_id := workitem.task_id(doc))]
    claimants = Claimants.of(jobs.client, docs)
    workers, results, now = workers_of(claimants, docs), stored_states(jobs, done), jobs.client.clock.now()
    return (_describe(doc, claimants.state(doc, now), decode, workers, results) for doc in docs)


def _describe(
    doc: Document,
    state: str,
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
        'state': state,
        'behind': bool(doc.get('behind')),
        'result': results.get(workitem.task_id(doc) or '') if workitem.is_done(doc) else None,
        'job_key': doc.get('key'),
        'waits_for': concurrency.parked_key(doc),
        'parked': doc['parked'].get('date') if concurrency.parked_key(doc) else None,
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
        'headers': headers_of(doc) if isinstance(message, dict) else None,
        'args': body[0] if task else None,
        'kwargs': body[1] if task else None,
        'body': None if task else body,
        'unreadable': unreadable,
        'document': doc['_id'],
    }


def _error(doc: Document) -> str | None:
    """Return the error of a task that failed, or that of the last attempt before a retry, such as `ValueError: no`."""
    error = dead_letter.error_in(doc) or next(reversed(tries_in(headers_of(doc))), {})
    return f'{error.get("type")}: {error.get("text")}' if error else None


def _details(job: Row, now: float) -> Row:
    shown = {name: value for name, value in job.items() if value is not None and name not in _HIDDEN}
    if shown['document'] == shown.get('id'):
        del shown['document']
    shown |= {name: format_dated(shown[name], now) for name in _DATES if name in shown}
    shown['state'] += _NOTES.get('behind' if job['behind'] else job['state'], '')
    if 'consumer' in shown:
        shown['consumer'] = str(shown['consumer']).removeprefix(CONSUMER)
    return shown


def _state(job: Row) -> Cell:
    state, result = job['state'], job['result']
    tone: Tone = 'bad' if result in states.PROPAGATE_STATES else STATE_TONES.get(state, '')
    return Cell(state if result is None else f'{state} ({result})', tone)


def date_of(job: Row) -> Any:
    """Return the date that counts in the state of a job; that of a malformed document may be anything."""
    names = {'running': 'claimed', 'prefetched': 'claimed', 'dead': 'failed', 'done': 'finished'}
    ready = job['published'] if job['due'] is None else job['due']
    return job[names[job['state']]] if job['state'] in names else ready


def _when(job: Row, now: float) -> str:
    date = date_of(job)
    return f'in {format_duration(date - now)}' if job['state'] == 'scheduled' else format_ago(date, now)


def _note(job: Row) -> str:
    if job['state'] in ('running', 'prefetched', 'done'):
        return job['worker'] or ''
    return str((job['reason'] if job['state'] == 'dead' else job['error']) or '')
