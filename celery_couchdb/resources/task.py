"""The resource of one task: all that its messages in the queues, its result, its chord and the workers say about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from celery import states

from kombu_couchdb.admin.jobs import STATES, choose, complete, find
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.documents.ids import RATE
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.values import is_number

from ..backend import CouchDBBackend
from ..connections import backend_of, has_our_broker
from ..jobs import Jobs
from ..rooms import rooms
from ..stored_results import StoredResult, StoredResults
from ..worker.history import tries_in
from .columns import Lines, Row, format_dated, json_line
from .jobs import job_resource
from .resource import Resource

#: The headers that the details show.
_HEADERS = ('origin', 'timelimit', 'ignore_result', 'shadow', 'stamps')

#: The events of a message, in the order in which they happen, and the members of its description with their dates.
_EVENTS = {
    'published': 'published to queue {queue}{retry}',
    'due': 'due',
    'claimed': 'claimed by {worker}',
    'started': 'claimed by {worker}',
    'finished': 'finished by {worker}',
    'failed': 'became a dead letter: {reason}',
    'expires': 'the message expires',
}


class TaskSources(NamedTuple):
    """Where the messages and the results of an app are; None stands for a broker or a backend that is not ours."""

    jobs: Jobs | None
    results: StoredResults | None

    @classmethod
    def of(cls, app: Any, broker: Client | None, results: Client | None) -> TaskSources:
        """Use the clients for the broker's database and that of results, or create them.

        *Raises* `ConfigurationError` if neither is CouchDB, or if one of them cannot be loaded.
        """
        jobs = Jobs(app, broker, results) if has_our_broker(app) else None
        stored = StoredResults(app, results) if isinstance(backend_of(app), CouchDBBackend) else None
        if jobs is None and stored is None:
            raise ConfigurationError(
                'neither the broker nor the result backend of this app is CouchDB: set broker_url or result_backend to '
                'couchdb://…, or name the app with celery -A'
            )
        return cls(jobs, stored)

    def now(self) -> float:
        """Return the server's time, in seconds since the epoch."""
        source = self.jobs or self.results
        assert source is not None
        return source.client.clock.now()


class FoundTask(NamedTuple):
    """A task with its messages and its result, as they were read."""

    id: str
    docs: Sequence[Document]
    result: StoredResult | None
    #: Celery's answer which workers have a task that is in no queue: `{worker: 'active', 'reserved' or 'ready'}`.
    workers: Mapping[str, str]
    #: What optional rooms know of a task that was sent elsewhere, see `rooms`.
    elsewhere: Sequence[Row]


def task_resource(sources: TaskSources, now: float) -> Resource[FoundTask]:
    """Return the resource of tasks; `now` is in seconds since the epoch."""
    return Resource(lambda found: [_describe(sources, task, now) for task in found], details=partial(_details, now=now))


def without_arguments(task: Row) -> Row:
    """Return the description of a task without its arguments, result value and documents, for those who may not see."""
    hidden = dict.fromkeys(('args', 'kwargs', 'body', 'documents'))
    messages = [{**message, **dict.fromkeys(('args', 'kwargs', 'body', 'headers'))} for message in task['messages']]
    result = task['result'] and {**task['result'], **dict.fromkeys(('args', 'kwargs', 'result'))}
    return {**task, **hidden, 'messages': messages, 'result': result}


def find_task(sources: TaskSources, name: str) -> FoundTask:
    """Return the task with the id `name`, or the task whose message has this document id, or whose id begins with it.

    Two to four requests for a full id, up to eleven for the beginning of one, and those of optional rooms. The workers
    are asked, for a second, only about a task that is in no queue, has not ended, and was not sent elsewhere.
    *Raises* `ConfigurationError` if there is none, or if the id is too short or ambiguous.
    """
    if (found := _exactly(sources, name)) is None:
        full = choose(name, partial(_complete, sources, name))
        found = _exactly(sources, full) if full else None
    if found is None or not (
        found.docs or found.elsewhere or (found.result and found.result.state in states.READY_STATES)
    ):
        task_id = found.id if found else name
        workers = sources.jobs.workers(task_id) if sources.jobs else {}
        if found is None and not workers:
            raise ConfigurationError(
                f'nothing is known of a task {name!r}: it has no message, no result, and no worker has it. It has '
                f'ended or expired, or was removed, or was never here'
            )
        found = FoundTask(task_id, (), found.result if found else None, workers, ())
    return found


def _exactly(sources: TaskSources, name: str) -> FoundTask | None:
    docs = find(sources.jobs.client, name) if sources.jobs else []
    task_id = next(filter(None, map(workitem.task_id, docs)), name)
    result = sources.results.get(task_id) if sources.results else None
    elsewhere = [row for row in _elsewhere(sources, task_id) if row['id'] == task_id]
    return FoundTask(task_id, docs, result, {}, elsewhere) if docs or result or elsewhere else None


