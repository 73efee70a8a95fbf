"""The command `celery couchdb metrics`: the status in Prometheus' text format, once or over HTTP.

The package prometheus_client is optional, so it is imported only when the command runs.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from importlib.util import find_spec

import click

from kombu_couchdb.admin.status import Status, status

from ...cli.clients import app_of, broker_of, parse_address, results_of, seconds_option
from ...cli.tables import echo, echo_styled
from .exporter import Exporter, Scrape
from .history import read_history

__all__ = ['command', 'exposition', 'read_history']


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
    """Print metrics in Prometheus' text format.

    They are those of queues, consumers and databases. This needs the package prometheus_client: pip install
    'celery-couchdb[metrics]'. One reading takes about ten requests for any number of queues. With --listen, readings
    are made only for scrapes, one at a time. While CouchDB does not respond, the only metric is celery_couchdb_up, with
    the value 0.
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


def exposition(found: Status, seconds: float) -> bytes:
    """Return the metrics of a status, which took so many seconds to read, in Prometheus' text format.

    *Raises* `ImportError` without the package prometheus_client.
    """
    from prometheus_client import generate_latest

    return generate_latest(Exporter(lambda: Scrape(found, seconds), (), timeout=math.inf, keep=math.inf).registry)
