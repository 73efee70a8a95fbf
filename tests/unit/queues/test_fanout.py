"""Broadcasts as a listener takes them: each once, in order, also if a cluster reports some late."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kombu_couchdb.documents.ids import BROADCAST
from kombu_couchdb.queues.fanout import Listener

Document = dict[str, Any]

NOW = 1_763_709_000.0


def broadcast(
    number: int, publisher: str = 'p', exchange: str = 'ex', date: float | None = None, **more: Any
) -> Document:
    return {
        '_id': f'{BROADCAST}{publisher}{number}',
        'type': 'Broadcast',
        'exchange': exchange,
        'publisher': publisher,
        'number': number,
        'date': NOW + number if date is None else date,
        'expires': NOW + 60,
        'message': {'body': f'{publisher}{number}', 'headers': {}, 'properties': {}},
        **more,
    }


@pytest.fixture
def listener() -> Listener:
    listener = Listener()
    listener.prime([])
    listener.bind('ex', 'q')
    return listener


def received(taken: list[tuple[str, Document]]) -> list[tuple[str, str]]:
    return [(queue, message['body']) for queue, message in taken]


def test_numbers_give_the_order_if_the_clock_of_the_sender_steps_back(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    docs = [broadcast(2, date=NOW - 1), broadcast(1, date=NOW), broadcast(3, date=NOW - 1)]
    assert received(listener.take(docs)) == [('q', 'p1'), ('q', 'p2'), ('q', 'p3')]
    assert caplog.records == []


def test_broadcast_that_a_message_names_is_lacking_until_it_is_taken_or_expires(listener: Listener) -> None:
    def after(number: Any, publisher: Any = 'p', expires: Any = NOW + 60) -> Document:
        return {'publisher': publisher, 'number': number, 'expires': expires}

    listener.take([broadcast(1), broadcast(3)])
    assert [listener.lacks(after(number), NOW) for number in (1, 2, 3, 4)] == [False, True, False, True]
    assert listener.lacks(after(1, 'other'), NOW)
    assert not listener.lacks(after(4), NOW + 60)
    malformed: list[Any] = [None, 5, [], {}, after('x'), after(4, ['p']), after(4, expires='never')]
    assert not any(listener.lacks(each, NOW) for each in malformed)
    listener.take([broadcast(2), broadcast(4)])
    assert not any(listener.lacks(after(number), NOW) for number in (2, 4))
    assert not Listener().lacks(after(4), NOW), 'a connection without listeners needs no broadcasts'


def test_listener_that_falls_behind_logs_a_warning(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        listener.take([broadcast(1), broadcast(5)])
        assert caplog.records == []  # they may still arrive
        monkeypatch.setattr('kombu_couchdb.queues.fanout._MISSING_SECONDS', -1.0)
        listener.take([])
        listener.take([])
    [record] = caplog.records
    assert 'fell behind: 3 broadcasts' in record.getMessage()


def test_broadcasts_reported_late_by_a_cluster_are_received(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert received(listener.take([broadcast(1), broadcast(4)])) == [('q', 'p1'), ('q', 'p4')]
    assert received(listener.take([broadcast(3), broadcast(4)])) == [('q', 'p3')]
    assert received(listener.take([broadcast(2), broadcast(3)])) == [('q', 'p2')]
    assert received(listener.take([broadcast(2), broadcast(3), broadcast(4)])) == []
    monkeypatch.setattr('kombu_couchdb.queues.fanout._MISSING_SECONDS', -1.0)
    listener.take([])
    assert caplog.records == []
