"""The command `celery couchdb check`, for probes: exit status 0 or 1, and one sentence.

Each check yields findings. A failed check is a finding, too, not an exception; exceptions are requests that failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import click
from celery.utils.nodenames import default_nodename, gethostname, host_format, nodesplit

import kombu_couchdb.design
from kombu_couchdb.admin.queues import paused
from kombu_couchdb.admin.status import backlog, consumers
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import equal, exactly, maybe, members, revision
from kombu_couchdb.documents.ids import QUEUE
from kombu_couchdb.errors import AccessDenied, DatabaseMissing
from kombu_couchdb.queues.broadcasts_database import broadcasts_of

from .. import design
from .databases import app_of, broker_of, result_of, results_of, seconds_option, start
from .resource import counted
from .tables import Duration, echo


@click.command('check')
@click.option('--worker', '-w', metavar='NAME', help='Check that this worker has written its heartbeat in time.')
@click.option(
    '--max-ready', metavar='N', type=click.IntRange(0), help='Fail if a queue has more ready messages than this.'
)
@click.option(
    '--max-oldest',
    metavar='SECONDS',
    type=Duration(),
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

    def run() -> list[_Finding]:
        found = list(_check_databases(broker, results))
        if name and all(one.passed for one in found):
            found += _check_worker(broker, name, *_worker_location(app, name))
        if limited and all(one.passed for one in found):
            found += _check_backlog(broker, queues, max_ready, max_oldest)
        return found

    findings = result_of(start(run), timeout)
    if failed := [one.text for one in findings if not one.passed]:
        raise click.ClickException('; '.join(failed))
    echo('; '.join(one.text for one in findings))


def _check_databases(broker: Client, results: Client | None) -> Iterator[_Finding]:
    designs = [doc['_id'].removeprefix('_design/') for doc in kombu_couchdb.design.documents()]
    shared = results is not None and results.address.url == broker.address.url
    yield from _check_database(broker, [*designs, design.NAME] if shared else designs)
    if results and not shared:
        yield from _check_database(results, [design.NAME])
    yield from _check_broadcasts(broker)


def _worker_location(app: Any, name: str) -> tuple[str | None, str]:
    """Return the worker's queue for remote control, and the machine; None without remote control, '' if unknown."""
    own = gethostname()
    if not app.conf.worker_enable_remote_control:
        return None, own
    # The host in a worker's name can be any word, but usually it is the machine's.
    return app.control.mailbox.get_queue(name).name, own if nodesplit(name)[1] == own else ''


class _Finding(NamedTuple):
    """What one check found, in words."""

    passed: bool
    text: str


def _check_database(client: Client, designs: Sequence[str]) -> Iterator[_Finding]:
    """Check that a database and its design documents with these names exist; one request."""
    try:
        exists = not _missing(client, [f'_design/{name}' for name in designs])
    except DatabaseMissing:
        exists = False
    url = client.address.url
    if exists:
        yield _Finding(True, f'{url} is set up')
    else:
        yield _Finding(False, f'{url} is not set up; run "celery -A your_app couchdb setup"')


def _check_broadcasts(broker: Client) -> Iterator[_Finding]:
    """Report a broadcasts database that is missing or locked, which is no failure; one request."""
    client = broadcasts_of(broker)
    try:
        client.info()
    except (DatabaseMissing, AccessDenied) as exc:
        yield _Finding(True, f'every consumer follows the database of the broker, because {exc}')


def _check_worker(client: Client, name: str, queue: str | None, host: str) -> Iterator[_Finding]:
    """Check that a worker's consumers have a current lease; one request.

    `queue` is the worker's queue for remote control, by which its process is found. None if workers have none: then any
    process on the machine `host` counts. `host` is '' if the machine is unknown.
    """
    known = consumers(client, f'{host}:' if host else '')
    processes = {(one['host'], one['pid']) for one in known if queue is None or queue in one['queues']}
    own = [one for one in known if (one['host'], one['pid']) in processes]
    # A killed worker leaves consumers behind. The one that replaced it may even have the same process id, as in a
    # container, but then it consumes the same queues.
    current: dict[tuple[str, int | None], dict[tuple[str, ...], bool]] = defaultdict(dict)
    for one in own:
        of_process, queues = current[one['host'], one['pid']], tuple(one['queues'])
        of_process[queues] = one['alive'] or of_process.get(queues, False)
    is_alive = any(all(of_process.values()) for of_process in current.values())
    age = min((one['heartbeat'] or 0.0 for one in own if one['alive'] is is_alive), default=0.0)
    if not own:
        yield _Finding(False, f'worker {name} has no consumer: it is not running, or has another name')
    elif is_alive:
        yield _Finding(True, f'worker {name} wrote a heartbeat {age:.0f} s ago')
    else:
        yield _Finding(False, f'worker {name} is overdue: its last heartbeat is {age:.0f} s old')


def _check_backlog(
    client: Client, queues: Collection[str], max_ready: int | None, max_oldest: float | None
) -> Iterator[_Finding]:
    """Check the number of ready messages in each queue, and the age of the oldest in seconds; at most three requests.

    None is no limit, and a paused queue may exceed it. Without `queues`, all queues are checked. One more request reads
    the pauses if a limit is exceeded, and one checks that those of `queues` exist that have no messages.
    """
    found = {name: one for name, one in backlog(client).items() if not queues or name in queues}
    ready = sum(one['ready'] for one in found.values())
    yield _Finding(True, counted(ready, 'ready message'))
    over: dict[str, list[_Finding]] = defaultdict(list)
    for name, one in sorted(found.items()):
        if max_ready is not None and one['ready'] > max_ready:
            over[name].append(
                _Finding(False, f'queue {name} has {one["ready"]:,} ready messages, more than {max_ready:,}')
            )
        if max_oldest is not None and (one['oldest'] or 0.0) > max_oldest:
            over[name].append(
                _Finding(False, f'queue {name} has a message that has been due for {one["oldest"]:,.0f} s')
            )
    pauses = paused(client) if over else {}
    for name, findings in over.items():
        yield from [_Finding(True, f'queue {name} is paused')] if name in pauses else findings
    empty = [QUEUE + name for name in queues if name not in found]
    for doc_id in _missing(client, empty) if empty else ():
        name = doc_id.removeprefix(QUEUE)
        yield _Finding(False, f'queue {name} does not exist; start its first worker, or correct --queue')


def _missing(client: Client, ids: Sequence[str]) -> list[str]:
    """Return those of these ids that have no document; one request, without the documents."""
    row = [members(key=equal(doc_id), value=maybe(members(rev=revision))) for doc_id in ids]
    rows = client.request(
        'POST', '/_all_docs', body={'keys': list(ids)}, repeat=True, shape=members(rows=exactly(*row))
    )['rows']
    return [row['key'] for row in rows if not row.get('value') or row['value'].get('deleted')]
