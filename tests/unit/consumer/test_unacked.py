"""Unacknowledged messages, their credit, and the shelf (`kombu_couchdb.consumer.unacked`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb.consumer import unacked as module
from kombu_couchdb.consumer.delivery import Credit, Delivery, Mailbox, Pull, Subscription
from kombu_couchdb.consumer.pace import Throughput
from kombu_couchdb.consumer.pending_writes import give_up
from kombu_couchdb.consumer.unacked import Unacked
from kombu_couchdb.couchdb.clock import ServerClock
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.ids import JOB
from kombu_couchdb.leases.lease import Lease

NOW = 1_763_709_000.0
UNLIMITED = 10
MESSAGE = {'body': 'x', 'headers': {}, 'properties': {}}

#: A message whose body is an attachment.
ATTACHED: dict[str, Any] = {
    'message': {'headers': {}, 'properties': {}},
    '_attachments': {'body': {'stub': True, 'length': 20_000}},
}


class Desk:
    """`Unacked` with a lease and a mailbox, and the usual steps of both threads."""

    def __init__(self) -> None:
        self.lease = SimpleNamespace(valid=True)
        self.mailbox = Mailbox()
        clock = cast(ServerClock, SimpleNamespace(now=lambda: NOW))
        self.unacked = Unacked(cast(Lease, self.lease), self.mailbox, clock, UNLIMITED)

    def subscribe(self, queue: str = 'q', limit: int = 4, credit: Credit | None = None) -> Subscription:
        subscription = Subscription(queue, credit or Credit(limit))
        self.unacked.subscribe(subscription)
        return subscription

    def reserve(self, queue: str = 'q', *, ahead: bool = False) -> Subscription:
        subscription = self.unacked.reserve(queue, ahead=ahead)
        assert subscription is not None
        return subscription

    def claim(self, name: str = 'a', queue: str = 'q', *, ahead: bool = False, **members: Any) -> Delivery:
        """Claim a message of a queue, as the I/O thread does."""
        return self.add(self.reserve(queue, ahead=ahead), name, **members)

    def add(self, subscription: Subscription, name: str = 'a', **members: Any) -> Delivery:
        doc: Any = {**workitem.new(name, subscription.queue, dict(MESSAGE), NOW), '_rev': '1-a', **members}
        delivery = Delivery({**workitem.claim(doc, 'me', NOW), '_rev': '2-b'}, subscription)
        self.unacked.add_claimed(delivery)
        return delivery

    def claim_all(self, queue: str = 'q') -> list[Delivery]:
        """Claim as many messages as possible, also ahead, for the only channel of the queue."""
        found: list[Delivery] = []
        while self.unacked.credit(ahead=True)[queue]:
            found.append(self.claim(f'{queue}{len(found)}', queue, ahead=True))
        return found

    def take(self) -> Delivery | None:
        """Take the next delivery, as kombu's thread does."""
        while (delivery := self.mailbox.pop()) is not None:
            assert isinstance(delivery, Delivery)
            if self.unacked.deliver(delivery):
                return delivery
        return None

    def written(self, **answer: Any) -> list[Mapping[str, Any]]:
        """Store the pending writes, as the I/O thread does, and return the documents."""
        pending = self.unacked.writes.take()
        for doc, react in pending:
            react(WriteResult.of({'id': doc['_id'], **(answer or {'rev': '3-c'})}))
        return [doc for doc, _ in pending]

    def attempts(self) -> list[tuple[str, Any, int]]:
        """Store the pending writes; return the id, the claim and the attempts of each document."""
        return sorted((doc['_id'], doc['claimed'], doc['attempts']) for doc in self.written())


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.mailbox.close()


def counts(subscription: Subscription) -> tuple[int, int]:
    return subscription.credit.held, subscription.credit.waiting


# -- credit


