"""Idempotent publishing: killed or paused publishers, and successors that repeat their work."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.documents.unique_merge import once_id
from kombu_couchdb.queues.store import Store
from kombu_couchdb.unique import AGAIN, ENQUEUED, Outcome, collect_outcomes
from tests.conftest import wait_for
from tests.support import Inbox, items, publish

from .conftest import Connect

TASK: dict[str, Any] = {'headers': {'id': 'some task', 'task': 'add'}}


def publish_once(connection: Connection, body: Any = 'a', **message: Any) -> None:
    with idempotent('due at noon'):
        publish(connection, body, **{**TASK, **message})


def test_message_published_twice_is_stored_once(connect: Connect, client: Client) -> None:
    for _ in range(2):
        publish_once(connect())
    [item] = items(client)
    assert item['attempts'] == 0


@pytest.mark.parametrize('body', ['a', 'x' * 50_000], ids=['small', 'large'])
def test_publisher_paused_until_the_message_was_completed(connect: Connect, client: Client, body: str) -> None:
    """Two processes publish the same message, one of them when the message is completed. A large body is attached."""
    inbox = Inbox(connect())
    publish_once(connect(), body)
    assert inbox.wait(1) == [body]
    wait_for(lambda: not items(client), 'the ack')
    publish_once(connect(), body)
    assert items(client) == []


def publish_job(connection: Connection, task_id: str) -> None:
    publish(connection, 'a', headers={'id': task_id, 'task': 'report', 'job_key': 'k'})


def publish_job_once(connection: Connection) -> Outcome:
    with idempotent('due at noon'), collect_outcomes() as outcomes:
        publish_job(connection, 'moved')
    [outcome] = outcomes
    return outcome


class Killed(Exception):
    """The publisher was killed."""


def kill_after(monkeypatch: pytest.MonkeyPatch, connection: Connection, steps: int) -> None:
    """Let a publisher be killed when so many of its writes are stored."""
    client, left = connection.default_channel.connection.store.client, iter(range(steps))

    def until_killed(write: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return write(*args, **kwargs)

        return method

    for name in ('bulk', 'create_once', 'write_anew'):
        monkeypatch.setattr(client, name, until_killed(getattr(client, name)))


@pytest.mark.parametrize('later', [(), ('later', 'even later')])
@pytest.mark.parametrize('waiting', [(), ('waiting',)])
@pytest.mark.parametrize('steps', range(5))
def test_unique_job_of_a_killed_publisher_runs_once(
    connect: Connect,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    waiting: Sequence[str],
    later: Sequence[str],
) -> None:
    """Another process publishes it again when it has run, and when later messages of the job have run, too."""
    for task_id in waiting:
        publish_job(connect(), task_id)
    killed = connect()
    kill_after(monkeypatch, killed, steps)
    with suppress(Killed):
        publish_job_once(killed)
    inbox = Inbox(connect())
    inbox.drain_until(lambda: not items(client), 'the job to be completed')
    for task_id in later:
        publish_job(connect(), task_id)
        inbox.drain_until(lambda: not items(client), 'a later job to be completed')
    outcome = publish_job_once(connect())
    inbox.drain_until(lambda: not items(client), 'everything to be completed')
    ran = [message.headers['id'] for message in inbox.messages]
    assert len(ran) == len({*ran})
    assert {*ran} == {*waiting, *later, outcome.task_id}


def test_job_that_other_publishers_change_keeps_what_was_published_once(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect(), ack=False)
    publish_job(connect(), 'running')
    inbox.wait(1)
    assert publish_job_once(connect()) == Outcome(AGAIN, 'moved')
    publish_job(connect(), 'merged')
    for index in range(2):
        assert publish_job_once(connect()) == Outcome(ENQUEUED, 'moved')
        inbox.wait(index + 1)
        inbox.messages[index].ack()
    wait_for(lambda: not items(client), 'the job to be completed')
    assert publish_job_once(connect()) == Outcome(ENQUEUED, 'moved')
    assert not items(client)


def test_refused_job_is_reported_and_the_others_are_stored(client: Client) -> None:
    store = Store(client)
    broken, small, plain = (
        workitem.new(
            name,
            'q',
            {
                'body': body,
                'headers': {'id': name, 'task': 'report', **({'job_key': name} if name != 'plain' else {})},
                'properties': {'delivery_tag': name},
            },
            1.0,
        )
        for name, body in (('broken', '\ud800'), ('small', 'a'), ('plain', 'a'))
    )
    with collect_outcomes() as outcomes:
        [refused] = store.publish_each([broken, small, plain])
    assert refused.id == once_id(broken)
    assert outcomes == [Outcome(ENQUEUED, 'small')]
    assert {doc['message']['headers']['id'] for doc in items(client)} == {'small', 'plain'}
