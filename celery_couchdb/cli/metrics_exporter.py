"""The metrics of a status, and the HTTP server that exports them. Imports prometheus_client, which is optional."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from kombu_couchdb.admin.status import Status
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

from .databases import result_of, start
from .tables import echo

#: How long a client may take to send its request and to read the response, in seconds, beside the time of a reading.
_CLIENT_SECONDS = 10.0

#: The most clients at a time, each of which has a thread. The server closes the connections of others at once.
_MAX_CLIENTS = 20

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
        self._read, self._queues, self.timeout, self._keep = read, queues, timeout, keep
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
        return result_of(reading, self.timeout)

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


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves an exporter's metrics under every path, each request in a thread. *Raises* `OSError` if it cannot listen.

    `address` is a host, '' for every interface, and a port, 0 for any free one.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], exporter: Exporter) -> None:
        host, port = address
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, where = found[0]
        super().__init__(where[:2], _Handler)  # type: ignore[arg-type]
        self.set_app(make_wsgi_app(exporter.registry))
        self._client_seconds = _CLIENT_SECONDS + exporter.timeout
        #: The monotonic time from which a client is cut off, by its connection.
        self._clients: dict[Any, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread, unless there are too many."""
        if len(self._clients) >= _MAX_CLIENTS:
            self.shutdown_request(request)
        else:
            self._clients[request] = time.monotonic() + self._client_seconds
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off the clients that take too long; the server calls this twice a second."""
        for request, until in self._clients.copy().items():
            if time.monotonic() >= until:
                with suppress(OSError):  # it is closed at this moment
                    request.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        host, port = map(str, self.socket.getsockname()[:2])
        return f'http://{f"[{host}]" if ":" in host else host}:{port}/metrics'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up or send nothing; print the traceback of other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line for each scrape would hide the others."""
