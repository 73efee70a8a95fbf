"""Idempotent publishing: killed or paused publishers, and successors that repeat their work."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.idempotency import idempotent
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


def test_publisher_paused_until_the_message_was_completed(
    connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher pauses between checking that the message does not exist and writing it."""
    paused, other = connect(), connect()
    store, inbox = paused.default_channel.connection.store, Inbox(connect())
    look = store.unpublished

    def look_and_pause(docs: Any) -> Any:
        found = look(docs)
        publish_once(other)
        assert inbox.wait(1) == ['a']
        wait_for(lambda: not items(client), 'the ack')
        return found

    monkeypatch.setattr(store, 'unpublished', look_and_pause)
    publish_once(paused)
    assert items(client) == []


def test_large_message_is_stored_once(connect: Connect, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of a large message is an attachment."""
    connection = connect()
    monkeypatch.setattr(connection.default_channel.connection.store, 'unpublished', lambda docs: docs)
    for _ in range(2):
        publish_once(connection, 'x' * 50_000)
    assert len(items(client)) == 1
    assert Inbox(connect()).wait(1) == ['x' * 50_000]
