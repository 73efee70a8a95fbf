"""The commands `celery couchdb status` and `check`: queues, consumers and databases, for people and for probes.

Each check returns sentences about what is right. The first check that fails ends the command.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import click
from celery.utils.nodenames import default_nodename, gethostname, host_format, nodesplit

import kombu_couchdb.design
from kombu_couchdb.admin.queues import paused
from kombu_couchdb.admin.status import Status, consumers, status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import equal, exactly, maybe, members, revision
from kombu_couchdb.documents.ids import QUEUE
from kombu_couchdb.errors import AccessDenied, DatabaseMissing, ServerUnavailable
from kombu_couchdb.log import printable
from kombu_couchdb.queues.backlog import backlog, internal
from kombu_couchdb.queues.databases import broadcasts_of

from .. import design
from ..resources.columns import json_line
from ..resources.databases import DATABASES, NO_BROADCASTS, databases, server_title
from ..resources.queues import NO_QUEUES, queue_columns, queue_remarks, queue_rows
from ..resources.resource import counted
from ..resources.workers import CONSUMERS, LEADERS, running_tasks, task_columns
from .clients import Login, admin_option, app_of, broker_of, result_of, results_of, seconds_option, start
from .tables import Duration, echo, echo_styled, format_table, redraw

#: The most running tasks that `status` shows.
_MAX_TASKS = 20


@click.command('status')
@click.option(
    '--watch',
    metavar='[SECONDS]',
    is_flag=False,
    flag_value=2.0,
    type=Duration(0.1),
    help='Repeat until Ctrl-C, every 2 seconds by default.',
)
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, on one line. Durations are seconds, sizes bytes.')
@click.option(
    '--all',
    'temporary',
    is_flag=True,
    help='Also show empty queues for replies, events and remote control.',
)
@admin_option
@click.pass_context
def command(ctx: click.Context, watch: float | None, as_json: bool, temporary: bool, admin: Login | None) -> None:
    """Show queues, consumers and databases.

    READY messages can run now. SCHEDULED messages have a due date in the future. PARKED messages wait for a
    concurrency limit or a rate. A worker has claimed PREFETCHED messages, and has not reported that they run. RUNNING
    tasks have run for a second, and their worker has reported them. DEAD messages are dead letters. OLDEST is how long
    the oldest ready message has been due. RATE/S is the number of messages acknowledged per second. Lines
    below say since when, by whom and why queues are paused, and which queues with messages no worker consumes, or only
    busy workers.

    A worker reports its running tasks with its heartbeat, at most every 5 seconds. While it holds messages, it is
    overdue if its HEARTBEAT is older than the visibility timeout, and its messages go to other workers. While it holds
    none, it writes a heartbeat after twice that time, and is overdue after three times that time.

    A worker LEADS a DUTY if only it does that at the time, such as beat; RENEWED is when it has renewed its lease.
    """
    app = app_of(ctx)
    broker, results = broker_of(app, admin), results_of(app, admin)
    if watch is None:
        echo_styled(_text(broker, results, as_json, temporary))
        return
    try:
        while True:
            try:
                text = _text(broker, results, as_json, temporary)
            except ServerUnavailable as exc:  # go on: the server may become available again
                echo(f'Error: {exc}', err=True)
            else:
                (redraw if sys.stdout.isatty() and not as_json else echo_styled)(text)
            time.sleep(watch)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            echo('', err=True)  # end the line in which the terminal shows ^C


def _text(broker: Client, results: Client | None, as_json: bool, temporary: bool) -> str:
    found = status(broker, results, temporary=temporary)
    return json_line(found) if as_json else _format(found, broker.clock.now())


# -- the text


def _format(found: Status, now: float) -> str:
    queues = queue_rows(found)
    parts = [printable(server_title(found)), format_table(queue_columns(queues), queues) if queues else NO_QUEUES]
    parts += [click.style(printable(f'{remark}.'), fg='yellow') for remark in queue_remarks(queues, now)]
    if found['malformed']:
        parts.append(
            click.style(f'{found["malformed"]:,} without a queue that can be read: see "couchdb failures"', fg='red')
        )
    if found['consumers']:
        parts.append(format_table(CONSUMERS, found['consumers']))
        if tasks := running_tasks(found):
            parts.append(format_table(task_columns(now), tasks[:_MAX_TASKS]))
            if len(tasks) > _MAX_TASKS:
                parts[-1] += f'\n… and {len(tasks) - _MAX_TASKS:,} more that began later'
    else:
        parts.append(click.style('No consumers: no worker is running.', fg='yellow'))
    if found['leaders']:
        parts.append(format_table(LEADERS, found['leaders']))
    parts.append(format_table(DATABASES, databases(found)))
    if not found['broadcasts']:
        parts.append(click.style(NO_BROADCASTS, fg='yellow'))
    return '\n\n'.join(parts)


# -- check


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
def check_command(
    ctx: click.Context,
    worker: str | None,
    max_ready: int | None,
    max_oldest: float | None,
    queues: tuple[str, ...],
    timeout: float,
) -> None:
    """Check the databases, a worker or queues, for probes.

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

    def run() -> list[str]:
        found = _check_databases(broker, results)
        if worker:
            found.append(_check_worker(app, broker, host_format(default_nodename(worker))))
        return [*found, *(_check_backlog(broker, queues, max_ready, max_oldest) if limited else ())]

    echo('; '.join(result_of(start(run), timeout)))