@pytest.mark.parametrize(
    'decide',
    [Unacked.ack, Unacked.release, lambda unacked, tag: unacked.dead_letter(tag, 'because')],
    ids=['ack', 'release', 'dead_letter'],
)
def test_decision_frees_credit_before_it_is_written(desk: Desk, decide: Callable[[Unacked, str], None]) -> None:
    subscription = desk.subscribe(limit=1)
    delivery = desk.claim()
    assert counts(subscription) == (1, 1)
    desk.take()
    assert counts(subscription) == (1, 0)
    assert desk.unacked.credit() == {'q': 0}
    decide(desk.unacked, delivery.tag)
    assert desk.unacked.credit() == {'q': 1}
    desk.written()
    assert counts(subscription) == (0, 0)


def ramp(desk: Desk, subscription: Subscription, to: int = UNLIMITED) -> None:
    """Receive and acknowledge all messages, again and again, until `to` messages are claimed ahead."""
    while subscription.credit.ahead < to:
        while desk.unacked.credit()[subscription.queue]:
            desk.claim(f'ramp{time.monotonic_ns()}')
        while delivery := desk.take():
            desk.unacked.ack(delivery.tag)
        desk.unacked.request_more()


def test_without_a_limit_one_message_is_claimed_until_more_are_asked_for(desk: Desk) -> None:
    subscription = desk.subscribe(limit=0)
    desk.unacked.request_more()
    assert desk.unacked.credit() == {'q': 1}
    delivery = desk.claim()
    assert desk.take() is delivery
    desk.unacked.ack(delivery.tag)
    assert desk.unacked.credit() == {'q': 0}
    desk.unacked.request_more()
    assert desk.unacked.credit() == {'q': 2}
    ramp(desk, subscription, to=8)
    desk.unacked.cancel(subscription)
    desk.subscribe(credit=subscription.credit)
    assert desk.unacked.credit() == {'q': 1}


def test_without_a_limit_more_is_claimed_ahead_only_after_the_mailbox_was_empty(desk: Desk) -> None:
    subscription = desk.subscribe(limit=0)
    ramp(desk, subscription, to=4)
    for name in 'abcd':
        desk.claim(name)
    for _ in range(3):
        assert desk.take()
        desk.unacked.request_more()
    assert subscription.credit.ahead == 4
    assert desk.unacked.credit() == {'q': 3}
    assert desk.take()
    desk.unacked.request_more()
    desk.unacked.request_more()
    assert subscription.credit.ahead == 8


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
    assert desk.reserve() is subscription
    assert counts(subscription) == (1, 1)
    desk.unacked.unreserve(subscription)
    assert counts(subscription) == (0, 0)


def test_queues_of_one_channel_share_its_credit(desk: Desk) -> None:
    credit = Credit(2)
    for queue in 'qr':
        desk.subscribe(queue, credit=credit)
    assert desk.unacked.credit() == {'q': 2, 'r': 2}
    desk.reserve('q')
    desk.reserve('r')
    assert desk.unacked.reserve('q') is desk.unacked.reserve('r') is None


def test_subscription_with_most_credit_is_served_next_and_those_of_one_channel_in_turn(desk: Desk) -> None:
    one, three = desk.subscribe(limit=1), desk.subscribe(limit=3)
    assert [desk.claim(str(n)).subscription for n in range(4)] == [three, three, one, three]
    assert desk.unacked.reserve('q') is None
    credit = Credit(4)
    first, second = desk.subscribe('r', credit=credit), desk.subscribe('r', credit=credit)
    assert [desk.claim(str(n), 'r').subscription for n in range(4)] == [first, second, first, second]


# -- what is written


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


def test_message_belongs_to_the_consumer_until_its_decision_is_stored(desk: Desk) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.take()
    desk.unacked.release(delivery.tag)
    assert desk.unacked.ids() == {'a'}
    [(doc, react)] = desk.unacked.writes.take()
    assert (doc['_rev'], doc['claimed'], doc['attempts']) == ('2-b', None, 1)
    assert desk.unacked.ids() == {'a'}
    react(WriteResult.of({'id': 'a', 'rev': '3-c'}))
    assert desk.unacked.ids() == set()
    assert desk.unacked.writes.take_released() == [{**doc, '_rev': '3-c'}]
    assert desk.unacked.writes.take_released() == []


