"""The remote control command `inspect scheduled` (`celery_couchdb.worker.control`), called as in a worker."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_couchdb.worker import control
from kombu_couchdb.couchdb.call import seconds_left
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import PATIENCE, PATIENT_BROKER
from tests.support import Request, eta, publish

from .conftest import Connect

HELD = {'eta': None, 'priority': 6, 'request': {'id': 'held'}}


def state(connection: Connection, *queues: str) -> Any:
    """Return the state object that Celery passes to commands, for a worker that consumes these queues."""
    consumer = SimpleNamespace(
        connection=connection, task_consumer=SimpleNamespace(queues=[Queue(name) for name in queues])
    )
    return SimpleNamespace(consumer=consumer, hostname='me')


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a task into the timer of the worker."""
    monkeypatch.setattr(control, '_scheduled_in_worker', lambda state, **kwargs: [HELD])


def shown(connection: Connection, *queues: str) -> list[dict[str, Any]]:
    found = control.scheduled(state(connection, *queues))
    assert found[0] == HELD
    return found[1:]


def headers(task_id: str, seconds: float) -> dict[str, Any]:
    return {**eta(seconds), 'id': task_id, 'task': 'add', 'argsrepr': '(1, 2)', 'kwargsrepr': '{}'}


def test_first_hundred_messages_of_all_queues_take_two_requests(
    connect: Connect, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, '_PATIENCE_SECONDS', PATIENCE)
    connection = connect(**PATIENT_BROKER)
    for number in range(105):
        publish(connection, [[number], {}, {}], to=f'q{number % 3}', headers=headers(str(number), 1000 - number))
    publish(connection, [[], {}, {}], to='q1', headers={'id': 'now', 'task': 'add'})
    publish(connection, 'no arguments', to='q1', headers=headers('odd', 500))
    sent.clear()
    found = shown(connection, 'q0', 'q1', 'q2', 'empty', 'of\u200bme/é')
    assert [one['request']['id'] for one in found] == ['odd', *(str(number) for number in range(104, 5, -1))]
    assert [one['request']['args'] for one in found[:2]] == ['(1, 2)', [104]]
    assert len(sent) == 2


def test_tasks_held_by_the_worker_are_shown_during_an_outage(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker waits for two seconds at most, because its event loop runs the command."""
    connection, left = connect(), list[float]()
    publish(connection, [[], {}, {}], headers=headers('a', 60))

    def away(*args: Any, **kwargs: Any) -> Any:
        left.append(seconds_left())
        raise ServerUnavailable('away')

    monkeypatch.setattr(connection.transport.couchdb, 'request', away)
    with caplog.at_level(logging.WARNING):
        assert shown(connection, 'q') == []
    assert 'shows only what this worker holds: ' in caplog.text
    assert 0 < left[0] <= 2


def test_other_brokers_use_celerys_command() -> None:
    with Connection('memory://') as connection:
        assert shown(connection, 'q') == []
