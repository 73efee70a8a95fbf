"""Unacknowledged messages and credit (`kombu_couchdb.consumer.unacked`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb.consumer.credit import Credit, Subscription
from kombu_couchdb.consumer.delivery import Delivery, Pull
from kombu_couchdb.consumer.mailbox import Mailbox
from kombu_couchdb.consumer.pending_writes import give_up
from kombu_couchdb.consumer.unacked import Unacked
from kombu_couchdb.couchdb.clock import ServerClock
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.ids import JOB
from kombu_couchdb.leases.lease import Lease

NOW = 1_763_709_000.0
UNLIMITED = 10


class Desk:
    """`Unacked` with a lease and a mailbox, and the usual steps of both threads."""

    def __init__(self) -> None:
        self.lease = SimpleNamespace(valid=True)
        self.mailbox = Mailbox[Any]()
        clock = cast(ServerClock, SimpleNamespace(now=lambda: NOW))
        self.unacked = Unacked(cast(Lease, self.lease), self.mailbox, clock, UNLIMITED)

    def subscribe(self, queue: str = 'q', limit: int = 4, credit: Credit | None = None) -> Subscription:
        subscription = Subscription(queue, credit or Credit(limit))
        self.unacked.subscribe(subscription)
        return subscription

    def claim(self, name: str = 'a', queue: str = 'q', *, ahead: bool = False) -> Delivery:
        """Claim a message of a queue, as the I/O thread does."""
        subscription = self.unacked.reserve(queue, ahead=ahead)
        assert subscription is not None
        doc: Any = {**workitem.new(name, queue, {'headers': {}, 'properties': {}, 'body': ''}, NOW), '_rev': '1-a'}
        delivery = Delivery({**workitem.claim(doc, 'me', NOW), '_rev': '2-b'}, subscription.credit, subscription)
        self.unacked.add_claimed(delivery)
        return delivery

    def take(self) -> Delivery | None:
        """Take the next delivery, as kombu's thread does."""
        while (delivery := self.mailbox.pop()) is not None:
            if self.unacked.deliver(delivery):
                return cast(Delivery, delivery)
        return None

    def written(self, **answer: Any) -> list[Mapping[str, Any]]:
        """Store the pending writes, as the I/O thread does, and return the documents."""
        pending = self.unacked.writes.take()
        for doc, react in pending:
            react(WriteResult.of({'id': doc['_id'], **(answer or {'rev': '3-c'})}))
        return [doc for doc, _ in pending]


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.mailbox.close()


def counts(subscription: Subscription) -> tuple[int, int]:
    return subscription.credit.held, subscription.credit.waiting


# -- credit


def test_delivered_message_still_counts_for_the_prefetch_count(desk: Desk) -> None:
    subscription = desk.subscribe(limit=2)
    desk.claim()
    assert counts(subscription) == (1, 1)
    assert desk.take()
    assert counts(subscription) == (1, 0)
    assert desk.unacked.credit() == {'q': 1}


@pytest.mark.parametrize(
    'decide',
    [Unacked.ack, Unacked.release, lambda unacked, tag: unacked.dead_letter(tag, 'because')],
    ids=['ack', 'release', 'dead_letter'],
)
def test_decision_frees_credit_before_it_is_written(desk: Desk, decide: Callable[[Unacked, str], None]) -> None:
    subscription = desk.subscribe(limit=1)
    delivery = desk.claim()
    desk.take()
    decide(desk.unacked, delivery.tag)
    assert desk.unacked.credit() == {'q': 1}
    assert counts(subscription) == (0, 0)
    desk.written()
    assert counts(subscription) == (0, 0)


def test_without_a_limit_one_message_is_claimed_until_more_are_asked_for(desk: Desk) -> None:
    subscription = desk.subscribe(limit=0)
    desk.unacked.request_more()
    assert desk.unacked.credit() == {'q': 1}
    delivery = desk.claim()
    assert desk.unacked.credit() == {'q': 0}
    assert desk.take() is delivery
    assert desk.unacked.credit() == {'q': 0}
    desk.unacked.ack(delivery.tag)
    assert desk.unacked.credit() == {'q': 0}
    desk.unacked.request_more()
    assert desk.unacked.credit() == {'q': 2}
    assert counts(subscription) == (0, 0)