def _complete(sources: TaskSources, start: str) -> set[str]:
    messages = complete(sources.jobs.client, start) if sources.jobs else []
    results = sources.results.complete(start) if sources.results else []
    return {*messages, *(result.id for result in results), *(row['id'] for row in _elsewhere(sources, start))}


def _elsewhere(sources: TaskSources, start: str) -> list[Row]:
    jobs = sources.jobs
    return [row for room in rooms() if jobs for row in room.whereabouts(jobs, start)]


# -- the description


def _describe(sources: TaskSources, task: FoundTask, now: float) -> Row:
    """Return all that is known of a task. Dates are seconds since the epoch."""
    messages = list(job_resource(sources.jobs).describe(task.docs)) if sources.jobs else []
    first = min(messages, key=lambda row: STATES.index(row['state']), default=None)
    result = task.result
    headers = next((found for doc in task.docs if (found := headers_of(doc))), {})
    meta: Mapping[str, Any] = result.meta if result else {}
    group = headers.get('group') or meta.get('group_id')
    progress = sources.results.chord_progress(group) if sources.results and group and isinstance(group, str) else None
    state, where, date = _state(first, task)
    shown, error = first or {}, next((found for doc in task.docs if (found := dead_letter.error_in(doc))), {})
    return {
        'id': task.id,
        'task': shown.get('task')
        or (result.task if result else None)
        or next((row['task'] for row in task.elsewhere), None),
        'state': state,
        'where': where,
        'date': date,
        'queue': shown.get('queue') or (result.queue if result else None),
        'priority': shown.get('priority'),
        'job_key': shown.get('job_key'),
        'args': shown['args'] if first else result.args if result else None,
        'kwargs': shown['kwargs'] if first else result.kwargs if result else None,
        'body': shown.get('body'),
        'unreadable': shown.get('unreadable'),
        'attempts': shown.get('attempts'),
        'retries': headers.get('retries') if first else result.retries if result else None,
        'error': _error(shown, result),
        'traceback': error.get('traceback') or (result.traceback if result else None),
        'worker': worker if isinstance(worker := error.get('worker'), str) else _worker(shown, task),
        'result': result and {**result.described(), 'expires': result.document.get('expires')},
        'group': group,
        'chord': progress and {'ended': progress[0], 'tasks': progress[1]},
        'parent': headers.get('parent_id') or meta.get('parent_id'),
        'root': headers.get('root_id'),
        'children': _children(meta),
        'headers': {name: value for name in _HEADERS if (value := headers.get(name)) and value != [None, None]},
        'timeline': _timeline(messages, result),
        'messages': messages,
        'workers': dict(task.workers),
        'elsewhere': list(task.elsewhere),
        'documents': {'messages': list(task.docs), 'result': result and result.document},
    }


def _state(message: Row | None, task: FoundTask) -> tuple[str, str, float | None]:
    """Return the state of a task, where it is, in words, and the date that belongs behind them, if there is one."""
    if message is None:
        holders = ', '.join(f'{worker} ({how})' for worker, how in task.workers.items())
        if holders:
            is_running = 'active' in task.workers.values()
            return 'running' if is_running else 'prefetched', f'acknowledged early, and with {holders}', None
        if task.elsewhere and not (task.result and task.result.state in states.READY_STATES):
            return 'elsewhere', '; '.join(row['text'] for row in task.elsewhere), None
        assert task.result is not None
        if task.result.state in states.READY_STATES:
            return 'gone', f'it has ended: {task.result.state}', None
        return 'gone', f'in no queue and with no worker that answers; its result is {task.result.state}', None
    queue, worker = message['queue'], message['worker']
    if message['behind']:
        return message['state'], f'in queue {queue}: waits behind a running job with its key', None
    ready = message['published'] if message['due'] is None else message['due']
    words, member = {
        'running': (f'runs at {worker} since', 'claimed'),
        'prefetched': (f'prefetched by {worker} since', 'claimed'),
        'scheduled': (f'in queue {queue}, due', 'due'),
        'parked': (f'in queue {queue}, waits for {_key(message["waits_for"])} since', 'parked'),
        'dead': (f'a dead letter of queue {queue} since', 'failed'),
        'done': (f'done by {worker}, finished', 'finished'),
        'gone': ('its message expired', 'expires'),
    }.get(message['state'], (f'in queue {queue}, can be claimed since', ''))
    date = message.get(member, ready)
    return (message['state'], words, date) if is_number(date) else (message['state'], f'{words} an unknown date', None)


