"""The command `celery couchdb metrics`: the status in Prometheus' text format, once or over HTTP."""

from __future__ import annotations

import math
import signal
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from kombu_couchdb.admin.status import status

from .databases import app_of, broker_of, results_of, seconds_option
from .tables import echo, echo_styled

if TYPE_CHECKING:
    from .metrics_exporter import Scrape


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
    from prometheus_client import generate_latest, start_http_server

    from .metrics_exporter import Exporter, Scrape

    app = app_of(ctx)
    broker, results = broker_of(app, seconds=timeout), results_of(app, seconds=timeout)
    if results and results.address.url == broker.address.url:
        results = None  # the metrics of the broker's database have its size

    def read() -> Scrape:
        begun = time.monotonic()
        return Scrape(status(broker, results), time.monotonic() - begun)

    exporter = Exporter(read, queues, timeout, keep if address else math.inf)
    if address is None:
        exporter.read()  # an error ends the command with one sentence
        echo_styled(generate_latest(exporter.registry).decode().rstrip('\n'))
        return
    try:
        server, thread = start_http_server(address[1], address[0] or '0.0.0.0', exporter.registry)
    except OSError as exc:
        raise click.ClickException(f'cannot listen on {address[0]}:{address[1]}: {exc.strerror or exc}') from exc
    # As process 1 of a container, Python would ignore the signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, port = map(str, server.server_address[:2])
    echo(f'Serving metrics on http://{f"[{host}]" if ":" in host else host}:{port}/metrics', err=True)
    try:
        thread.join()
    except KeyboardInterrupt:
        pass
