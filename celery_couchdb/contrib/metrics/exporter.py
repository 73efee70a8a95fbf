"""The metrics of a status in Prometheus' text format: of queues, consumers and databases, and of tasks.

The package prometheus_client is optional, so it is imported only when metrics are exported.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kombu_couchdb.admin.status import ConsumerStatus, Status
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

from ...cli.clients import result_of, start
from ...cli.tables import echo
from .counters import BOUNDS, HISTOGRAMS, counts_in

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

#: How the names of all metrics begin.
PREFIX = 'celery_couchdb_'

#: The states of messages, which are members of a queue.
_STATES = ('ready', 'scheduled', 'parked', 'prefetched', 'running', 'dead')


class Scrape(NamedTuple):
    """A status, and how many seconds the requests for it took."""

    status: Status
    seconds: float


def families(reading: Scrape, queues: Collection[str] = ()) -> Iterator[Metric]:
    """Yield the metrics of a status.

    Only those of `queues` are exported, if there are any; otherwise those of all queues but temporary ones, whose names
    are new each time.
    """
    found = reading.status
    server, consumers = found['server'], found['consumers']
    yield gauge('server_info', 'The server of the broker.', 1, vendor=server['vendor'], version=server['version'])
    yield gauge('reading_seconds', 'How long the requests for these metrics took.', reading.seconds)
    yield from _queues(found, queues)
    yield gauge('malformed_messages', 'Dead letters whose queue cannot be read.', found['malformed'])
    alive = sum(consumer['alive'] for consumer in consumers)
    yield _gauges(
        'consumers',
        'Consumers with a current lease (alive), and those without a heartbeat in time (overdue).',
        ['state'],
        [(['alive'], alive), (['overdue'], len(consumers) - alive)],
    )
    yield _gauges(
        'leader_renewed_seconds',
        'How long ago the leader of a duty, such as beat, has renewed its lease.',
        ['duty'],
        [([leader['duty']], leader['renewed']) for leader in found['leaders']],
    )
    yield from _databases(found)
    yield from _tasks(consumers, queues)


def gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    """Return a metric with one sample."""
    return _gauges(name, text, list(labels), [(list(labels.values()), value)])


def _gauges(
    name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float | None]]
) -> Metric:
    """Return a metric with these samples: the values of the labels, and a number; None is left out.

    Labels have control characters as escapes, as all output of the commands has.
    """
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
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
        'Messages that are ready, scheduled, parked, prefetched or dead letters, and tasks that are running.',
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


def _tasks(consumers: Iterable[ConsumerStatus], queues: Collection[str]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    # A worker that was killed and started again may have two consumers for a while.
    workers = {one['name']: one for one in sorted(consumers, key=lambda one: -(one['heartbeat'] or 0)) if one['alive']}
    running = Counter((task['queue'], name) for name, one in workers.items() for task in one['running'])
    yield _gauges(
        'running_tasks',
        'Tasks that the worker reports as running, at most 100.',
        ['queue', 'worker'],
        [(labels, count) for labels, count in running.items() if not queues or labels[0] in queues],
    )
    total = CounterMetricFamily(
        f'{PREFIX}tasks', 'Tasks that ended, by outcome, since the worker started.', labels=['task', 'state', 'worker']
    )
    texts = {'run': 'How long tasks ran.', 'waited': 'How long messages waited from their publishing or due date on.'}
    names = {'run': 'task_run_seconds', 'waited': 'task_queue_seconds'}
    histograms = {
        name: HistogramMetricFamily(PREFIX + names[name], texts[name], labels=['task', 'worker']) for name in HISTOGRAMS
    }
    for worker, one in workers.items():
        for task, counts in counts_in(one['tasks']).items():
            labels = [printable(task), printable(worker)]
            for outcome, count in counts.outcomes.items():
                total.add_metric([labels[0], outcome, labels[1]], count)
            for name, family in histograms.items():
                histogram = counts.histograms[name]
                if any(histogram.counts):
                    buckets = list(zip(BOUNDS, accumulate(histogram.counts), strict=True))
                    family.add_metric(labels, buckets, histogram.sum)
    yield from (total, *histograms.values())


class Exporter:
    """The metrics of readings that scrapes share, a collector of prometheus_client. Thread-safe.

    `read` makes a reading and may raise `CouchDBError`. One that was made at most `keep` seconds ago is used again, and
    scrapes during a reading wait for it, but at most `timeout` seconds. So there is at most one reading at a time.
    """

    def __init__(self, read: Callable[[], Scrape], queues: Collection[str], timeout: float, keep: float) -> None:
        from prometheus_client import CollectorRegistry

        self._read, self._queues, self._timeout, self._keep = read, queues, timeout, keep
        self._lock = threading.Lock()
        self._reading: Future[Scrape] | None = None
        self._ended = float('-inf')
        self._responds = True
        #: Exports the metrics.
        self.registry = CollectorRegistry()
        self.registry.register(cast('Collector', self))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; only `up`, with the value 0, if there is no reading."""
        problem: CouchDBError | None = None
        try:
            reading = self.read()
        except CouchDBError as exc:
            problem = exc
        self._note(problem)
        yield gauge('up', 'Whether CouchDB responds and the status can be read.', float(problem is None))
        if problem is None:
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
