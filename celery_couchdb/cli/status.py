"""`celery -A app couchdb status`: how things stand, once or until Ctrl-C."""

from __future__ import annotations

import sys
import time

import click

from kombu_couchdb.admin.status import Consumer, Database, Queue, Status, status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable

from .databases import administrator, app_of, broker_of, results_of
from .tables import Cell, Column, age, count, json_line, printable, rate, redraw, say, show, size, table, width

__all__ = ['command']

#: From which age on the oldest message that could run is worth a look, in seconds.
_LATE = 300.0


@click.command('status')
@click.option(
    '--watch',
    metavar='[SECONDS]',
    is_flag=False,
    flag_value=2.0,
    type=click.FloatRange(min=0.1),
    help='Show it again and again, until Ctrl-C; every 2 seconds if none are given.',
)
@click.option('--json', 'as_json', is_flag=True, help='Print JSON, on one line; durations are seconds, sizes bytes.')
@click.option(
    '--all',
    'temporary',
    is_flag=True,
    help='Show queues for replies, events and remote control, too, though they are empty.',
)
@administrator
@click.pass_context
def command(
    ctx: click.Context, watch: float | None, as_json: bool, temporary: bool, admin: tuple[str, str] | None
) -> None:
    """Show queues, consumers and databases.

    READY can run now, SCHEDULED is planned for later, HELD is with a worker and not acknowledged yet, DEAD was refused or failed
    for good. HELD counts what a worker has prefetched, too, and not what runs and was acknowledged early: "celery inspect
    active" asks the workers what runs. OLDEST is how long the oldest ready message has been due, RATE/S how many are acknowledged
    a second. A consumer without a heartbeat within the visibility timeout is overdue: what it holds goes to others.
    """
    app = app_of(ctx)
    broker, results = broker_of(app, admin), results_of(app, admin)
    if watch is None:
        show(_text(broker, results, as_json, temporary))
        return
    try:
        while True:
            try:
                text = _text(broker, results, as_json, temporary)
            except ServerUnavailable as exc:  # it may come back, and whoever watches wants to see that
                say(f'Error: {exc}', err=True)
            else:
                (redraw if sys.stdout.isatty() and not as_json else show)(text)
            time.sleep(watch)
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            say('', err=True)  # what is printed next shall not stand behind ^C


def _text(broker: Client, results: Client | None, as_json: bool, temporary: bool) -> str:
    found = status(broker, results, temporary=temporary)
    return json_line(found) if as_json else _page(found, width())


# -- the page


def _page(found: Status, room: int) -> str:
    server = found['server']
    title = f'{"PouchDB (embedded)" if server["embedded"] else "CouchDB"} {server["version"]} at {server["url"]}'
    parts = [printable(title), _queues(found['queues'], room)]
    if found['spoilt']:
        parts.append(click.style(f'{found["spoilt"]:,} without a queue that can be read: see "couchdb dead"', fg='red'))
    parts += [_consumers(found['consumers'], room), _databases(found, room)]
    return '\n\n'.join(parts)


def _queues(queues: dict[str, Queue], room: int) -> str:
    if not queues:
        return 'No queues yet: they are declared by the first worker, or with the first message.'
    columns = [
        Column('QUEUE', least=10),
        Column('READY', right=True),
        Column('SCHEDULED', right=True),
        Column('HELD', right=True),
        Column('DEAD', right=True),
        Column('OLDEST', right=True),
        Column('RATE/S', right=True),
    ]
    return table(
        columns,
        [
            [
                name,
                count(queue['ready']),
                count(queue['scheduled']),
                count(queue['held']),
                count(queue['dead'], fg='red'),
                _oldest(queue['oldest']),
                rate(queue['rate']),
            ]
            for name, queue in queues.items()
        ],
        room,
    )


def _oldest(seconds: float | None) -> Cell:
    if seconds is None:
        return Cell(age(None), {'dim': True})
    return Cell(age(seconds), {'fg': 'yellow'} if seconds > _LATE else {})


def _consumers(consumers: list[Consumer], room: int) -> str:
    if not consumers:
        return click.style('No consumers: no worker is running.', fg='yellow')
    columns = [
        Column('CONSUMER', least=12),
        Column('PID', right=True),
        Column('HEARTBEAT', right=True),
        Column('RATE/S', right=True),
        Column('QUEUES', least=10),
    ]
    return table(
        columns,
        [
            [
                consumer['host'],
                str(consumer['pid'] or ''),
                _heartbeat(consumer),
                rate(consumer['rate']),
                ', '.join(consumer['queues']),
            ]
            for consumer in consumers
        ],
        room,
    )


def _heartbeat(consumer: Consumer) -> Cell:
    seconds = consumer['heartbeat']
    said = f'{age(seconds)} ago' if seconds is not None else age(None)
    return Cell(said) if consumer['alive'] else Cell(f'overdue: {said}', {'fg': 'red'})


def _databases(found: Status, room: int) -> str:
    results = found['results']
    shown: list[Database] = [found['database']]
    if results and results['name'] != found['database']['name']:
        shown.append(results)
    columns = [
        Column('DATABASE', least=10),
        Column('DOCUMENTS', right=True),
        Column('TOMBSTONES', right=True),
        Column('SIZE', right=True),
        Column('ACTIVE', right=True),
    ]
    return table(
        columns,
        [
            [
                database['name'],
                count(database['documents']),
                count(database['tombstones']),
                size(database['size']),
                size(database['active']),
            ]
            for database in shown
        ],
        room,
    )