def _check_databases(broker: Client, results: Client | None) -> list[str]:
    """Check that the databases and their design documents exist; one request each.

    A missing or locked database of broadcasts is told, and no failure; one request.
    """
    wanted = {broker.address.url: (broker, [doc['_id'] for doc in kombu_couchdb.design.documents()])}
    if results:
        client, ids = wanted.get(results.address.url, (results, []))
        wanted[results.address.url] = client, [*ids, f'_design/{design.NAME}']
    if missing := [url for url, (client, ids) in wanted.items() if not _is_set_up(client, ids)]:
        raise click.ClickException(
            '; '.join(f'{url} is not set up; run "celery -A your_app couchdb setup"' for url in missing)
        )
    found = [f'{url} is set up' for url in wanted]
    try:
        broadcasts_of(broker).info()
    except (DatabaseMissing, AccessDenied) as exc:
        found.append(f'every consumer follows the database of the broker, because {exc}')
    return found


def _is_set_up(client: Client, designs: Sequence[str]) -> bool:
    try:
        return not _missing(client, designs)
    except DatabaseMissing:
        return False


def _check_worker(app: Any, client: Client, name: str) -> str:
    """Check that a worker's consumers have a current lease; one request.

    Its process is found by its queue for remote control. If workers have none, any process on this machine counts.
    """
    own_host = gethostname()
    queue = app.control.mailbox.get_queue(name).name if app.conf.worker_enable_remote_control else None
    # The host in a worker's name can be any word, but usually it is the machine's.
    known = consumers(client, f'{own_host}:' if queue is None or nodesplit(name)[1] == own_host else '')
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
        raise click.ClickException(f'worker {name} has no consumer: it is not running, or has another name')
    if not is_alive:
        raise click.ClickException(f'worker {name} is overdue: its last heartbeat is {age:.0f} s old')
    return f'worker {name} wrote a heartbeat {age:.0f} s ago'


def _check_backlog(
    client: Client, queues: Collection[str], max_ready: int | None, max_oldest: float | None
) -> list[str]:
    """Check the number of ready messages in each queue, and the age of the oldest in seconds; at most two requests.

    None is no limit, and a paused queue may exceed it. Without `queues`, all queues are checked but those for replies,
    events and remote control, which one more request finds. One reads the pauses if a limit is exceeded, and one checks
    that those of `queues` exist that have no messages.
    """
    found = {name: queue for name, queue in backlog(client).items() if not queues or name in queues}
    if not queues:
        for name in internal(client, found):
            del found[name]
    over: dict[str, list[str]] = defaultdict(list)
    for name, queue in sorted(found.items()):
        if max_ready is not None and queue['ready'] > max_ready:
            over[name].append(f'queue {name} has {queue["ready"]:,} ready messages, more than {max_ready:,}')
        if max_oldest is not None and (queue['oldest'] or 0.0) > max_oldest:
            over[name].append(f'queue {name} has a message that has been due for {queue["oldest"]:,.0f} s')
    pauses = paused(client) if over else {}
    failed = [text for name, texts in over.items() if name not in pauses for text in texts]
    if empty := [QUEUE + name for name in queues if name not in found]:
        failed += [
            f'queue {doc_id.removeprefix(QUEUE)} does not exist; start its first worker, or correct --queue'
            for doc_id in _missing(client, empty)
        ]
    if failed:
        raise click.ClickException('; '.join(failed))
    ready = sum(queue['ready'] for queue in found.values())
    return [counted(ready, 'ready message'), *(f'queue {name} is paused' for name in over)]


def _missing(client: Client, ids: Sequence[str]) -> list[str]:
    """Return those of these ids that have no document; one request, without the documents."""
    row = [members(key=equal(doc_id), value=maybe(members(rev=revision))) for doc_id in ids]
    rows = client.request(
        'POST', '/_all_docs', body={'keys': list(ids)}, repeat=True, shape=members(rows=exactly(*row))
    )['rows']
    return [row['key'] for row in rows if not row.get('value') or row['value'].get('deleted')]
