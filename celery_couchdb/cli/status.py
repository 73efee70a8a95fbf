"""The command `celery -A app couchdb status`: queues, consumers and databases, once or repeatedly."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import click

from kombu_couchdb.admin.queues import Paused
from kombu_couchdb.admin.status import DatabaseStatus, Status, status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable

from .databases import admin_option, app_of, broker_of, results_of
from .tables import (
    Cell,
    Column,
    Duration,
    Row,
    count_cell,
    echo,
    echo_styled,
    format_duration,
    format_size,
    format_table,
    json_line,
    printable,
    rate_cell,
    redraw,
    terminal_width,
)

#: Printed in place of a table of queues.
NO_QUEUES = 'No queues yet: they are declared by the first worker, or with the first message.'

#: Mark the oldest ready message of a queue if it has waited longer than this.
_LATE_SECONDS = 300.0


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
def command(
    ctx: click.Context, watch: float | None, as_json: bool, temporary: bool, admin: tuple[str, str] | None
) -> None:
    """Show queues, consumers and databases.

    READY messages can run now. SCHEDULED messages have a due date in the future. PARKED messages wait for a
    concurrency limit or a rate. HELD messages are reserved for one worker (running or prefetched). DEAD messages are
    dead letters. OLDEST is how long the oldest ready message has been due. RATE/S is the number of messages
    acknowledged per second. PAUSED, if a queue is paused, says since when, by whom and why.

    HELD excludes running tasks that were acknowledged early. Use "celery inspect active" to ask the workers for the
    running tasks.

    DUTY is what only one process does at a time, such as beat; RENEWED is when that process has renewed its lease.

    A consumer is overdue if it has sent no heartbeat within the visibility timeout. Its messages go to other workers.
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
    return json_line(found) if as_json else _format(found, broker.clock.now(), terminal_width())


# -- the text


def _format(found: Status, now: float, max_width: int) -> str:
    server, queues = found['server'], queue_rows(found)
    title = f'{"PouchDB (embedded)" if server["embedded"] else "CouchDB"} {server["version"]} at {server["url"]}'
    parts = [printable(title), format_table(queue_columns(queues, now), queues, max_width) if queues else NO_QUEUES]
    if found['malformed']:
        parts.append(
            click.style(f'{found["malformed"]:,} without a queue that can be read: see "couchdb dead"', fg='red')
        )
    if found['consumers']:
        parts.append(format_table(_CONSUMERS, found['consumers'], max_width))
    else:
        parts.append(click.style('No consumers: no worker is running.', fg='yellow'))
    if found['leaders']:
        parts.append(format_table(_LEADERS, found['leaders'], max_width))
    parts.append(format_table(_DATABASES, _databases(found), max_width))
    if not found['broadcasts']:
        parts.append(
            click.style('No database of broadcasts, or none that you may read: run "couchdb setup".', fg='yellow')
        )
    return '\n\n'.join(parts)


def queue_rows(found: Status) -> list[Row]:
    """Return the queues of a status as rows of a table, and as objects for JSON."""
    return [{'name': name, **queue} for name, queue in found['queues'].items()]


def queue_columns(queues: Sequence[Row], now: float) -> list[Column]:
    """Return the columns for queues; `now` is in seconds since the epoch.

    The columns PARKED and PAUSED are there only if they say something of a queue: limits and pauses are rare.
    """
    columns = [
        Column('QUEUE', 'name', min_width=10),
        Column('READY', 'ready', count_cell, right=True),
        Column('SCHEDULED', 'scheduled', count_cell, right=True),
        Column('PARKED', 'parked', count_cell, right=True),
        Column('HELD', 'held', count_cell, right=True),
        Column('DEAD', 'dead', partial(count_cell, fg='red'), right=True),
        Column('OLDEST', 'oldest', _oldest, right=True),
        Column('RATE/S', 'rate', rate_cell, right=True),
        Column('PAUSED', 'paused', partial(_pause, now=now), min_width=10),
    ]
    rare = ('parked', 'paused')
    return [column for column in columns if column.member not in rare or any(row[column.member] for row in queues)]


def _oldest(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell(format_duration(None), {'dim': True})
    return Cell(format_duration(seconds), {'fg': 'yellow'} if seconds > _LATE_SECONDS else {})


def _pause(paused: Paused | None, now: float) -> Cell:
    if paused is None:
        return Cell('')
    text = 'paused' if paused['date'] is None else f'{format_duration(now - paused["date"])} ago'
    text += f' by {paused["by"]}' if paused['by'] else ''
    return Cell(f'{text}: {paused["reason"]}' if paused['reason'] else text, {'fg': 'yellow'})


def _ago(member: str) -> Callable[[Row], Cell]:
    """Return the format of a lease: how long ago it was renewed, as this member says."""

    def cell(row: Row) -> Cell:
        text = format_duration(row[member]) + (' ago' if row[member] is not None else '')
        return Cell(text) if row['alive'] else Cell(f'overdue: {text}', {'fg': 'red'})

    return cell


def _databases(found: Status) -> list[DatabaseStatus]:
    results = found['results']
    shown = [found['database'], found['broadcasts'], results]
    if results and results['name'] == found['database']['name']:
        shown.pop()
    return [database for database in shown if database]


_CONSUMERS = [
    Column('CONSUMER', 'host', min_width=12),
    Column('PID', 'pid', lambda pid: str(pid or ''), right=True),
    Column('HEARTBEAT', None, _ago('heartbeat'), right=True),
    Column('RATE/S', 'rate', rate_cell, right=True),
    Column('QUEUES', 'queues', ', '.join, min_width=10),
]

_LEADERS = [
    Column('DUTY', 'duty', min_width=10),
    Column('LEADER', 'holder', lambda holder: holder or 'none', min_width=12),
    Column('RENEWED', None, _ago('renewed'), right=True),
]

_DATABASES = [
    Column('DATABASE', 'name', min_width=10),
    Column('DOCUMENTS', 'documents', count_cell, right=True),
    Column('TOMBSTONES', 'tombstones', count_cell, right=True),
    Column('SIZE', 'size', format_size, right=True),
    Column('ACTIVE', 'active', format_size, right=True),
]
