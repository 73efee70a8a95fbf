"""Broadcasts (`kombu_couchdb.queues.fanout`): who sends them, over a database in memory, and who listens."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.ids import BROADCAST
from kombu_couchdb.errors import Conflict, ServerUnavailable
from kombu_couchdb.queues.fanout import Broadcaster, Listener

Document = dict[str, Any]

NOW = 1_763_709_000.0
RETENTION = 60.0


class FakeClient:
    """The documents of a database where it is `now`."""

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
    return Broadcaster(cast(Client, client), RETENTION)


def send(sender: Broadcaster, *bodies: str) -> None:
    for body in bodies:
        sender.send('ex', 'key', {'body': body})


# -- sending


@pytest.mark.parametrize('stored', [True, False])
def test_a_broadcast_that_failed_costs_the_next_one_nothing(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """Whether it was stored is unknown. The next one had its number, and was taken for it where it had been heard."""
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
def test_a_broadcast_that_is_sent_again_is_heard_once(
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


def test_a_broadcast_is_one_document_for_its_exchange(client: FakeClient) -> None:
    send(broadcaster(client), 'a')
    [doc] = client.docs.values()
    assert doc['_id'].startswith(BROADCAST)
    assert {
        name: doc[name] for name in ('type', 'exchange', 'routing_key', 'number', 'date', 'expires', 'message')
    } == {
        'type': 'Broadcast',
        'exchange': 'ex',
        'routing_key': 'key',
        'number': 1,
        'date': NOW,
        'expires': NOW + RETENTION,
        'message': {'body': 'a'},
    }


def test_broadcasts_are_numbered_by_publisher(client: FakeClient) -> None:
    first, second = broadcaster(client), broadcaster(client)
    send(first, 'a', 'b')
    send(second, 'c')
    publishers = [publisher for publisher, _, _ in client.sent()]
    assert [(number, body) for _, number, body in client.sent()] == [(1, 'a'), (2, 'b'), (1, 'c')]
    assert publishers[0] == publishers[1] != publishers[2]


def test_what_is_kept_is_not_written_over(client: FakeClient) -> None:
    sender = broadcaster(client)
    send(sender, 'a')
    client.now += RETENTION - 0.1
    send(sender, 'b')
    assert sorted(body for _, _, body in client.sent()) == ['a', 'b']


def test_what_has_expired_is_written_over_oldest_first(client: FakeClient) -> None:
    sender = broadcaster(client)
    for body in 'abc':
        send(sender, body)
        client.now += 25
    send(sender, 'd')
    send(sender, 'e')
    assert sorted(body for _, _, body in client.sent()) == ['b', 'c', 'd', 'e']
    client.now += 20
    send(sender, 'f')
    assert sorted(body for _, _, body in client.sent()) == ['c', 'd', 'e', 'f']


def test_at_a_steady_rate_the_documents_stay_few_and_the_numbers_go_on(client: FakeClient) -> None:
    sender = broadcaster(client)
    for n in range(100):
        send(sender, str(n))
        client.now += 20
    assert len(client.docs) == 3
    assert max(number for _, number, _ in client.sent()) == 100


def test_after_a_pause_it_counts_anew_under_another_name(client: FakeClient) -> None:
    sender = broadcaster(client)
    send(sender, 'a', 'b')
    before = client.sent()[0][0]
    client.now += RETENTION + 0.1
    send(sender, 'c')
    [(publisher, number, _)] = [sent for sent in client.sent() if sent[2] == 'c']
    assert number == 1
    assert publisher != before
    assert len(client.docs) == 2


def test_documents_of_publishers_that_are_gone_are_adopted(client: FakeClient) -> None:
    send(broadcaster(client), 'a', 'b')
    client.now += 2 * RETENTION + 0.1
    client.reads = 0
    send(broadcaster(client), 'c', 'd', 'e')
    assert sorted(body for _, _, body in client.sent()) == ['c', 'd', 'e']
    assert client.reads == 1


def test_what_others_may_still_write_over_is_left_to_them(client: FakeClient) -> None:
    send(broadcaster(client), 'a')
    client.now += 2 * RETENTION - 0.1
    send(broadcaster(client), 'b')
    assert sorted(body for _, _, body in client.sent()) == ['a', 'b']


def test_spoilt_documents_and_others_are_not_adopted(client: FakeClient) -> None:
    client.put({'_id': BROADCAST + 'spoilt', 'expires': 'long ago'})
    client.put({'_id': BROADCAST + 'empty'})
    client.put({'_id': 'broker:binding:x', 'expires': 0})
    before = dict(client.docs)
    send(broadcaster(client), 'a')
    assert {name: client.docs[name] for name in before} == before
    assert len(client.docs) == 4


def test_in_conflict_it_takes_the_next_slot(client: FakeClient) -> None:
    send(broadcaster(client), 'a', 'b')
    client.now += 3 * RETENTION
    one, two = broadcaster(client), broadcaster(client)
    two._own = two._adoptable(client.now)  # read before the other was faster
    send(one, 'c')
    send(two, 'd', 'e')
    assert sorted(body for _, _, body in client.sent()) == ['c', 'd', 'e']


def test_a_lost_slot_is_tried_once(client: FakeClient) -> None:
    sender = broadcaster(client)
    sender._own = [(0.0, BROADCAST + 'gone', '5-x')]
    send(sender, 'a')
    assert [name for _, name, _ in sender._own] == list(client.docs)


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


def had(taken: list[tuple[str, Document]]) -> list[tuple[str, str]]:
    return [(queue, message['body']) for queue, message in taken]


def test_each_broadcast_is_had_once(listener: Listener) -> None:
    assert had(listener.take([broadcast(1)])) == [('q', 'p1')]
    assert had(listener.take([broadcast(1), broadcast(2)])) == [('q', 'p2')]
    assert had(listener.take([broadcast(1), broadcast(2)])) == []


def test_broadcasts_come_in_the_order_of_sending(listener: Listener) -> None:
    docs = [broadcast(2, date=NOW + 2), broadcast(1, 'r', date=NOW + 3), broadcast(1, date=NOW + 1)]
    assert had(listener.take(docs)) == [('q', 'p1'), ('q', 'p2'), ('q', 'r1')]


def test_numbers_decide_though_the_sender_s_clock_was_put_back(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    docs = [broadcast(2, date=NOW - 1), broadcast(1, date=NOW), broadcast(3, date=NOW - 1)]
    assert had(listener.take(docs)) == [('q', 'p1'), ('q', 'p2'), ('q', 'p3')]
    assert caplog.records == []


def test_every_queue_of_the_exchange_has_it_and_no_other(listener: Listener) -> None:
    listener.bind('ex', 'r')
    listener.bind('ex', 'r')
    listener.bind('other', 's')
    assert had(listener.take([broadcast(1)])) == [('q', 'p1'), ('r', 'p1')]
    assert had(listener.take([broadcast(1, 'o', 'other')])) == [('s', 'o1')]
    assert had(listener.take([broadcast(1, 'n', 'nobody')])) == []


def test_unbound_it_has_nothing_any_more(listener: Listener) -> None:
    listener.bind('other', 'q')
    listener.bind('ex', 'r')
    listener.unbind('q')
    assert had(listener.take([broadcast(1), broadcast(1, 'o', 'other')])) == [('r', 'p1')]
    listener.unbind('unknown')


def test_what_was_there_before_is_had_already() -> None:
    listener = Listener()
    assert not listener.primed
    listener.prime([broadcast(3), broadcast(1), broadcast(7, 'r')])
    assert listener.primed
    listener.bind('ex', 'q')
    assert had(listener.take([broadcast(number) for number in (1, 2, 3, 4)] + [broadcast(7, 'r')])) == [('q', 'p4')]


def test_who_binds_late_has_what_comes_later(listener: Listener) -> None:
    listener.take([broadcast(1), broadcast(1, 'o', 'other')])
    listener.bind('other', 'r')
    assert had(listener.take([broadcast(1, 'o', 'other'), broadcast(2, 'o', 'other')])) == [('r', 'o2')]


def test_who_falls_behind_is_told_how_far(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        listener.take([broadcast(1), broadcast(5)])
        assert caplog.records == []  # they may still come
        monkeypatch.setattr('kombu_couchdb.queues.fanout._MISSING_SECONDS', -1.0)
        listener.take([])
        listener.take([])
    [record] = caplog.records
    assert 'fell behind: 3 broadcasts' in record.getMessage()


def test_what_a_cluster_tells_of_late_is_not_lost(
    listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert had(listener.take([broadcast(1), broadcast(4)])) == [('q', 'p1'), ('q', 'p4')]
    assert had(listener.take([broadcast(3), broadcast(4)])) == [('q', 'p3')]
    assert had(listener.take([broadcast(2), broadcast(3)])) == [('q', 'p2')]
    assert had(listener.take([broadcast(2), broadcast(3), broadcast(4)])) == []
    monkeypatch.setattr('kombu_couchdb.queues.fanout._MISSING_SECONDS', -1.0)
    listener.take([])
    assert caplog.records == []


def test_it_does_not_wait_for_too_much(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    listener.take([broadcast(1), broadcast(10_000)])
    listener.take([broadcast(1, 'r'), broadcast(10, 'r')])
    assert [record.getMessage().split(': ')[1].split()[0] for record in caplog.records] == ['8']


def test_without_a_gap_nothing_is_said(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        listener.take([broadcast(number) for number in (3, 1, 2)])
        listener.take([broadcast(9, 'n', 'nobody')])  # not for us
    assert caplog.records == []


def test_after_a_pause_of_the_sender_nothing_seems_missing(
    client: FakeClient, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    sender, late = broadcaster(client), Listener()
    send(sender, 'a', 'b')
    listener.take(client.docs.values())
    client.now += RETENTION + 1
    late.prime([])  # the database was swept clean of broadcasts meanwhile
    late.bind('ex', 'r')
    send(sender, 'c')
    news = [doc for doc in client.docs.values() if doc['number'] == 1]
    with caplog.at_level(logging.WARNING):
        assert had(listener.take(news)) == [('q', 'c')]
        assert had(late.take(news)) == [('r', 'c')]
    assert caplog.records == []


@pytest.mark.parametrize(
    'spoilt',
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
def test_a_spoilt_broadcast_is_passed_over(listener: Listener, spoilt: Document) -> None:
    assert had(listener.take([{**broadcast(1, 's'), **spoilt}, broadcast(1)])) == [('q', 'p1')]


def test_deletions_are_no_broadcasts(listener: Listener) -> None:
    assert listener.take([{'_id': BROADCAST + 'x', '_deleted': True}]) == []