def ramp(desk: Desk, subscription: Subscription, to: int = UNLIMITED) -> None:
    """Receive and acknowledge all messages, again and again, until `to` messages are claimed ahead."""
    while subscription.credit.ahead < to:
        while desk.unacked.credit()[subscription.queue]:
            desk.claim(f'ramp{time.monotonic_ns()}')
        while delivery := desk.take():
            desk.unacked.ack(delivery.tag)
        desk.unacked.request_more()


def test_without_a_limit_only_waiting_messages_count(desk: Desk) -> None:
    subscription = desk.subscribe(limit=0)
    ramp(desk, subscription)
    desk.unacked.request_more()
    assert desk.unacked.credit() == {'q': UNLIMITED}
    for name in range(UNLIMITED):
        desk.claim(str(name))
    assert desk.unacked.credit() == {'q': 0}
    for _ in range(3):
        assert desk.take()
    desk.unacked.request_more()
    assert desk.unacked.credit() == {'q': 3}
    assert counts(subscription) == (UNLIMITED, UNLIMITED - 3)
    assert subscription.credit.ahead == UNLIMITED


def test_more_is_claimed_ahead_only_after_the_mailbox_was_empty(desk: Desk) -> None:
    subscription = desk.subscribe(limit=0)
    ramp(desk, subscription, to=4)
    for name in 'abcd':
        desk.claim(name)
    for _ in range(3):
        assert desk.take()
        desk.unacked.request_more()
    assert subscription.credit.ahead == 4
    assert desk.take()
    desk.unacked.request_more()
    desk.unacked.request_more()
    assert subscription.credit.ahead == 8


def test_last_cancel_resets_the_number_claimed_ahead(desk: Desk) -> None:
    subscription = desk.subscribe(limit=0)
    ramp(desk, subscription, to=8)
    desk.unacked.cancel(subscription)
    desk.subscribe(credit=subscription.credit)
    assert desk.unacked.credit() == {'q': 1}


def test_lower_limit_waits_for_acks(desk: Desk) -> None:
    subscription = desk.subscribe(limit=3)
    deliveries = [desk.claim(name) for name in 'abc']
    desk.unacked.set_credit(subscription.credit, 1)
    assert desk.unacked.credit() == {'q': 0}
    for delivery in deliveries:
        assert desk.unacked.reserve('q') is None
        desk.unacked.ack(delivery.tag)
    assert desk.unacked.credit() == {'q': 1}


def test_failed_claim_returns_its_credit(desk: Desk) -> None:
    subscription = desk.subscribe(limit=2)
    assert desk.unacked.reserve('q') is subscription
    assert counts(subscription) == (1, 1)
    desk.unacked.return_credit(subscription.credit)
    assert counts(subscription) == (0, 0)


def test_queues_of_one_channel_share_its_credit(desk: Desk) -> None:
    credit = Credit(2)
    for queue in 'qr':
        desk.subscribe(queue, credit=credit)
    assert desk.unacked.credit() == {'q': 2, 'r': 2}
    assert desk.unacked.reserve('q')
    assert desk.unacked.reserve('r')
    assert desk.unacked.reserve('q') is None
    assert desk.unacked.reserve('r') is None


def test_subscription_with_most_credit_is_served_next(desk: Desk) -> None:
    one, three = desk.subscribe(limit=1), desk.subscribe(limit=3)
    desk.subscribe('r', limit=9)
    assert [desk.claim(str(n)).subscription for n in range(4)] == [three, three, one, three]
    assert desk.unacked.reserve('q') is None


