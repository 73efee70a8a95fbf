"""The command `celery -A app couchdb status`: queues, consumers and databases, once or repeatedly."""

from __future__ import annotations

import sys
import time

import click

from kombu_couchdb.admin.leaders import Leader
from kombu_couchdb.admin.queues import Paused
from kombu_couchdb.admin.status import Consumer, Database, Queue, Status, status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable

from .databases import admin_option, app_of, broker_of, results_of
from .tables import (
    Cell,
    Column,
    Number,
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

__all__ = ['command', 'queues_table']

#: Mark the oldest ready message of a queue if it has waited longer than this.
_LATE_SECONDS = 300.0


@click.command('status')
@click.option(
    '--watch',
    metavar='[SECONDS]',
    is_flag=False,
    flag_value=2.0,
    type=Number(min=0.1),
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
    server = found['server']
    title = f'{"PouchDB (embedded)" if server["embedded"] else "CouchDB"} {server["version"]} at {server["url"]}'
    parts = [printable(title), queues_table(found['queues'], now, max_width)]
    if found['malformed']:
        parts.append(
            click.style(f'{found["malformed"]:,} without a queue that can be read: see "couchdb dead"', fg='red')
        )
    parts.append(_consumers(found['consumers'], max_width))
    if found['leaders']:
        parts.append(_leaders(found['leaders'], max_width))
    parts.append(_databases(found, max_width))
    if not found['broadcasts']:
        parts.append(
            click.style('No database of broadcasts, or none that you may read: run "couchdb setup".', fg='yellow')
        )
    return '\n\n'.join(parts)


def queues_table(queues: dict[str, Queue], now: float, max_width: int) -> str:
    """Return queues as a table; `now` is in seconds since the epoch, `max_width` in characters.

    The column PAUSED is there only if a queue is paused.
    """
    if not queues:
        return 'No queues yet: they are declared by the first worker, or with the first message.'
    parked = any(queue['parked'] for queue in queues.values())  # limits are rare, and so is this column
    columns = [
        Column('QUEUE', min_width=10),
        Column('READY', right=True),
        Column('SCHEDULED', right=True),
        *([Column('PARKED', right=True)] if parked else []),
        Column('HELD', right=True),
        Column('DEAD', right=True),
        Column('OLDEST', right=True),
        Column('RATE/S', right=True),
    ]
    any_paused = any(queue['paused'] for queue in queues.values())
    return format_table(
        [*columns, *([Column('PAUSED', min_width=10)] if any_paused else [])],
        [
            [
                name,
                count_cell(queue['ready']),
                count_cell(queue['scheduled']),
                *([count_cell(queue['parked'])] if parked else []),
                count_cell(queue['held']),
                count_cell(queue['dead'], fg='red'),
                _oldest(queue['oldest']),
                rate_cell(queue['rate']),
                *([_pause(queue['paused'], now)] if any_paused else []),
            ]
            for name, queue in queues.items()
        ],
        max_width,
    )


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


def _consumers(consumers: list[Consumer], max_width: int) -> str:
    if not consumers:
        return click.style('No consumers: no worker is running.', fg='yellow')
    columns = [
        Column('CONSUMER', min_width=12),
        Column('PID', right=True),
        Column('HEARTBEAT', right=True),
        Column('RATE/S', right=True),
        Column('QUEUES', min_width=10),
    ]
    return format_table(
        columns,
        [
            [
                consumer['host'],
                str(consumer['pid'] or ''),
                _heartbeat(consumer),
                rate_cell(consumer['rate']),
                ', '.join(consumer['queues']),
            ]
            for consumer in consumers
        ],
        max_width,
    )


def _heartbeat(consumer: Consumer) -> Cell:
    return _ago(consumer['heartbeat'], is_alive=consumer['alive'])


def _leaders(leaders: list[Leader], max_width: int) -> str:
    columns = [Column('DUTY', min_width=10), Column('LEADER', min_width=12), Column('RENEWED', right=True)]
    rows: list[list[Cell | str]] = [
        [leader['duty'], leader['holder'] or 'none', _ago(leader['renewed'], is_alive=leader['alive'])]
        for leader in leaders
    ]
    return format_table(columns, rows, max_width)


def _ago(seconds: float | None, *, is_alive: bool) -> Cell:
    text = f'{format_duration(seconds)} ago' if seconds is not None else format_duration(None)
    return Cell(text) if is_alive else Cell(f'overdue: {text}', {'fg': 'red'})


def _databases(found: Status, max_width: int) -> str:
    results = found['results']
    shown: list[Database] = [found['database'], *([found['broadcasts']] if found['broadcasts'] else [])]
    if results and results['name'] != found['database']['name']:
        shown.append(results)
    columns = [
        Column('DATABASE', min_width=10),
        Column('DOCUMENTS', right=True),
        Column('TOMBSTONES', right=True),
        Column('SIZE', right=True),
        Column('ACTIVE', right=True),
    ]
    return format_table(
        columns,
        [
            [
                database['name'],
                count_cell(database['documents']),
                count_cell(database['tombstones']),
                format_size(database['size']),
                format_size(database['active']),
            ]
            for database in shown
        ],
        max_width,
    )
