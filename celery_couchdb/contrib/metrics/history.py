"""The history of the last day: what ended and what waited in each minute, in few documents of the broker's database.

One of the workers leads this duty. Once a minute it reads the heartbeats and the backlog of the queues, and adds what
is new to the document of the current ten minutes. A document is for a time of day, and the next day it is overwritten:
so there are at most 144, and no tombstones. Nothing is written in a minute in which no task ended and nothing waited.

The newest document also has the `totals` of each worker process up to which its counts are in the history: a new leader
goes on from there. A worker that stops leaves its last counts in the tombstone of its heartbeat. What a killed worker
counted after its last heartbeat is lost. Heartbeats are up to two minutes old while a worker is idle, so the end of a
task may be in a minute after its own; none is in two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypedDict

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.shapes import number
from kombu_couchdb.documents.ids import CONSUMER, HISTORY
from kombu_couchdb.documents.types import Stored
from kombu_couchdb.leases.leader import Duty, LeaderLease, Led
from kombu_couchdb.leases.worker_load import WorkerLoad
from kombu_couchdb.queues.backlog import backlog, internal
from kombu_couchdb.queues.store import Store

from .counters import OTHER, count_in, counts_in, since_in

#: The length of a minute, of what a document covers, and the number of documents of a day.
_MINUTE, _PERIOD, _SLOTS = 60.0, 600.0, 144

#: The lease of the leader in seconds. It is long, because each renewal is a write, and a late reading loses nothing.
_LEASE_SECONDS = 180.0

#: The most tasks, and the most queues, in a minute; those with the highest numbers.
_MAX_NAMES = 200

#: The longest `totals` that are kept, in bytes of JSON. With more, a new leader begins anew.
_MAX_TOTALS_BYTES = 500_000

#: How runs of a task end, as far as they are counted; and its numbers in a minute: these, and how many seconds it ran.
ENDS = ('succeeded', 'failed', 'retried', 'rejected')
TASK_NUMBERS = (*ENDS, 'seconds')

#: Such numbers of a task of which nothing is known.
_NOTHING = [0.0] * len(TASK_NUMBERS)

#: The numbers of a queue at the end of a minute.
_QUEUE_NUMBERS = ('ready', 'oldest', 'prefetched', 'running')

#: The counts of one process, by task: the numbers above.
_Counts = dict[str, list[float]]


class _Totals(TypedDict):
    """Up to which counts of a process the history goes."""

    since: float
    tasks: _Counts


class _Runs(TypedDict, total=False):
    """The runs of a task that ended in a minute, by outcome, and how many seconds they took."""

    succeeded: float
    failed: float
    retried: float
    rejected: float
    seconds: float


class _Minute(TypedDict):
    """A minute: what ended in it, by task, and the messages at its end, by queue."""

    tasks: dict[str, _Runs]
    queues: dict[str, dict[str, float]]


class _TenMinutesOptions(TypedDict, total=False):
    #: Only the newest: by Consumer, since when its process counts, and up to which counts they are in the history.
    totals: dict[str, Any]


class TenMinutes(_TenMinutesOptions, Stored):
    """Ten minutes of the history of tasks and queues."""

    _id: str
    type: Literal['History']
    #: When the first minute began.
    date: float
    #: By number, from 0 to 9.
    minutes: dict[str, _Minute]


class Minute(TypedDict):
    """One minute of the history."""

    #: When it began, in seconds since the epoch.
    date: float
    #: By task: how many ended, by outcome, and how many seconds they ran; only what is not 0.
    tasks: dict[str, dict[str, float]]
    #: By queue, at the end of the minute: messages that are ready and prefetched, running tasks, and for how long the
    #: oldest ready message was due; only what is not 0.
    queues: dict[str, dict[str, float]]


def read_history(client: Client, hours: float) -> list[Minute]:
    """Return the minutes of the last hours, at most 24, in which something happened, the oldest first; one request.

    *Raises* the errors of `Client`.
    """
    now = client.clock.now()
    earliest = now - min(hours * 3600, _SLOTS * _PERIOD)
    periods = range(int(earliest // _PERIOD), int(now // _PERIOD) + 1)
    docs = client.find(sorted({_id_of(period * _PERIOD) for period in periods}))
    minutes = (minute for doc in docs if doc for minute in _minutes_of(doc))
    return sorted((minute for minute in minutes if minute['date'] > earliest - _MINUTE), key=lambda each: each['date'])


def _minutes_of(doc: Document) -> Iterator[Minute]:
    """Yield the minutes of a document, which may be malformed."""
    date, minutes = doc.get('date'), doc.get('minutes')
    if not number(date) or not isinstance(minutes, dict):
        return
    for name, found in minutes.items():
        if name in map(str, range(10)) and isinstance(found, dict):
            tasks, queues = _numbers(found.get('tasks'), TASK_NUMBERS), _numbers(found.get('queues'), _QUEUE_NUMBERS)
            yield {'date': float(date or 0) + int(name) * _MINUTE, 'tasks': tasks, 'queues': queues}


def _numbers(found: Any, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return those numbers by key that are in a part of a document."""
    if not isinstance(found, dict):
        return {}
    return {
        key: {name: value for name in names if (value := count_in(each, name))}
        for key, each in found.items()
        if isinstance(each, dict)
    }