def test_lost_claim_is_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.subscribe()
    desk.unacked.release(desk.claim().tag)
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
    desk.unacked.release(second.tag)
    give_up([*pending, *desk.unacked.writes.take()])
    assert desk.unacked.ids() == {'a', 'b'}
    with caplog.at_level(logging.WARNING):
        again = {doc['_id']: (doc, react) for doc, react in desk.unacked.writes.take()}
        again['a'][1](WriteResult.conflict('a'))  # it is stored already, but the response was lost
    assert caplog.records == []
    assert desk.unacked.ids() == {'b'}
    released, react = again['b']
    react(WriteResult.of({'id': 'b', 'rev': '3-c'}))
    assert desk.unacked.writes.take_released() == [{**released, '_rev': '3-c'}]


# -- cancel and close


def test_cancel_releases_undelivered_messages_uncounted(desk: Desk) -> None:
    subscription = desk.subscribe()
    desk.subscribe('r')
    for name in 'abc':
        desk.claim(name)
    other = desk.claim('d', 'r')
    seen = desk.take()
    desk.unacked.cancel(subscription)
    assert desk.attempts() == [('b', None, 0), ('c', None, 0)]
    assert desk.take() is other
    assert counts(subscription) == (1, 0)
    assert seen is not None
    desk.unacked.ack(seen.tag)
    assert counts(subscription) == (0, 0)


def test_message_claimed_after_the_cancel_is_released(desk: Desk) -> None:
    subscription = desk.subscribe()
    desk.reserve()
    desk.unacked.cancel(subscription)
    desk.add(subscription)
    assert len(desk.mailbox) == 0
    assert desk.attempts() == [('a', None, 0)]
    assert counts(subscription) == (0, 0)


def test_close_counts_no_attempt_if_the_callback_succeeded(desk: Desk) -> None:
    subscription = desk.subscribe()
    for name in 'abc':
        desk.claim(name)
    first, second = desk.take(), desk.take()
    assert first
    assert second
    first.received_by_kombu = True
    desk.unacked.release_at_close(first.tag)
    desk.unacked.release_all()
    assert desk.attempts() == [('a', None, 0), ('b', None, 1), ('c', None, 0)]
    assert counts(subscription) == (0, 0)
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
    desk.claim()
    desk.lease.valid = False
    assert desk.take() is None
    assert desk.attempts() == [('a', None, 0)]
    assert counts(subscription) == (0, 0)
    # A message that `basic_get` has deleted with its claim needs no lease.
    final = Delivery({**workitem.new('b', 'q', {}, NOW)}, Pull('q', no_ack=True).subscription, final=True)
    desk.unacked.hold(final)
    assert desk.unacked.ids() == set()
    assert desk.unacked.deliver(final)