def test_consumers_of_one_channel_are_served_in_turn(desk: Desk) -> None:
    credit = Credit(4)
    first, second = desk.subscribe(credit=credit), desk.subscribe(credit=credit)
    assert [desk.claim(str(n)).subscription for n in range(4)] == [first, second, first, second]
    assert desk.unacked.reserve('q') is None


# -- what is written


def test_release_counts_as_an_attempt(desk: Desk) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.take()
    desk.unacked.release(delivery.tag)
    [doc] = desk.written()
    assert (doc['_rev'], doc['claimed'], doc['attempts']) == ('2-b', None, 1)
    assert desk.unacked.writes.take_released() == [{**doc, '_rev': '3-c'}]
    assert desk.unacked.writes.take_released() == []


def test_second_decision_is_ignored_with_a_warning(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    subscription = desk.subscribe()
    delivery = desk.claim()
    desk.take()
    desk.unacked.ack(delivery.tag)
    with caplog.at_level(logging.WARNING):
        desk.unacked.release(delivery.tag)
    assert 'a is not held any more' in caplog.text
    assert len(desk.written()) == 1
    assert counts(subscription) == (0, 0)


def test_message_belongs_to_the_consumer_until_its_ack_is_stored(desk: Desk) -> None:
    desk.subscribe()
    delivery = desk.claim()
    assert desk.unacked.ids() == {'a'}
    desk.take()
    desk.unacked.ack(delivery.tag)
    assert desk.unacked.ids() == {'a'}
    pending = desk.unacked.writes.take()
    assert desk.unacked.ids() == {'a'}
    pending[0][1](WriteResult.of({'id': 'a', 'rev': '3-c'}))
    assert desk.unacked.ids() == set()


def test_lost_claim_is_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.take()
    desk.unacked.release(delivery.tag)
    with caplog.at_level(logging.WARNING):
        desk.written(id='a', error='conflict')
        assert desk.unacked.ids() == {'a'}  # somebody has changed the message: is it still held?
        desk.unacked.writes.retry_changed(lambda ids: [None])
    assert 'lost its claim of message a' in caplog.text
    assert desk.unacked.ids() == set()
    assert desk.unacked.writes.take_released() == []


def test_write_without_a_response_is_repeated_without_a_warning(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.subscribe()
    first, second = desk.claim('a'), desk.claim('b')
    desk.unacked.ack(first.tag)
    pending = desk.unacked.writes.take()
    desk.unacked.ack(second.tag)
    give_up(pending)
    assert desk.unacked.ids() == {'a', 'b'}
    with caplog.at_level(logging.WARNING):
        again = {doc['_id']: react for doc, react in desk.unacked.writes.take()}
        again['a'](WriteResult.conflict('a'))  # it is stored already, but the response was lost
    assert again.keys() == {'a', 'b'}
    assert caplog.records == []
    assert desk.unacked.ids() == {'b'}


def test_release_that_the_second_attempt_stores_can_be_claimed_again(desk: Desk) -> None:
    desk.subscribe()
    desk.unacked.release(desk.claim().tag)
    give_up(desk.unacked.writes.take())
    [doc] = desk.written()
    assert desk.unacked.writes.take_released() == [{**doc, '_rev': '3-c'}]
    assert desk.unacked.ids() == set()


@pytest.mark.parametrize(
    ('decide', 'line'),
    [
        (Unacked.ack, 'acknowledged message a of queue q, attempt 1 (not stored yet)'),
        (Unacked.release, 'released message a of queue q, attempt 1 (counted, not stored yet)'),
        (
            lambda unacked, tag: unacked.dead_letter(tag, 'because'),
            'dead-lettered message a of queue q, attempt 1 (not stored yet)',
        ),
    ],
    ids=['ack', 'release', 'dead_letter'],
)
def test_each_decision_is_logged_once(
    desk: Desk, caplog: pytest.LogCaptureFixture, decide: Callable[[Unacked, str], None], line: str
) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.take()
    with caplog.at_level(logging.DEBUG, 'kombu_couchdb'):
        decide(desk.unacked, delivery.tag)
        pending = desk.unacked.writes.take()
        give_up(pending)
        desk.written()
    assert caplog.messages == [line]


def test_uncounted_release_is_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    subscription = desk.subscribe()
    desk.claim()
    with caplog.at_level(logging.DEBUG, 'kombu_couchdb'):
        desk.unacked.cancel(subscription)
    assert caplog.messages == ['released message a of queue q, attempt 1 (not counted, not stored yet)']


# -- cancel and close


def test_cancel_releases_undelivered_messages_uncounted(desk: Desk) -> None:
    subscription = desk.subscribe()
    for name in 'abc':
        desk.claim(name)
    seen = desk.take()
    desk.unacked.cancel(subscription)
    docs = desk.written()
    assert [(doc['_id'], doc['attempts'], doc['claimed']) for doc in docs] == [('b', 0, None), ('c', 0, None)]
    assert desk.take() is None
    assert counts(subscription) == (1, 0)
    assert seen is not None
    desk.unacked.ack(seen.tag)
    assert counts(subscription) == (0, 0)


def test_cancel_keeps_messages_of_other_subscriptions(desk: Desk) -> None:
    subscription = desk.subscribe('q')
    desk.subscribe('r')
    desk.claim('a', 'q')
    kept = desk.claim('b', 'r')
    desk.unacked.cancel(subscription)
    desk.unacked.cancel(subscription)
    assert desk.take() is kept


def test_message_claimed_after_the_cancel_is_released(desk: Desk) -> None:
    subscription = desk.subscribe()
    assert desk.unacked.reserve('q') is subscription
    desk.unacked.cancel(subscription)
    doc = {'_id': 'a', '_rev': '2-b', 'queue': 'q', 'attempts': 1, 'claimed': {'by': 'me', 'date': NOW}}
    desk.unacked.add_claimed(Delivery(doc, subscription.credit, subscription))
    assert len(desk.mailbox) == 0
    assert [(doc['attempts'], doc['claimed']) for doc in desk.written()] == [(0, None)]
    assert counts(subscription) == (0, 0)


def test_close_releases_all_messages(desk: Desk) -> None:
    subscription = desk.subscribe()
    for name in 'abc':
        desk.claim(name)
    desk.take()
    desk.unacked.release_all()
    assert sorted((doc['_id'], doc['attempts']) for doc in desk.written()) == [('a', 1), ('b', 0), ('c', 0)]
    assert desk.unacked.ids() == set()
    assert counts(subscription) == (0, 0)


def test_close_counts_no_attempt_if_the_callback_succeeded(desk: Desk) -> None:
    desk.subscribe()
    for name in 'ab':
        desk.claim(name)
    first, second = desk.take(), desk.take()
    assert first
    assert second
    first.received_by_kombu = True
    desk.unacked.release_at_close(first.tag)
    desk.unacked.release_all()
    docs = desk.written()
    assert [(doc['_id'], doc['attempts'], doc['consumer'], doc['claimed']) for doc in docs] == [
        ('a', 0, 'me', None),
        ('b', 1, 'me', None),
    ]
    desk.unacked.release_at_close(first.tag)
    assert desk.written() == []


def test_acks_are_counted_only_for_subscribed_queues(desk: Desk) -> None:
    """Otherwise the heartbeat of a client with a reply queue for each call would name all these queues, without end."""
    first, second = desk.subscribe('q'), desk.subscribe('q')
    for name in 'ab':
        delivery = desk.claim(name)
        desk.take()
        desk.unacked.ack(delivery.tag)
    desk.unacked.cancel(second)
    assert desk.unacked.acked == {'q': 2}
    late = desk.claim('c')
    desk.take()
    desk.unacked.cancel(first)
    desk.unacked.ack(late.tag)
    assert desk.unacked.acked == {}


# -- a lost lease


def test_nothing_is_delivered_without_a_valid_lease(desk: Desk) -> None:
    subscription = desk.subscribe()
    delivery = desk.claim()
    desk.lease.valid = False
    assert desk.mailbox.pop() is delivery
    assert not desk.unacked.deliver(delivery)
    assert [(doc['_id'], doc['attempts'], doc['claimed']) for doc in desk.written()] == [('a', 0, None)]
    assert counts(subscription) == (0, 0)


def test_message_deleted_by_its_pull_needs_no_lease(desk: Desk) -> None:
    pull = Pull('q', no_ack=True)
    desk.unacked.take_credit(pull.credit)
    delivery = Delivery({**workitem.new('a', 'q', {}, NOW)}, pull.credit, final=True)
    desk.unacked.hold(delivery)
    assert desk.unacked.ids() == set()
    desk.lease.valid = False
    assert desk.unacked.deliver(delivery)


def test_messages_of_a_lost_lease_are_forgotten(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    subscription = desk.subscribe()
    for name in 'abc':
        desk.claim(name)
    seen = desk.take()
    assert len(desk.unacked.drop_all()) == 3
    assert desk.unacked.ids() == set()
    assert desk.take() is None
    assert counts(subscription) == (0, 0)
    assert desk.unacked.credit() == {'q': 4}
    assert seen is not None
    with caplog.at_level(logging.WARNING):
        desk.unacked.ack(seen.tag)
    assert 'lease was lost' in caplog.text
    assert desk.written() == []
    assert counts(subscription) == (0, 0)


def test_broadcast_survives_a_lost_lease(desk: Desk) -> None:
    subscription = desk.subscribe()
    desk.unacked.broadcast('q', {'body': '', 'headers': {}, 'properties': {}})
    assert desk.unacked.drop_all() == []
    assert desk.take()
    assert counts(subscription) == (0, 0)


def test_lease_lost_during_a_delivery_returns_the_credit_once(desk: Desk) -> None:
    subscription = desk.subscribe()
    delivery = desk.claim()
    assert desk.mailbox.pop() is delivery
    desk.unacked.drop_all()
    assert not desk.unacked.deliver(delivery)
    assert desk.written() == []
    assert counts(subscription) == (0, 0)


# -- broadcasts


def test_broadcast_is_delivered_to_a_consumer_of_the_queue(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    subscription = desk.subscribe()
    desk.unacked.broadcast('q', {'body': 'x', 'headers': {}, 'properties': {}})
    assert desk.unacked.credit() == {'q': 4}
    delivery = desk.take()
    assert delivery is not None
    assert delivery.payload()['body'] == 'x'
    assert counts(subscription) == (0, 0)
    desk.unacked.ack(delivery.tag)
    desk.unacked.release(delivery.tag)
    assert desk.written() == []
    assert caplog.records == []


def test_a_broadcast_waits_for_its_consumer(desk: Desk) -> None:
    for body in 'xyz':
        desk.unacked.broadcast('q', {'body': body, 'headers': {}, 'properties': {}})
    desk.unacked.broadcast('r', {'body': 'other', 'headers': {}, 'properties': {}})
    subscription = desk.subscribe()
    assert [delivery.payload()['body'] for delivery in (desk.take(), desk.take(), desk.take()) if delivery] == [
        'x',
        'y',
        'z',
    ]
    assert desk.take() is None
    assert counts(subscription) == (0, 0)
    desk.subscribe()
    assert desk.take() is None


def test_consumers_of_a_queue_share_its_broadcasts(desk: Desk) -> None:
    first, second = desk.subscribe(), desk.subscribe()
    for body in 'xyz':
        desk.unacked.broadcast('q', {'body': body, 'headers': {}, 'properties': {}})
    assert [delivery.subscription for delivery in (desk.take(), desk.take(), desk.take()) if delivery] == [
        first,
        second,
        first,
    ]


# -- waking the I/O thread


@pytest.mark.parametrize(
    'change',
    [
        lambda desk, delivery: desk.subscribe(),
        lambda desk, delivery: desk.unacked.cancel(delivery.subscription),
        lambda desk, delivery: desk.unacked.set_credit(delivery.credit, 5),
        lambda desk, delivery: desk.unacked.ack(delivery.tag),
        lambda desk, delivery: desk.unacked.release(delivery.tag),
        lambda desk, delivery: desk.unacked.dead_letter(delivery.tag, 'because'),
        lambda desk, delivery: desk.unacked.drop_all(),
    ],
    ids=['subscribe', 'cancel', 'set_credit', 'ack', 'release', 'dead_letter', 'drop_all'],
)
def test_each_change_wakes_the_thread(desk: Desk, change: Callable[[Desk, Delivery], Any]) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.take()
    desk.unacked.wakeup.wait(0.0)
    change(desk, delivery)
    began = time.monotonic()
    desk.unacked.wakeup.wait(100.0)
    assert time.monotonic() - began < 50.0


@pytest.mark.parametrize(
    ('more_to_claim', 'limit', 'held', 'key', 'delay'),
    [
        (False, 8, 8, None, 0.02),  # nothing to claim: the ack may wait for other acks
        (True, 8, 8, None, 0.005),  # there is more to claim, and more acks follow soon
        (True, 8, 5, None, 0.0),  # half of the credit is free
        (True, 1, 1, None, 0.0),
        (True, 0, 5, None, 0.0),
        (False, 8, 8, 'k', 0.0),  # the next message of a unique job waits for its ack
    ],
)
def test_delay_of_an_ack(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    more_to_claim: bool,
    limit: int,
    held: int,
    key: str | None,
    delay: float,
) -> None:
    delays: list[float] = []
    subscription = desk.subscribe()
    desk.unacked.set_credit(subscription.credit, limit)
    if not limit:
        ramp(desk, subscription)
    deliveries = [desk.claim(f'{JOB}{n}' if key else f'item{n}') for n in range(held)]
    for _ in deliveries:
        desk.take()
    monkeypatch.setattr(desk.unacked.wakeup, 'set', lambda within=0.0: delays.append(within))
    desk.unacked.more_to_claim = more_to_claim
    desk.unacked.ack(deliveries[0].tag)
    assert delays == [delay]


# -- paused queues


def test_paused_queue_has_no_credit_and_its_undelivered_messages_are_released(desk: Desk) -> None:
    credit = Credit(limit=3)
    desk.subscribe('q', credit=credit)
    desk.subscribe('other', credit=credit)
    delivered, waiting, other = desk.claim('a'), desk.claim('b'), desk.claim('c', 'other')
    assert desk.take() is delivered
    desk.unacked.pause(frozenset({'q'}))
    assert [(doc['_id'], doc['claimed'], doc['attempts']) for doc in desk.written()] == [('b', None, 0)]
    assert desk.unacked.credit() == {'q': 0, 'other': 1}
    assert desk.take() is other
    desk.unacked.ack(waiting.tag)  # too late: kombu has never received it
    desk.unacked.ack(delivered.tag)
    assert [doc['_id'] for doc in desk.written()] == ['a']
    assert desk.unacked.credit() == {'q': 0, 'other': 2}
    desk.unacked.pause(frozenset())
    assert desk.unacked.credit() == {'q': 2, 'other': 2}


def test_messages_that_wait_for_their_bodies_are_released_when_the_queue_is_paused(desk: Desk) -> None:
    subscription = desk.subscribe()
    doc = {**workitem.new('a', 'q', {'headers': {}, 'properties': {}, 'body': ''}, NOW), '_rev': '2-b'}
    delivery = Delivery(doc, subscription.credit, subscription, needs_body=True)
    desk.unacked.take_credit(subscription.credit)
    desk.unacked.add_claimed(delivery)
    desk.unacked.pause(frozenset({'q'}))
    assert [doc['_id'] for doc in desk.written()] == ['a']
    desk.unacked.set_body(delivery, b'too late')
    assert desk.take() is None
    assert counts(subscription) == (0, 0)