def _id_of(date: float) -> str:
    return f'{HISTORY}{int(date // _PERIOD) % _SLOTS:03}'


class History(Duty):
    """Writes the history. Use it in one thread. *Every* method raises the errors of `Client`."""

    process = 'this worker'

    def __init__(self, client: Client) -> None:
        super().__init__(LeaderLease(client, 'history', lease=_LEASE_SECONDS))
        self._client = client
        self._revs: dict[str, str] = {}  # of all documents, by id
        self._newest: Document = {}  # the document with the totals
        self._totals: dict[str, _Totals] | None = None  # by id of the consumer; None: nothing is known
        self._due = 0.0

    def work(self, *, stale: bool) -> float:
        """Read and write if a minute has passed; return the seconds until the next minute."""
        if stale:
            self._go_on()
        if stale or time.monotonic() >= self._due:
            self._read()
            self._due = time.monotonic() + _MINUTE - self._client.clock.now() % _MINUTE
        return self._due - time.monotonic()

    def _go_on(self) -> None:
        """Take over what the last leader has written."""
        docs = [row['doc'] for row in self._client.id_range(HISTORY, docs=True)]
        self._revs = {doc['_id']: doc['_rev'] for doc in docs}
        with_totals = [doc for doc in docs if number(doc.get('date')) and isinstance(doc.get('totals'), dict)]
        self._newest = max(with_totals, key=lambda doc: float(doc['date']), default={})
        self._totals = _totals_of(self._newest['totals']) if self._newest else None

    def _read(self) -> None:
        now = self._client.clock.now()
        heartbeats = [row['doc'] for row in self._client.id_range(CONSUMER, docs=True)]
        read = {doc['_id']: _counts_of(doc) for doc in heartbeats if doc.get('type') == 'Consumer'}
        if self._totals is None:  # the history begins now
            self._totals = read
        tasks, totals = self._new(self._totals, read)
        minute: _Minute = {'tasks': tasks, 'queues': self._queues(heartbeats, now)}
        if minute['tasks'] or minute['queues']:
            self._write(minute, totals, now)
        self._totals = totals

    def _new(
        self, before: Mapping[str, _Totals], read: Mapping[str, _Totals]
    ) -> tuple[dict[str, _Runs], dict[str, _Totals]]:
        """Return what is new in the counts that were `read`, by task, and the new totals."""
        pairs: list[tuple[_Counts, _Counts]] = []
        known = dict(before)
        for consumer, found in read.items():
            pairs.append((found['tasks'], _pop(known, consumer, found['since'])))
        for (_, last), found in zip(known.items(), self._last_counts(list(known)), strict=True):
            if found['since'] == last['since']:
                pairs.append((found['tasks'], last['tasks']))
        new: dict[str, list[float]] = {}
        for counts, base in pairs:
            for task, numbers in counts.items():
                more = [max(0.0, value - old) for value, old in zip(numbers, base.get(task, _NOTHING), strict=True)]
                if any(more):
                    new[task] = [value + old for value, old in zip(more, new.get(task, _NOTHING), strict=True)]
        return _shortened(new), {consumer: found for consumer, found in read.items() if found['tasks']}

    def _last_counts(self, consumers: list[str]) -> Iterator[_Totals]:
        """Yield the last counts of consumers whose heartbeats are gone: those that stopped have left them behind."""
        for doc_id, leaves in zip(consumers, self._client.fetch_leaves(consumers), strict=True):
            # The embedded server's _bulk_get leaves out documents that are deleted.
            found = [leaf for leaf in leaves or self._client.leaves(doc_id) if isinstance(leaf.get('tasks'), dict)]
            yield _counts_of(found[0] if found else {})

    def _queues(self, heartbeats: list[Document], now: float) -> dict[str, dict[str, float]]:
        waiting, load = backlog(self._client), WorkerLoad(Store(self._client).claim_counts(), heartbeats, now)
        found: dict[str, dict[str, float]] = {}
        for name in {*waiting, *load.prefetched, *load.running}:
            oldest = waiting[name]['oldest'] if name in waiting else None
            numbers = {
                'ready': waiting[name]['ready'] if name in waiting else 0,
                'oldest': round(oldest or 0.0, 1),
                'prefetched': load.prefetched[name],
                'running': load.running[name],
            }
            if numbers := {key: value for key, value in numbers.items() if value}:
                found[name] = numbers
        for name in internal(self._client, found):
            del found[name]
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values()))[:_MAX_NAMES])

    def _write(self, minute: _Minute, totals: dict[str, _Totals], now: float) -> None:
        """Add a minute to the document of these ten minutes; *raises* an error if it was not stored."""
        # The minute that has just passed, except at the beginning of a term: then the one that passes.
        at = now - _MINUTE / 2
        date = at // _PERIOD * _PERIOD
        before = self._newest if self._newest.get('date') == date else {}
        minutes, name = before.get('minutes'), str(int((at - date) // _MINUTE))
        if not isinstance(minutes, dict):
            minutes = {}
        doc: TenMinutes = {
            '_id': _id_of(date),
            'type': 'History',
            'date': date,
            'minutes': {**minutes, name: _sum(minutes[name], minute) if name in minutes else minute},
        }
        if len(json.dumps(totals)) <= _MAX_TOTALS_BYTES:
            doc['totals'] = dict(totals)
        if rev := self._revs.get(doc['_id']):
            doc['_rev'] = rev
        docs: list[Mapping[str, Any]] = [doc]
        if self._newest and self._newest['_id'] != doc['_id']:
            docs.append({key: value for key, value in self._newest.items() if key != 'totals'})
        self.check_term()
        for each, result in zip(docs, self._client.bulk(docs), strict=True):
            if not result.is_stored:
                raise result.exception(self._client.address.url)
            self._revs[each['_id']] = result.rev
        self._newest = {**doc, '_rev': self._revs[doc['_id']]}


def _counts_of(doc: Document) -> _Totals:
    """Return the counts of a heartbeat or of its tombstone, which may be malformed."""
    counts: _Counts = {}
    for task, found in counts_in(doc.get('tasks')).items():
        numbers = [float(found.outcomes[name]) for name in ENDS]
        counts[task] = [*numbers, round(found.histograms['run'].sum, 3)]
    return {'since': since_in(doc.get('tasks')), 'tasks': counts}


def _totals_of(found: Mapping[str, Any]) -> dict[str, _Totals]:
    """Return the totals that a document has; it may be malformed."""
    totals: dict[str, _Totals] = {}
    for consumer, each in found.items():
        tasks = each.get('tasks') if isinstance(each, dict) else None
        if isinstance(tasks, dict):
            known = {
                task: [float(value) for value in numbers]
                for task, numbers in tasks.items()
                if isinstance(numbers, list) and len(numbers) == len(TASK_NUMBERS) and all(map(number, numbers))
            }
            totals[consumer] = {'since': count_in(each, 'since'), 'tasks': known}
    return totals


def _pop(known: dict[str, _Totals], consumer: str, since: float) -> _Counts:
    """Remove and return the totals of the process of a consumer; it may have had another lease before."""
    process = consumer.rpartition(':')[0] + ':'
    for name in [consumer, *(each for each in known if each.startswith(process))]:
        if name in known and known[name]['since'] == since:
            return known.pop(name)['tasks']
    return {}


def _shortened(counts: Mapping[str, list[float]]) -> dict[str, _Runs]:
    """Return numbers by task, without zeros; those of the least frequent tasks together, if there are many."""
    order = sorted(counts, key=lambda task: (task == OTHER, -sum(counts[task][: len(ENDS)])))
    named, others = order[: _MAX_NAMES - 1], order[_MAX_NAMES - 1 :]
    found = {task: counts[task] for task in named}
    if others:
        found[OTHER] = [sum(values) for values in zip(*(counts[task] for task in others), strict=True)]
    return {task: _without_zeros(dict(zip(TASK_NUMBERS, numbers, strict=True))) for task, numbers in found.items()}


def _sum(old: Any, new: _Minute) -> _Minute:
    """Return a minute of which a part was written before: its tasks are added up."""
    before = _numbers(old.get('tasks') if isinstance(old, dict) else None, TASK_NUMBERS)
    after: Mapping[str, Mapping[str, Any]] = new['tasks']
    tasks = {
        task: _without_zeros(
            {name: sum(each.get(task, {}).get(name, 0.0) for each in (before, after)) for name in TASK_NUMBERS}
        )
        for task in {*before, *after}
    }
    return {'tasks': tasks, 'queues': new['queues']}


def _without_zeros(numbers: Mapping[str, float]) -> _Runs:
    rounded = {name: round(value, 3) for name, value in numbers.items() if value}
    return {name: int(value) if value == int(value) else value for name, value in rounded.items()}  # type: ignore[return-value]


# -- the thread of a worker


def loop(app: Any) -> Led:
    """Return the loop of a worker that writes the history when it leads."""

    def duty(connection: Any, wake: Callable[[], None]) -> History:
        return History(connection.connection.couchdb)

    return Led(
        app.connection_for_write(),
        duty,
        'the history of tasks is not written',
        'the history of tasks is written again',
    )
