"""`make pictures`: fill a database, let real workers work on it, and make PNGs of all pages of the operators' page.

The server is that of COUCHDB_URL, or an embedded one. The database is called `shop`, and must not exist.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from celery_couchdb import audit
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin import queues
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.admin.status import status
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import HISTORY
from kombu_couchdb.embedded import EmbeddedServer
from kombu_couchdb.errors import DatabaseMissing
from kombu_couchdb.queues.databases import broadcasts_of
from tests.browser import Page
from tests.web import served

DATABASE, RESULTS = 'shop', 'shop-results'

FOLDER = Path(__file__).parents[2] / 'docs' / 'pictures'

#: The pictures that are part of the repository, without `-light-1280`.
KEPT = ('failures', 'queues')


def main() -> None:
    """Make the pictures."""
    if not shutil.which('chromium') and not shutil.which('chromium-browser') and not shutil.which('google-chrome'):
        sys.exit('The pictures need Chromium: install the package chromium.')
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(_server())
        broker = server.client(DATABASE)
        for client in (broker, server.client(RESULTS)):
            with suppress(DatabaseMissing):
                client.info()
                sys.exit(f'There is a database {client.address.url} already: use another server.')
        stack.callback(server.delete, DATABASE)
        stack.callback(server.delete, RESULTS)
        os.environ['PICTURES_BROKER'] = server.couchdb_url(DATABASE)
        os.environ['PICTURES_RESULTS'] = server.couchdb_url(RESULTS)
        os.environ['PICTURES_END'] = str(folder / 'end')
        _set_up(server)
        stack.callback((folder / 'end').touch)
        _fill(stack, broker, server.client(RESULTS), folder)
        _photograph(stack, server, folder)
    print(f'The pictures are in {FOLDER}')


@contextmanager
def _server() -> Iterator[Server]:
    if url := os.environ.get('COUCHDB_URL'):
        yield Server(url)
    else:
        with EmbeddedServer() as process:
            yield Server(process.url, process)


def _set_up(server: Server) -> None:
    import celery_couchdb.design

    broker = server.client(DATABASE)
    for wanted in (
        Wanted(broker, design.documents(), []),
        Wanted(broadcasts_of(broker), [], [], users_of=broker),
        Wanted(server.client(RESULTS), [celery_couchdb.design.document()], []),
    ):
        for step in plan(wanted):
            if step.do:
                step.do()


# -- what is shown


def _fill(stack: ExitStack, broker: Client, results: Client, folder: Path) -> None:
    from .shop import app, build, charge, confirm, late, send, sync, unsubscribe

    _add_history(broker)  # before a worker writes it
    _add_schedules(app)
    for number in range(40):
        charge.delay(1000 + number, 4990)
    for name in ('ann', 'invalid address', 'joe', 'invalid', 'kim'):
        send.delay(f'{name}@shop.example', 'Your order')
    for name in ('ann', 'joe'):
        unsubscribe.delay(f'{name}@shop.example')
    for month in ('2026-09', '2026-10', '2026-11'):
        build.delay(month)
    for shelf in 'ABC':
        sync.delay(shelf)
    for arguments in (
        ('worker', '-n', 'web1@shop', '-c', '2', '-Q', 'celery,payments,mail'),
        ('worker', '-n', 'reports1@shop', '-c', '4', '-Q', 'reports,stock'),
        ('beat', '-S', 'couchdb'),
    ):
        _start(stack, folder, *arguments)
    _wait(lambda: _counts(broker)['dead'] == 22 and _counts(broker)['running'] == 4, 'the tasks to run')
    _wait(lambda: results.info()['doc_count'] >= 45, 'the results')
    queues.pause(broker, 'mail', by='ann', reason='The provider moves until 14:00')
    for number in range(230):
        send.delay(f'customer{number}@shop.example', 'News')
    for number in range(36):
        confirm.apply_async([2000 + number], **late(10 * number + 5))
    confirm.apply_async([1999], queue='imports')
    _backdate(results, 'Result', 'date')
    _backdate(broker, 'WorkItem', 'failed')
    audit.record(broker, 'ann', 'pause queue', ['mail'], 'mail: paused.', 'The provider moves until 14:00')
    audit.record(broker, 'joe', 'retry failure', ['d1a5', 'd1a6'], '2 retried.', 'The bank responds again')


def _add_schedules(app: Any) -> None:
    from celery.schedules import crontab

    from celery_couchdb.contrib.beat import Schedules

    schedules = Schedules(app)
    schedules.add('news', 'mail.send', crontab(minute=0, hour=8), args=['all@shop.example', 'News'])
    schedules.add('monthly report', 'reports.build', crontab(minute=30, hour=5, day_of_month=1), args=['last'])
    schedules.add('stock', 'stock.sync', 900.0, args=['all'], enabled=False)


def _backdate(client: Client, kind: str, member: str) -> None:
    """Spread what failed over the last hours."""
    dice, now = random.Random(1), client.clock.now()
    docs = [row['doc'] for row in client.id_range('', docs=True)]
    client.bulk(
        [
            {**doc, member: now - dice.expovariate(1 / 2400.0)}
            for doc in docs
            if doc.get('type') == kind and doc.get(member) and doc.get('status') in ('FAILURE', 'fail')
        ]
    )


def _add_history(broker: Client) -> None:
    """Write what the workers would have written in the last hours."""
    dice, now = random.Random(2), broker.clock.now()
    for period in range(int(now // 600) - 18, int(now // 600)):
        minutes = {str(minute): _minute(dice, period * 10 + minute) for minute in range(10)}
        broker.put(
            {
                '_id': f'{HISTORY}{period % 144:03}',
                'type': 'History',
                'date': period * 600.0,
                'minutes': minutes,
                'totals': {},
            }
        )


def _minute(dice: random.Random, minute: int) -> dict[str, Any]:
    load = 40 + 30 * abs(minute % 60 - 30) / 30
    failed = dice.choice([0, 0, 0, 1, 4])
    return {
        'tasks': {
            'payments.charge': {'succeeded': dice.randint(10, 20), 'failed': failed, 'seconds': 3.0},
            'mail.send': {'succeeded': int(load), 'seconds': 9.0},
            'orders.confirm': {'succeeded': dice.randint(20, 30), 'seconds': 1.0},
        },
        'queues': {
            'mail': {'ready': int(load * 4), 'running': 1},
            'payments': {'ready': dice.randint(0, 30), 'running': 1},
            'celery': {'ready': dice.randint(0, 9)},
        },
    }


def _counts(broker: Client) -> dict[str, int]:
    found = status(broker)['queues'].values()
    return {state: sum(queue[state] for queue in found) for state in ('dead', 'running')}


def _start(stack: ExitStack, folder: Path, *arguments: str) -> None:
    log = stack.enter_context((folder / f'{arguments[0]}{len(list(folder.iterdir()))}.log').open('w'))
    process = subprocess.Popen(
        [sys.executable, '-m', 'celery', '-A', 'tests.pictures.shop', *arguments], stdout=log, stderr=log
    )
    stack.callback(_end, process)
    stack.callback((folder / 'end').touch)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f'Waited 300 s for {what}.')
        time.sleep(0.2)


# -- the pictures


def _photograph(stack: ExitStack, server: Server, folder: Path) -> None:
    from celery_couchdb.web import create_app

    from .shop import app

    FOLDER.mkdir(parents=True, exist_ok=True)
    url = stack.enter_context(served(create_app(app)))
    page = Page(folder / 'profile', 'about:blank')
    stack.callback(page.close)
    page.visit(url)
    page.fill('#user', server.user)
    page.fill('#password', server.password)
    page.submit('button')
    for path in page.run("Array.from(document.querySelectorAll('nav a')).map(link => link.getAttribute('href'))"):
        _take(page, url + path, path.strip('/'))
    page.visit(f'{url}/failures')
    if found := page.run('(document.querySelector(\'main a[href*="/tasks/"]\') || {}).href'):
        _take(page, found, 'task')


def _take(page: Page, url: str, name: str) -> None:
    for width, height in ((1280, 700), (390, 844)):
        for look in ('light', 'dark'):
            page.show(width, height, dark=look == 'dark')
            page.visit(url)
            _wait(lambda: bool(page.run("document.querySelector('.dot.live, .bare') !== null")), f'the page {name}')
            is_kept = name in KEPT and (width, look) == (1280, 'light')
            path = FOLDER / (f'{name}.png' if is_kept else f'{name}-{look}-{width}.png')
            path.write_bytes(page.picture())


if __name__ == '__main__':
    main()