def _key(key: Any) -> str:
    if isinstance(key, str) and key.startswith(RATE):
        return f'its turn at the rate {key.removeprefix(RATE)}'
    return f'a slot of the concurrency key {key}'


def _error(message: Row, result: StoredResult | None) -> str | None:
    """Return the last known error: that of a result, of the attempt before a retry, or the reason of a dead letter."""
    return (result.error if result else None) or message.get('error') or message.get('reason')


def _worker(message: Row, task: FoundTask) -> str | None:
    """Return the worker that has the task or had it last. A result knows its name, a claim perhaps only its process."""
    stored = task.result.worker if task.result else None
    found = [stored, message.get('worker')] if message.get('state') == 'dead' else [message.get('worker'), stored]
    return next((name for name in (*found, *task.workers) if name), None)


def _children(meta: Mapping[str, Any]) -> list[str]:
    """Return the ids of the tasks that a task has called, as far as its result says."""
    found = meta.get('children')
    ids = [child[0][0] for child in found if _is_child(child)] if isinstance(found, list) else []
    return [task_id for task_id in ids if isinstance(task_id, str)]


def _is_child(child: Any) -> bool:
    """Tell whether a value is a result as Celery stores it: `[[id, parent], children]`."""
    return isinstance(child, (list, tuple)) and bool(child) and isinstance(child[0], (list, tuple)) and bool(child[0])


def _timeline(messages: Sequence[Row], result: StoredResult | None) -> list[dict[str, Any]]:
    """Return what happened to a task and what will, each with its date, in this order."""
    events = [*dict.fromkeys(event for message in messages for event in _events(message))]
    if result is not None:
        events.append((result.date, f'result stored: {result.state}'))
        events.append((result.document.get('expires'), 'the result expires'))
    dated = [(date, text) for date, text in events if is_number(date)]
    return [{'date': date, 'event': text} for date, text in sorted(dated, key=lambda event: event[0])]


def _events(message: Row) -> Iterator[tuple[Any, str]]:
    headers = message['headers'] if isinstance(message['headers'], dict) else {}
    retries, tries = headers.get('retries'), tries_in(headers)
    first = retries - len(tries) + 1 if isinstance(retries, int) else 1
    for number, one in enumerate(tries, first):
        text = f'try {number} failed at {one.get("worker")}: {one.get("type")}: {one.get("text")}'
        yield one.get('date') if is_number(one.get('date')) else None, text
    texts = {name: message[name] if message[name] is not None else '?' for name in ('queue', 'worker', 'reason')}
    for name, event in _EVENTS.items():
        if is_number(message[name]) and not (name == 'expires' and message['state'] == 'done'):
            yield message[name], event.format(retry=f' (retry {retries})' if retries else '', **texts)


# -- the details


def _details(task: Row, now: float) -> Row:
    """Return the values in the details of a task, in the order in which people read them."""
    shown: dict[str, Any] = {
        **{name: task[name] for name in ('id', 'task', 'state')},
        'where': task['where'] if task['date'] is None else f'{task["where"]} {format_dated(task["date"], now)}',
        **{name: task[name] for name in ('queue', 'priority', 'job_key')},
        **{name: task[name] for name in ('args', 'kwargs', 'body', 'unreadable', 'attempts', 'retries')},
        'worker': task['worker'],
        'result': _outcome(task['result']),
        'error': task['error'],
        'traceback': _lines(task['traceback']),
        'group': task['group'],
        'chord': task['chord'] and f'{task["chord"]["ended"]:,} of {task["chord"]["tasks"]:,} tasks have ended',
        # A retry has itself as its parent, and the first task of a tree is its own root.
        **{name: task[name] for name in ('parent', 'root') if task[name] != task['id']},
        'children': [child for child in task['children'] if child != task['id']] or None,
        **task['headers'],
        'messages': _messages(task['messages']),
        'timeline': Lines(_event(event, now) for event in task['timeline']),
    }
    return {name: value for name, value in shown.items() if value is not None and value != ()}


def _outcome(result: Row | None) -> str | None:
    if result is None:
        return None
    return result['state'] if result['error'] is not None else f'{result["state"]}: {json_line(result["result"])}'


def _lines(text: Any) -> Lines:
    return Lines(str(text or '').rstrip().splitlines())


def _messages(messages: Sequence[Row]) -> Lines:
    """Return a line for each message if there are several, or the document id of the only one."""
    return Lines(f'{message["state"]} in queue {message["queue"]}: {message["document"]}' for message in messages)


def _event(event: Row, now: float) -> str:
    return f'{format_dated(event["date"], now)}: {event["event"]}'
