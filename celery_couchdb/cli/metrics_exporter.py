"""The metrics of a status, and the readings that scrapes share. Imports prometheus_client, which is optional."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kombu_couchdb.admin.status import Status
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

from .databases import result_of, start
from .tables import echo

#: The states of messages, which are members of a queue.
_STATES = ('ready', 'scheduled', 'parked', 'held', 'dead')


class Scrape(NamedTuple):
    """A status, and how many seconds the requests for it took."""

    status: Status
    seconds: float


def up(responds: bool) -> Metric:
    """Return the metric that says whether CouchDB responds. The others are missing if it does not."""
    return _gauge('up', 'Whether CouchDB responds and the status can be read.', float(responds))


def families(reading: Scrape, queues: Collection[str] = ()) -> Iterator[Metric]:
    """Yield the metrics of a status.

    Only those of `queues` are exported, if there are any; otherwise those of all queues but temporary ones, whose names
    are new each time.
    """
    found = reading.status
    server = {name: printable(str(found['server'][name])) for name in ('version', 'vendor')}
    yield InfoMetricFamily('celery_couchdb_server', 'The server of the broker.', server)
    yield _gauge('reading_seconds', 'How long the requests for these metrics took.', reading.seconds)
    yield from _queues(found, queues)
    yield _gauge('malformed_messages', 'Dead letters whose queue cannot be read.', found['malformed'])
    alive = sum(one['alive'] for one in found['consumers'])
    yield _gauges(
        'consumers',
        'Consumers with a current lease (alive), and those without a heartbeat in time (overdue).',
        ['state'],
        [(['alive'], alive), (['overdue'], len(found['consumers']) - alive)],
    )
    yield _gauges(
        'leader_renewed_seconds',
        'How long ago the leader of a duty, such as beat, has renewed its lease.',
        ['duty'],
        [([leader['duty']], leader['renewed']) for leader in found['leaders']],
    )
    yield from _databases(found)


def _gauge(name: str, text: str, value: float) -> Metric:
    return _gauges(name, text, (), [((), value)])


def _gauges(
    name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float | None]]
) -> Metric:
    """Return a metric with these samples: the values of the labels, and a number; None is left out.

    Labels have control characters as escapes, as all output of the commands has.
    """
    family = GaugeMetricFamily(f'celery_couchdb_{name}', text, labels=labels)
    for values, number in samples:
        if number is not None:
            family.add_metric([*map(printable, values)], number)
    return family


def _queues(found: Status, names: Collection[str]) -> Iterator[Metric]:
    exported: dict[str, Mapping[str, Any]] = {
        name: queue for name, queue in found['queues'].items() if (name in names if names else not queue['temporary'])
    }
    yield _gauges(
        'queue_messages',
        'Messages by state: ready now, scheduled for later, parked by a limit, held by a worker, or dead letters.',
        ['queue', 'state'],
        [([name, state], queue[state]) for name, queue in exported.items() for state in _STATES],
    )
    consuming = [name for one in found['consumers'] if one['alive'] for name in set(one['queues'])]
    values: list[tuple[str, str, Callable[[str], float]]] = [
        (
            'oldest_seconds',
            'How long the oldest ready message has been due; 0 without ready messages.',
            lambda name: exported[name]['oldest'] or 0.0,
        ),
        (
            'acknowledged_per_second',
            'Messages acknowledged per second, between the last two heartbeats of each consumer.',
            lambda name: exported[name]['rate'],
        ),
        ('consumers', 'Consumers of the queue with a current lease.', consuming.count),
        ('paused', 'Whether the queue is paused: 1 or 0.', lambda name: exported[name]['paused'] is not None),
    ]
    for metric, text, value in values:
        yield _gauges(f'queue_{metric}', text, ['queue'], [([name], value(name)) for name in exported])


def _databases(found: Status) -> Iterator[Metric]:
    given = {'broker': found['database'], 'broadcasts': found['broadcasts'], 'results': found['results']}
    databases: dict[str, Mapping[str, Any]] = {role: database for role, database in given.items() if database}
    for name, text, member in (
        ('documents', 'Documents in the database.', 'documents'),
        ('tombstones', 'Deleted documents that CouchDB keeps a record of.', 'tombstones'),
        ('size_bytes', 'The size of the files of the database.', 'size'),
        ('active_bytes', 'The size of the data in the files of the database.', 'active'),
    ):
        samples = [([database['name'], role], database[member]) for role, database in databases.items()]
        yield _gauges(f'database_{name}', text, ['database', 'role'], samples)


class Exporter(Collector):
    """The metrics of readings that scrapes share. Thread-safe. `registry` exports them.

    `read` makes a reading and may raise `CouchDBError`. One that was made at most `keep` seconds ago is used again, and
    scrapes during a reading wait for it, but at most `timeout` seconds. So there is at most one reading at a time.
    """

    def __init__(self, read: Callable[[], Scrape], queues: Collection[str], timeout: float, keep: float) -> None:
        self._read, self._queues, self._timeout, self._keep = read, queues, timeout, keep
        self._lock = threading.Lock()
        self._reading: Future[Scrape] | None = None
        self._ended = float('-inf')
        self._responds = True
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; only `up`, with the value 0, if there is no reading."""
        try:
            reading = self.read()
        except CouchDBError as exc:
            self._note(exc)
            yield up(False)
        else:
            self._note(None)
            yield up(True)
            yield from families(reading, self._queues)

    def describe(self) -> list[Metric]:
        """Return no names, so that the registration makes no reading."""
        return []

    def read(self) -> Scrape:
        """Return a reading that is recent enough; *raises* the errors of `read`, and `ServerUnavailable`."""
        with self._lock:
            if self._reading is None or (self._reading.done() and time.monotonic() - self._ended >= self._keep):
                self._reading = start(self._make)
            reading = self._reading
        return result_of(reading, self._timeout)

    def _make(self) -> Scrape:
        try:
            return self._read()
        finally:
            self._ended = time.monotonic()

    def _note(self, problem: CouchDBError | None) -> None:
        """Print one line when CouchDB stops responding, and one when it responds again."""
        with self._lock:
            changed, self._responds = self._responds is not (problem is None), problem is None
        if changed:
            echo(f'Error: {problem}' if problem else 'CouchDB responds again', err=True)
