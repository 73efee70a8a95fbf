"""The command `celery couchdb metrics`: the status in Prometheus' text format, once or over HTTP.

The package prometheus_client is optional, so it is imported only when the command runs.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from kombu_couchdb.admin.status import Status, status
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

from .clients import app_of, broker_of, result_of, results_of, seconds_option, start
from .tables import echo, echo_styled

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

#: The states of messages, which are members of a queue.
_STATES = ('ready', 'scheduled', 'parked', 'prefetched', 'running', 'dead')


class Scrape(NamedTuple):
    """A status, and how many seconds the requests for it took."""

    status: Status
    seconds: float


def parse_address(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, int] | None:
    """Return host and port of `host:port`, `[::1]:port`, `:port` (every interface) or `port` (127.0.0.1)."""
    if text is None:
        return None
    host, colon, port = text.rpartition(':')
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535) or (':' in host and host[0] + host[-1] != '[]'):
        raise click.BadParameter(f'{text!r} is not an address; write host:port, for example 127.0.0.1:9808')
    return (host.strip('[]') if colon else '127.0.0.1'), int(port)


@click.command('metrics')
@click.option(
    '--listen',
    'address',
    metavar='HOST:PORT',
    callback=parse_address,
    help='Serve the metrics over HTTP, for example on 127.0.0.1:9808, instead of printing them once.',
)
@click.option(
    '--queue', '-Q', 'queues', metavar='NAME', multiple=True, help='Only this queue. Can be given several times.'
)
@seconds_option('--timeout', 8.0, 'How long a reading may take. Prometheus waits 10 seconds by default.')
@seconds_option('--keep', 5.0, 'With --listen: use a reading again for this time.', least=0.0)
@click.pass_context
def command(
    ctx: click.Context, address: tuple[str, int] | None, queues: tuple[str, ...], timeout: float, keep: float
) -> None:
    """Print metrics of queues, consumers and databases in Prometheus' text format.

    This needs the package prometheus_client: pip install 'celery-couchdb[metrics]'. One reading takes about ten
    requests for any number of queues. With --listen, readings are made only for scrapes, one at a time. While CouchDB
    does not respond, the only metric is celery_couchdb_up, with the value 0.
    """
    if find_spec('prometheus_client') is None:
        raise click.ClickException(
            "this command needs the package prometheus_client: pip install 'celery-couchdb[metrics]'"
        )
    from prometheus_client import generate_latest

    app = app_of(ctx)
    broker, results = broker_of(app, seconds=timeout), results_of(app, seconds=timeout)
    if results and results.address.url == broker.address.url:
        results = None  # the metrics of the broker's database have its size

    def read() -> Scrape:
        begun = time.monotonic()
        return Scrape(status(broker, results), time.monotonic() - begun)

    exporter = Exporter(read, queues, timeout, keep if address else math.inf)
    if address:
        _serve(exporter, *address)
    else:
        exporter.read()  # an error ends the command with one sentence
        echo_styled(generate_latest(exporter.registry).decode().rstrip('\n'))


def _serve(exporter: Exporter, host: str, port: int) -> None:
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, host or '0.0.0.0', exporter.registry)
    except OSError as exc:
        raise click.ClickException(f'cannot listen on {host}:{port}: {exc.strerror or exc}') from exc
    # As process 1 of a container, Python would ignore the signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, own_port = map(str, server.server_address[:2])
    echo(f'Serving metrics on http://{f"[{host}]" if ":" in host else host}:{own_port}/metrics', err=True)
    try:
        thread.join()
    except KeyboardInterrupt:
        pass


# -- the metrics


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
