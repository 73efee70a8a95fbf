"""Unit tests of broadcasts (`kombu_couchdb.queues.fanout`), over a database in memory."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb.documents.ids import BROADCAST
from kombu_couchdb.errors import Conflict, ServerUnavailable
from kombu_couchdb.queues.broadcasts_database import BroadcastsDatabase
from kombu_couchdb.queues.fanout import Broadcaster, Listener

Document = dict[str, Any]

NOW = 1_763_709_000.0
RETENTION = 60.0


class FakeClient:
    """A database in memory, at the time `now`."""

    def __init__(self) -> None:
        self.now = NOW
        self.docs: dict[str, Document] = {}
        self.clock = SimpleNamespace(now=lambda: self.now)
        self.reads = 0

    def put(self, doc: Document) -> str:
        current = self.docs.get(doc['_id'])
        if (current or {}).get('_rev') != doc.get('_rev'):
            raise Conflict(doc['_id'])
        rev = f'{int(str(doc.get("_rev", "0")).partition("-")[0]) + 1}-x'
        self.docs[doc['_id']] = {**doc, '_rev': rev}
        return rev

    def try_put(self, doc: Document) -> str | None:
        try:
            return self.put(doc)
        except Conflict:
            return None

    def id_range(self, prefix: str, *, docs: bool, limit: int) -> list[Document]:
        self.reads += 1
        ids = sorted(name for name in self.docs if name.startswith(prefix))
        return [{'id': name, 'doc': self.docs[name]} for name in ids[:limit]]

    def sent(self) -> list[tuple[str, int, str]]:
        return [(doc['publisher'], doc['number'], doc['message']['body']) for doc in self.docs.values()]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def broadcaster(client: FakeClient) -> Broadcaster:
    database = SimpleNamespace(broker=client, store=lambda write: write(client))
    return Broadcaster(cast(BroadcastsDatabase, database), RETENTION)


def send(sender: Broadcaster, *bodies: str) -> None:
    for body in bodies:
        sender.send('ex', 'key', {'body': body})


# -- sending


@pytest.mark.parametrize('stored', [True, False])
def test_broadcast_after_a_failed_one_is_received(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """The failed one may have been stored. If the next had the same number, listeners would ignore it."""
    sender, listener = broadcaster(client), Listener()
    listener.bind('ex', 'q')
    send(sender, 'a')
    put = client.put

    def put_and_fail(doc: Document) -> str:
        if stored:
            put(doc)
        raise ServerUnavailable('no answer')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'put', put_and_fail)
        with pytest.raises(ServerUnavailable):
            sender.send('ex', 'key', {'body': 'b', 'properties': {'delivery_tag': 'b'}})
    heard = listener.take(client.docs.values())
    sender.send('ex', 'key', {'body': 'c', 'properties': {'delivery_tag': 'c'}})
    heard += listener.take(client.docs.values())
    assert [message['body'] for _, message in heard] == (['a', 'b', 'c'] if stored else ['a', 'c'])


@pytest.mark.parametrize('reconnects', [True, False])
def test_broadcast_that_is_sent_again_is_received_once(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, reconnects: bool
) -> None:
    sender, listener = broadcaster(client), Listener()
    listener.bind('ex', 'q')
    put, message = client.put, {'body': 'a', 'properties': {'delivery_tag': 'a'}}

    def put_and_fail(doc: Document) -> str:
        put(doc)
        raise ServerUnavailable('no answer')

    with monkeypatch.context() as patched:
        patched.setattr(client, 'put', put_and_fail)
        with pytest.raises(ServerUnavailable):
            sender.send('ex', 'key', message)
    (broadcaster(client) if reconnects else sender).send('ex', 'key', message)
    assert [message['body'] for _, message in listener.take(client.docs.values())] == ['a']


def test_broadcast_is_not_overwritten_before_it_expires(client: FakeClient) -> None:
    sender = broadcaster(client)
    send(sender, 'a')
    client.now += RETENTION - 0.1
    send(sender, 'b')
    assert sorted(body for _, _, body in client.sent()) == ['a', 'b']


def test_malformed_and_other_documents_are_not_overwritten(client: FakeClient) -> None:
    client.put({'_id': BROADCAST + 'malformed', 'expires': 'long ago'})
    client.put({'_id': BROADCAST + 'empty'})
    client.put({'_id': 'broker:binding:x', 'expires': 0})
    before = dict(client.docs)
    send(broadcaster(client), 'a')
    assert {name: client.docs[name] for name in before} == before
    assert len(client.docs) == 4


# -- listening


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
        'message': {'body': f'{publisher}{number}'},
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


def test_each_broadcast_is_received_once(listener: Listener) -> None:
    assert received(listener.take([broadcast(1)])) == [('q', 'p1')]
    assert received(listener.take([broadcast(1), broadcast(2)])) == [('q', 'p2')]
    assert received(listener.take([broadcast(1), broadcast(2)])) == []


def test_broadcasts_are_received_in_the_order_of_sending(listener: Listener) -> None:
    docs = [broadcast(2, date=NOW + 2), broadcast(1, 'r', date=NOW + 3), broadcast(1, date=NOW + 1)]
    assert received(listener.take(docs)) == [('q', 'p1'), ('q', 'p2'), ('q', 'r1')]


def test_numbers_give_the_order_if_the_clock_of_the_sender_steps_back(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    docs = [broadcast(2, date=NOW - 1), broadcast(1, date=NOW), broadcast(3, date=NOW - 1)]
    assert received(listener.take(docs)) == [('q', 'p1'), ('q', 'p2'), ('q', 'p3')]
    assert caplog.records == []


def test_queue_bound_late_receives_later_broadcasts(listener: Listener) -> None:
    listener.take([broadcast(1), broadcast(1, 'o', 'other')])
    listener.bind('other', 'r')
    assert received(listener.take([broadcast(1, 'o', 'other'), broadcast(2, 'o', 'other')])) == [('r', 'o2')]


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


def test_number_of_missing_broadcasts_is_limited(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    listener.take([broadcast(1), broadcast(10_000)])
    listener.take([broadcast(1, 'r'), broadcast(10, 'r')])
    assert [record.getMessage().split(': ')[1].split()[0] for record in caplog.records] == ['8']


def test_no_warning_after_a_pause_of_the_sender(
    client: FakeClient, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    sender, late = broadcaster(client), Listener()
    send(sender, 'a', 'b')
    listener.take(client.docs.values())
    client.now += RETENTION + 1
    late.prime([])  # its broadcasts have been deleted
    late.bind('ex', 'r')
    send(sender, 'c')
    new = [doc for doc in client.docs.values() if doc['number'] == 1]
    with caplog.at_level(logging.WARNING):
        assert received(listener.take(new)) == [('q', 'c')]
        assert received(late.take(new)) == [('r', 'c')]
    assert caplog.records == []


@pytest.mark.parametrize(
    'malformed',
    [
        {'type': 'Other'},
        {'message': None},
        {'message': 'text'},
        {'number': None},
        {'number': 'one'},
        {'exchange': None},
        {'exchange': []},
    ],
    ids=repr,
)
def test_malformed_broadcast_is_ignored(listener: Listener, malformed: Document) -> None:
    assert received(listener.take([{**broadcast(1, 's'), **malformed}, broadcast(1)])) == [('q', 'p1')]
