"""Transient messages: stored by a thread, kept during an outage, and never waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from kombu_couchdb import outage
from kombu_couchdb.errors import ServerUnavailable, Unstorable
from kombu_couchdb.transport import transient
from kombu_couchdb.transport.transient import TransientMessages, is_transient
from tests.conftest import PATIENCE, wait_for


class Server:
    """Stores messages, unless it hangs or refuses them."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.requests = 0
        self.responds = threading.Event()
        self.responds.set()
        self.error: Exception | None = None

    def store(self, messages: Sequence[int]) -> None:
        self.requests += 1
        self.responds.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.stored += messages


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(outage, 'LONGEST_PAUSE_SECONDS', 0.01)
    for name, seconds in (('_CLOSE_SECONDS', 0.2), ('_ROOM_SECONDS', 0.2)):
        monkeypatch.setattr(transient, name, seconds)
    return Server()


@pytest.fixture
def messages(server: Server) -> TransientMessages:
    return TransientMessages(server.store)


def test_messages_are_stored_in_order_and_together(messages: TransientMessages, server: Server) -> None:
    server.responds.clear()
    messages.add(0)
    wait_for(lambda: server.requests, 'the first request')
    for number in range(1, 50):
        messages.add(number)
    server.responds.set()
    wait_for(lambda: server.stored == [*range(50)], 'all messages to be stored')
    assert server.requests == 2


def test_messages_wait_during_an_outage_and_the_oldest_are_dropped(messages: TransientMessages, server: Server) -> None:
    server.error = ServerUnavailable('no')
    for number in range(1200):
        messages.add(number)
    wait_for(lambda: server.requests > 2, 'it to try again')
    server.error = None
    wait_for(lambda: server.stored == [*range(200, 1200)], 'the last 1000 messages to be stored')


def test_publisher_waits_for_room_once_in_an_outage(messages: TransientMessages, server: Server) -> None:
    server.responds.clear()
    began = time.monotonic()
    for number in range(3000):
        messages.add(number)
    assert time.monotonic() - began < PATIENCE
    server.responds.set()
    wait_for(lambda: server.stored[-1:] == [2999], 'the last messages to be stored')


def test_refused_messages_are_dropped_and_logged(
    messages: TransientMessages, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = Unstorable('no')
    messages.add(0)
    wait_for(lambda: '1 events or replies are lost' in caplog.text, 'the log line')
    server.error = None
    messages.add(1)
    wait_for(lambda: server.stored == [1], 'the next message to be stored')


def test_close_does_not_wait_for_an_outage_to_end(messages: TransientMessages, server: Server) -> None:
    server.error = ServerUnavailable('no')
    messages.add(0)
    wait_for(lambda: server.requests > 1, 'the outage to be noticed')
    messages.close()
    wait_for(lambda: messages._thread is None, 'its end')
    server.responds.clear()
    hanging = TransientMessages(server.store)
    hanging.add(0)
    began = time.monotonic()
    hanging.close()
    assert time.monotonic() - began < PATIENCE / 2  # the request has not ended yet
    server.responds.set()


def test_only_events_and_replies_that_may_be_lost_are_transient() -> None:
    def message(mode: int, **headers: str) -> dict[str, dict[str, object]]:
        return {'headers': dict(headers), 'properties': {'delivery_mode': mode}}

    assert is_transient(message(1, hostname='celery@here'))
    assert is_transient(message(1, ticket='id', clock='1'))
    assert not is_transient(message(2, hostname='celery@here'))
    assert not is_transient(message(1, hostname='here', task='add'))
    assert not is_transient(message(1))
