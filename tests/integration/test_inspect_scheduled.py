"""The remote control command `inspect scheduled` (`celery_couchdb.worker.control`), called as in a worker."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_couchdb.worker import control
from kombu_couchdb.couchdb.bounds import seconds_left
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.support import Request, eta, items, publish, publish_many

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


def test_first_hundred_messages_of_all_queues_take_two_requests(connect: Connect, sent: list[Request]) -> None:
    connection = connect()
    for number in range(130):
        publish(connection, [[number], {}, {}], to=f'q{number % 3}', headers=headers(str(number), 1000 - number))
    publish(connection, [[], {}, {}], to='q1', headers={'id': 'now', 'task': 'add'})
    sent.clear()
    found = shown(connection, 'q0', 'q1', 'q2', 'empty', 'of\u200bme/é')
    assert [one['request']['id'] for one in found] == [str(number) for number in range(129, 29, -1)]
    assert found[0]['request']['args'] == [129]
    assert len(sent) == 2


@pytest.mark.parametrize('body', ['no list', b'\x80binary'])
def test_arguments_that_are_not_json_are_described(connect: Connect, body: Any) -> None:
    connection = connect()
    publish_many(connection, [body], headers=headers('a', 60), serializer='json' if isinstance(body, str) else 'raw')
    [one] = shown(connection, 'q')
    assert (one['request']['args'], one['request']['kwargs']) == ('(1, 2)', '{}')


def test_malformed_items_do_not_hide_others(connect: Connect, client: Client) -> None:
    connection = connect()
    for name in 'abc':
        publish(connection, [[], {}, {}], headers=headers(name, 60))
    first, second, _ = items(client)
    client.bulk([{**first, 'message': None}, {**second, 'date': 1e30}])
    assert {one['request']['id'] for one in shown(connection, 'q')} == {'b', 'c'}


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
