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

from celery_couchdb.jobs import Jobs
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, wait_for
from tests.support import items


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


def test_messages_that_raise_an_error_become_dead_letters(
    app: Celery, client: Client, harmful: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name='limited', shared=False, Request=Harmful, rate_limit='1000/s')
    def limited(*args: Any) -> None:
        pass

    with working(app):
        for task, moment, options in (
            (harmful, 'received', {}),
            (harmful, 'run', {}),
            (limited, 'run', {}),
            (harmful, 'run', {'countdown': 0.01}),
            (limited, 'run', {'countdown': 0.01}),
        ):
            harmless.clear()
            task.apply_async((moment, 'ValueError'), **options)
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
