"""Messages claimed ahead, and the shelf on which they wait (`kombu_couchdb.consumer.unacked`)."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from kombu_couchdb.consumer import unacked as module
from kombu_couchdb.consumer.credit import Credit, Subscription, Throughput
from kombu_couchdb.consumer.delivery import Delivery

from .test_unacked import Desk, counts


class Clock:
    """A monotonic clock that a test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, 'time', clock)
    return clock


@pytest.fixture
def desk(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A desk whose channels may claim two messages ahead."""
    monkeypatch.setattr(Throughput, 'ahead', lambda rate, limit, now: 2)
    desk = Desk()
    yield desk
    desk.mailbox.close()


def claim_all(desk: Desk, queue: str = 'q') -> list[Delivery]:
    """Claim as many messages as possible, also ahead, for the only channel of the queue."""
    found: list[Delivery] = []
    while desk.unacked.credit(ahead=True)[queue]:
        found.append(desk.claim(f'{queue}{len(found)}', queue, ahead=True))
    return found


def shelved(desk: Desk, subscription: Subscription) -> list[str]:
    return [delivery.doc['_id'] for delivery in desk.unacked._shelves.get(subscription.credit, {}).values()]


def test_message_moves_into_the_mailbox_when_credit_frees(desk: Desk) -> None:
    subscription = desk.subscribe(limit=2)
    first, *_ = claim_all(desk)
    desk.take()
    desk.unacked.ack(first.tag)
    assert len(desk.mailbox) == 2
    assert shelved(desk, subscription) == ['q3']
    assert desk.unacked.credit(ahead=True) == {'q': 1}
    assert desk.unacked.credit() == {'q': 0}


def test_messages_are_delivered_in_the_order_of_their_claims(desk: Desk) -> None:
    subscription = desk.subscribe(limit=1)
    claim_all(desk)
    order = []
    while delivery := desk.take():
        order.append(delivery.doc['_id'])
        desk.unacked.ack(delivery.tag)
    assert order == ['q0', 'q1', 'q2']
    assert counts(subscription) == (0, 0)
    assert subscription.credit.handed == 0


def test_expired_message_makes_room_for_the_next(desk: Desk) -> None:
    subscription = desk.subscribe(limit=1)
    first, second, _ = claim_all(desk)
    first.doc['expires'] = 0.0
    assert desk.take() is second
    assert shelved(desk, subscription) == ['q2']


def test_overdue_messages_are_given_back_without_an_attempt(desk: Desk, clock: Clock) -> None:
    subscription = desk.subscribe(limit=2)
    claim_all(desk)
    assert desk.unacked.overdue_at == pytest.approx(1000.2)
    clock.now += 0.19
    desk.unacked.give_back(())
    assert len(shelved(desk, subscription)) == 2
    clock.now += 0.02
    desk.unacked.give_back(())
    assert [(doc['_id'], doc['claimed'], doc['attempts']) for doc in desk.written()] == [
        ('q2', None, 0),
        ('q3', None, 0),
    ]
    assert len(desk.mailbox) == 2
    assert counts(subscription) == (2, 2)
    assert desk.unacked.overdue_at == inf
    assert [doc['_id'] for doc in desk.unacked.writes.take_released()] == ['q2', 'q3']


def test_only_the_slow_channel_gives_back(desk: Desk, clock: Clock) -> None:
    slow = desk.subscribe('q', limit=1)
    claim_all(desk, 'q')
    clock.now += 0.16
    fast = desk.subscribe('r', limit=1)
    claim_all(desk, 'r')
    clock.now += 0.05
    desk.unacked.give_back(())
    assert (shelved(desk, slow), shelved(desk, fast)) == ([], ['r1', 'r2'])


def test_messages_of_a_queue_are_given_back_for_other_consumers(desk: Desk) -> None:
    credit = Credit(1)
    subscription = desk.subscribe('q', credit=credit)
    desk.subscribe('r', credit=credit)
    claim_all(desk, 'q')
    assert desk.unacked.shelved == {'q'}
    desk.unacked.give_back({'r'})
    assert len(shelved(desk, subscription)) == 2
    desk.unacked.give_back({'q'})
    assert shelved(desk, subscription) == []
    assert desk.unacked.shelved == set()


def test_cancelled_subscription_gives_back_and_the_others_of_the_channel_go_on(desk: Desk) -> None:
    credit = Credit(1)
    first, second = desk.subscribe(credit=credit), desk.subscribe(credit=credit)
    claimed = claim_all(desk)
    assert [delivery.subscription for delivery in claimed] == [first, second, first]
    desk.unacked.cancel(first)
    assert sorted(doc['_id'] for doc in desk.written()) == ['q0', 'q2']
    assert desk.take() is claimed[1]
    assert counts(second) == (1, 0)


@pytest.mark.parametrize('limit', [4, 0])
def test_higher_prefetch_count_delivers(desk: Desk, limit: int) -> None:
    subscription = desk.subscribe(limit=2)
    claim_all(desk)
    desk.unacked.set_credit(subscription.credit, limit)
    assert len(desk.mailbox) == 4
    assert desk.written() == []
    assert subscription.credit.handed == 4


def test_lost_lease_empties_the_shelf(desk: Desk) -> None:
    subscription = desk.subscribe(limit=2)
    claim_all(desk)
    taken = desk.mailbox.pop()  # kombu's thread is taking it
    assert len(desk.unacked.drop_all()) == 4
    assert taken is not None
    assert not desk.unacked.deliver(taken)
    assert desk.take() is None
    assert desk.written() == []
    assert counts(subscription) == (0, 0)
    assert (subscription.credit.handed, shelved(desk, subscription)) == (0, [])


def test_message_whose_body_is_read_later_keeps_to_the_prefetch_count(desk: Desk) -> None:
    subscription = desk.subscribe(limit=1)
    claimed = []
    for name in 'ab':
        reserved = desk.unacked.reserve('q', ahead=True)
        assert reserved is not None
        doc = {'_id': name, '_rev': '2-b', 'queue': 'q', 'attempts': 1, 'message': {}}
        claimed.append(Delivery(doc, reserved.credit, reserved, needs_body=True))
        desk.unacked.add_claimed(claimed[-1])
    assert len(desk.mailbox) == 0
    for delivery in claimed:
        desk.unacked.set_body(delivery, b'x')
    assert len(desk.mailbox) == 1
    assert shelved(desk, subscription) == ['b']


def test_channel_with_credit_is_served_before_another_one_claims_ahead(desk: Desk) -> None:
    one, two = desk.subscribe(limit=1), desk.subscribe(limit=1)
    claimed = [desk.claim(str(n)) for n in range(2)]
    assert {delivery.subscription for delivery in claimed} == {one, two}
    desk.unacked.ack(claimed[0].tag)
    assert desk.unacked.reserve('q', ahead=True) is claimed[0].subscription
