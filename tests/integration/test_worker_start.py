"""A worker in a thread of the tests, as `celery.contrib.pytest` starts it: what it does besides running tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, signals
from celery.contrib.testing.worker import start_worker
from celery.worker.request import Request
from kombu import Connection

from celery_couchdb.jobs import Jobs
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, items, publish


@contextmanager
def working(app: Celery) -> Iterator[Any]:
    """Run a worker, and leave the logging of this process unchanged, because tests read the log."""

    def untouched(**_: Any) -> None:
        pass

    signals.setup_logging.connect(untouched)
    try:
        with start_worker(app, pool='solo', perform_ping_check=False, shutdown_timeout=PATIENCE) as worker:
            yield worker
    finally:
        signals.setup_logging.disconnect(untouched)


class Harmful(Request):
    """A request that raises an error, as Celery's does for some messages."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self.raise_if('received')

    def revoked(self) -> bool:
        self.raise_if('run')
        return bool(super().revoked())

    def raise_if(self, moment: str) -> None:
        if self.args[:1] == [moment] and not harmless:
            raise {'ValueError': ValueError, 'MemoryError': MemoryError, 'OSError': OSError}[self.args[1]]('two\nlines')


harmless: list[bool] = []


@pytest.fixture(autouse=True)
def reset() -> None:
    harmless.clear()


@pytest.fixture
def harmful(app: Celery) -> Any:
    @app.task(name='harmful', shared=False, Request=Harmful)
    def harmful(*args: Any) -> str:
        return 'done'

    return harmful


@pytest.mark.parametrize('moment', ['received', 'run'])
@pytest.mark.parametrize(
    'options', [{}, {'rate_limit': '1000/s'}, {'countdown': 0.01}, {'rate_limit': '1000/s', 'countdown': 0.01}], ids=str
)
def test_message_that_raises_an_error_becomes_a_dead_letter(
    app: Celery, client: Client, harmful: Any, moment: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    harmful.rate_limit = options.pop('rate_limit', None)
    with working(app):
        harmful.apply_async((moment, 'ValueError'), **options)
        [letter] = wait_for(lambda: [doc for doc in items(client) if doc.get('status')], 'the dead letter')
        assert (letter['reason'], letter['attempts']) == ('rejected: ValueError: two lines', 1)
        assert harmful.delay('neither').get(timeout=PATIENCE) == 'done'
        assert app.control.inspect(timeout=PATIENCE, limit=1).reserved().popitem()[1] == []
        lines = [message for message in caplog.messages if letter['_id'] in message]
        assert lines == [f'message {letter["_id"]} was made a dead letter: {letter["reason"]}']
        harmless.append(True)
        Jobs(app).replay([letter])
        wait_for(lambda: not items(client), 'the replayed task')


@pytest.mark.parametrize('error', ['MemoryError', 'OSError'])
def test_error_of_the_worker_itself_ends_it_and_counts_as_an_attempt(
    app: Celery, client: Client, harmful: Any, error: str
) -> None:
    with working(app) as worker:
        harmful.delay('received', error)
        wait_for(lambda: worker.exitcode, 'the end of the worker')
    [item] = wait_for(lambda: [doc for doc in items(client) if not doc['claimed']], 'the released message')
    assert (item['attempts'], item.get('status')) == (1, None)


@pytest.mark.parametrize('when', ['in the callback', 'after the callback'])
def test_error_of_a_program_counts_as_an_attempt(connection: Connection, client: Client, when: str) -> None:
    def fail(message: Any = None) -> None:
        raise LookupError('the program sees this')

    inbox = Inbox(connection, ack=False)
    if when == 'in the callback':
        inbox.consumer.on_message = fail
    publish(connection, 1)

    def run() -> None:
        with connection:
            inbox.wait(1)
            fail()

    with pytest.raises(LookupError, match='sees this'):
        run()
    [item] = wait_for(lambda: [doc for doc in items(client) if not doc['claimed']], 'the released message')
    assert item['attempts'] == 1


def test_orderly_stop_of_a_program_counts_no_attempt(connection: Connection, client: Client) -> None:
    inbox = Inbox(connection, ack=False)
    publish(connection, 1)
    with connection:
        inbox.wait(1)
    [item] = wait_for(lambda: [doc for doc in items(client) if not doc['claimed']], 'the released message')
    assert item['attempts'] == 0


def test_worker_in_a_thread_moves_parcels_and_stops(mover_app: Celery, parcels: Client) -> None:
    app = mover_app

    @app.task(name='add', shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    def named(threads: set[threading.Thread]) -> list[str]:
        return [t.name for t in threads if t.name in ('celery-couchdb-parcels', 'celery-couchdb-sweeper')]

    before = set(threading.enumerate())
    for number in range(2):  # also a second worker of the same app
        with working(app):
            parcels.put({'_id': str(number), 'task': 'add', 'args': [number, 1], 'id': str(number)})
            assert app.AsyncResult(str(number)).get(timeout=PATIENCE) == number + 1
        wait_for(lambda: not named(set(threading.enumerate()) - before), 'the end of the threads')


def test_worker_in_a_thread_shows_scheduled_tasks(app: Celery, harmful: Any) -> None:
    with working(app):
        harmful.apply_async(('later',), countdown=3600)
        [tasks] = app.control.inspect(timeout=PATIENCE, limit=1).scheduled().values()
        assert [task['request']['name'] for task in tasks] == ['harmful']
