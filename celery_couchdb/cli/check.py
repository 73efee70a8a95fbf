"""The command `celery couchdb check`, for probes: exit status 0 or 1, and one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from celery.utils.nodenames import default_nodename, gethostname, host_format, nodesplit

import kombu_couchdb.design
from kombu_couchdb.admin.check import Finding, check_backlog, check_broadcasts, check_database, check_worker
from kombu_couchdb.couchdb.client import Client

from .. import design
from .databases import app_of, broker_of, result_of, results_of, seconds_option, start
from .tables import Number, echo


@click.command('check')
@click.option('--worker', '-w', metavar='NAME', help='Check that this worker has written its heartbeat in time.')
@click.option(
    '--max-ready', metavar='N', type=click.IntRange(0), help='Fail if a queue has more ready messages than this.'
)
@click.option(
    '--max-oldest',
    metavar='SECONDS',
    type=Number(0.0),
    help='Fail if a message has been due for longer than this.',
)
@click.option(
    '--queue',
    '-Q',
    'queues',
    metavar='NAME',
    multiple=True,
    help='Apply --max-ready and --max-oldest to this queue only, which must exist. Can be given several times.',
)
@seconds_option('--timeout', 10.0, 'Fail if CouchDB needs longer than this for all requests together.')
@click.pass_context
def command(
    ctx: click.Context,
    worker: str | None,
    max_ready: int | None,
    max_oldest: float | None,
    queues: tuple[str, ...],
    timeout: float,
) -> None:
    """Check the databases, a worker or queues, for probes and service managers.

    The exit status is 0 if all checks pass, otherwise 1, with one sentence on stderr. Always checked: CouchDB responds,
    and the databases of broker and results exist with their design documents. This takes one request for each database,
    and one for that of broadcasts, which may be missing.

    NAME of a worker is the name that it got as --hostname, such as "shop@%h". The check shows that the worker runs and
    reaches CouchDB, not that its tasks make progress. It takes one more request; --max-ready and --max-oldest together
    take at most six.
    """
    limited = (max_ready, max_oldest) != (None, None)
    if queues and not limited:
        raise click.UsageError('--queue needs --max-ready or --max-oldest.')
    app = app_of(ctx)
    broker, results = broker_of(app, seconds=timeout), results_of(app, seconds=timeout)
    name = host_format(default_nodename(worker)) if worker else None

    def run() -> list[Finding]:
        found = list(_check_databases(broker, results))
        if name and all(one.passed for one in found):
            found += check_worker(broker, name, *_worker_location(app, name))
        if limited and all(one.passed for one in found):
            found += check_backlog(broker, queues, max_ready, max_oldest)
        return found

    findings = result_of(start(run), timeout)
    if failed := [one.text for one in findings if not one.passed]:
        raise click.ClickException('; '.join(failed))
    echo('; '.join(one.text for one in findings))


def _check_databases(broker: Client, results: Client | None) -> Iterator[Finding]:
    designs = [doc['_id'].removeprefix('_design/') for doc in kombu_couchdb.design.documents()]
    shared = results is not None and results.address.url == broker.address.url
    yield from check_database(broker, [*designs, design.NAME] if shared else designs)
    if results and not shared:
        yield from check_database(results, [design.NAME])
    yield from check_broadcasts(broker)


def _worker_location(app: Any, name: str) -> tuple[str | None, str]:
    """Return the worker's queue for remote control, and the machine; None without remote control, '' if unknown."""
    own = gethostname()
    if not app.conf.worker_enable_remote_control:
        return None, own
    # The host in a worker's name can be any word, but usually it is the machine's.
    return app.control.mailbox.get_queue(name).name, own if nodesplit(name)[1] == own else ''