def test_messages_of_a_lost_lease_are_forgotten(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    subscription = desk.subscribe()
    for name in 'abc':
        desk.claim(name)
    seen, taken = desk.take(), desk.mailbox.pop()  # kombu's thread is taking the second one
    desk.unacked.broadcast('q', MESSAGE)
    assert len(desk.unacked.drop_all()) == 3
    assert isinstance(taken, Delivery)
    assert not desk.unacked.deliver(taken)
    assert desk.unacked.ids() == set()
    assert desk.unacked.credit() == {'q': 4}
    assert seen is not None
    with caplog.at_level(logging.WARNING):
        desk.unacked.ack(seen.tag)
    assert 'lease was lost' in caplog.text
    assert desk.written() == []
    assert counts(subscription) == (0, 0)
    found = desk.take()
    assert found is not None
    assert found.final  # the broadcast


# -- broadcasts


def test_consumers_of_a_queue_share_its_broadcasts(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    first, second = desk.subscribe(), desk.subscribe()
    for _ in 'xyz':
        desk.unacked.broadcast('q', MESSAGE)
    found = [delivery for delivery in (desk.take(), desk.take(), desk.take()) if delivery]
    assert [delivery.subscription for delivery in found] == [first, second, first]
    assert (desk.unacked.credit(), counts(first)) == ({'q': 8}, (0, 0))
    desk.unacked.ack(found[0].tag)
    desk.unacked.release(found[0].tag)
    assert desk.written() == []
    assert caplog.records == []


def test_a_broadcast_waits_for_its_consumer(desk: Desk) -> None:
    for body in 'xyz':
        desk.unacked.broadcast('q', {**MESSAGE, 'body': body})
    desk.unacked.broadcast('r', MESSAGE)
    desk.subscribe()
    found = [delivery.payload()['body'] for delivery in iter(desk.take, None) if delivery]
    assert found == ['x', 'y', 'z']
    desk.subscribe()
    assert desk.take() is None


# -- waking the I/O thread


@pytest.mark.parametrize(
    'change',
    [
        lambda desk, delivery: desk.subscribe(),
        lambda desk, delivery: desk.unacked.cancel(delivery.subscription),
        lambda desk, delivery: desk.unacked.set_credit(delivery.credit, 5),
        lambda desk, delivery: desk.unacked.ack(delivery.tag),
        lambda desk, delivery: desk.unacked.dead_letter(delivery.tag, 'because'),
        lambda desk, delivery: desk.unacked.drop_all(),
    ],
    ids=['subscribe', 'cancel', 'set_credit', 'ack', 'dead_letter', 'drop_all'],
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


@pytest.mark.parametrize(('name', 'delay'), [('item', 0.02), (f'{JOB}k', 0.0)])
def test_only_the_ack_of_a_unique_job_does_not_wait_for_others(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str, delay: float
) -> None:
    """The next message of the job waits for it."""
    delays: list[float] = []
    desk.subscribe()
    delivery = desk.claim(name)
    desk.take()
    monkeypatch.setattr(desk.unacked.wakeup, 'set', lambda within=0.0: delays.append(within))
    desk.unacked.more_to_claim = False
    desk.unacked.ack(delivery.tag)
    assert delays == [delay]


# -- paused queues


def test_paused_queue_has_no_credit_and_its_undelivered_messages_are_released(desk: Desk) -> None:
    credit = Credit(limit=4)
    desk.subscribe('q', credit=credit)
    desk.subscribe('other', credit=credit)
    delivered, waiting, other = desk.claim('a'), desk.claim('b'), desk.claim('c', 'other')
    without_body = desk.claim('d', **ATTACHED)
    assert desk.take() is delivered
    desk.unacked.pause(frozenset({'q', 'more'}))
    assert desk.attempts() == [('b', None, 0), ('d', None, 0)]
    assert desk.unacked.credit() == {'q': 0, 'other': 2}
    desk.unacked.set_body(without_body, b'too late')
    assert desk.take() is other
    desk.unacked.ack(waiting.tag)  # too late: kombu has never received it
    desk.unacked.ack(delivered.tag)
    assert [doc['_id'] for doc in desk.written()] == ['a']
    desk.unacked.pause(frozenset())
    assert desk.unacked.credit() == {'q': 3, 'other': 3}


# -- the shelf


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def fast(clock: SimpleNamespace, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk whose channels may claim two messages ahead."""
    monkeypatch.setattr(Throughput, 'ahead', lambda rate, limit, now: 2)
    return desk


def shelved(subscription: Subscription) -> list[str]:
    return [delivery.doc['_id'] for delivery in subscription.credit.shelf.values()]


def test_messages_are_delivered_in_the_order_of_their_claims_when_credit_frees(fast: Desk) -> None:
    subscription = fast.subscribe(limit=2)
    first, second, third, _ = fast.claim_all()
    assert (len(fast.mailbox), shelved(subscription)) == (2, ['q2', 'q3'])
    assert fast.take() is first
    fast.unacked.ack(first.tag)
    assert (len(fast.mailbox), shelved(subscription)) == (2, ['q3'])
    assert fast.unacked.credit(ahead=True) == {'q': 1}
    assert fast.unacked.credit() == {'q': 0}
    second.doc['expires'] = 0.0  # it is dropped in the mailbox, and makes room for the next one
    assert fast.take() is third
    assert shelved(subscription) == []


def test_overdue_messages_of_the_slow_channel_are_given_back_without_an_attempt(
    fast: Desk, clock: SimpleNamespace
) -> None:
    slow = fast.subscribe('q', limit=1)
    fast.claim_all('q')
    assert fast.unacked.overdue_at == pytest.approx(1000.2)
    clock.now += 0.16
    quick = fast.subscribe('r', limit=1)
    fast.claim_all('r')
    fast.unacked.give_back(())
    assert len(shelved(slow)) == 2
    clock.now += 0.05
    fast.unacked.give_back(())
    assert (shelved(slow), shelved(quick)) == ([], ['r1', 'r2'])
    assert fast.attempts() == [('q1', None, 0), ('q2', None, 0)]
    assert [doc['_id'] for doc in fast.unacked.writes.take_released()] == ['q1', 'q2']
    assert counts(slow) == (1, 1)
    fast.unacked.give_back({'r'})
    assert fast.unacked.overdue_at == inf


def test_messages_of_a_queue_are_given_back_for_other_consumers(fast: Desk) -> None:
    credit = Credit(1)
    subscription = fast.subscribe('q', credit=credit)
    fast.subscribe('r', credit=credit)
    fast.claim_all('q')
    assert fast.unacked.shelved == {'q'}
    fast.unacked.give_back({'r'})
    assert len(shelved(subscription)) == 2
    fast.unacked.give_back({'q'})
    assert fast.unacked.shelved == set()


def test_cancelled_subscription_gives_back_and_the_others_of_the_channel_go_on(fast: Desk) -> None:
    credit = Credit(1)
    first, second = fast.subscribe(credit=credit), fast.subscribe(credit=credit)
    claimed = fast.claim_all()
    assert [delivery.subscription for delivery in claimed] == [first, second, first]
    fast.unacked.cancel(first)
    assert sorted(doc['_id'] for doc in fast.written()) == ['q0', 'q2']
    assert fast.take() is claimed[1]
    assert counts(second) == (1, 0)


@pytest.mark.parametrize('limit', [4, 0])
def test_higher_prefetch_count_delivers(fast: Desk, limit: int) -> None:
    subscription = fast.subscribe(limit=2)
    fast.claim_all()
    fast.unacked.set_credit(subscription.credit, limit)
    assert len(fast.mailbox) == 4
    assert fast.written() == []


def test_lost_lease_empties_the_shelf(fast: Desk) -> None:
    subscription = fast.subscribe(limit=2)
    fast.claim_all()
    assert len(fast.unacked.drop_all()) == 4
    assert fast.take() is None
    assert fast.written() == []
    assert (counts(subscription), subscription.credit.handed, shelved(subscription)) == ((0, 0), 0, [])


def test_message_whose_body_is_read_later_keeps_to_the_prefetch_count(fast: Desk) -> None:
    subscription = fast.subscribe(limit=1)
    claimed = [fast.claim(name, ahead=True, **ATTACHED) for name in 'ab']
    assert len(fast.mailbox) == 0
    for delivery in claimed:
        fast.unacked.set_body(delivery, b'x')
    assert len(fast.mailbox) == 1
    assert shelved(subscription) == ['b']


def test_channel_with_credit_is_served_before_another_one_claims_ahead(fast: Desk) -> None:
    one, two = fast.subscribe(limit=1), fast.subscribe(limit=1)
    claimed = [fast.claim(str(n)) for n in range(2)]
    assert {delivery.subscription for delivery in claimed} == {one, two}
    fast.unacked.ack(claimed[0].tag)
    assert fast.unacked.reserve('q', ahead=True) is claimed[0].subscription
