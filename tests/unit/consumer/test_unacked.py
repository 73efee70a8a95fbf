"""Unacknowledged messages, the shelf, and bodies to be read (`kombu_couchdb.consumer.unacked`, `bodies`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kombu_couchdb import errors
from kombu_couchdb.consumer import bodies, early_acks, pending_writes
from kombu_couchdb.consumer.delivery import Credit, Delivery, Mailbox, Subscription
from kombu_couchdb.consumer.pending_writes import give_up
from kombu_couchdb.consumer.unacked import Unacked
from kombu_couchdb.couchdb.bulk import RequestSize
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.clock import ServerClock
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.documents import workitem
from kombu_couchdb.flow import Throughput
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

    def __init__(self, *, confirm_acks: bool = False) -> None:
        self.lease = SimpleNamespace(valid=True)
        self.mailbox = Mailbox()
        clock = cast(ServerClock, SimpleNamespace(now=lambda: NOW))
        lease = cast(Lease, self.lease)
        self.unacked = Unacked(lease, self.mailbox, clock, UNLIMITED, 0.0, 60.0, confirm_acks=confirm_acks)

    def subscribe(self, queue: str = 'q', limit: int = 4, credit: Credit | None = None) -> Subscription:
        subscription = Subscription(queue, credit or Credit(limit))
        self.unacked.subscribe(subscription)
        return subscription

    def reserve(self, queue: str = 'q', *, ahead: bool = False) -> Subscription:
        [subscription] = self.unacked.reserve(queue, 1, ahead=ahead)
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
        pending = self.unacked.writes.take_ready()
        docs = [write.doc for write in pending]
        for write in pending:
            write.settle(WriteResult.from_element({'id': write.doc['_id'], **(answer or {'rev': '3-c'})}))
        return docs

    def begun(self, *answers: WriteResult) -> list[str]:
        """Write the acks of tasks that have begun, and return the ids; without `answers` CouchDB stores them."""
        pending = self.unacked.writes.take_begun()
        for number, write in enumerate(pending):
            write.settle(
                answers[number] if answers else WriteResult.from_element({'id': write.doc['_id'], 'rev': '3-c'})
            )
        return [write.doc['_id'] for write in pending]

    def attempts(self) -> list[tuple[str, Any, int]]:
        """Store the pending writes; return the id, the claim and the attempts of each document."""
        return sorted((doc['_id'], doc['claimed'], doc['attempts']) for doc in self.written())


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.mailbox.close()


def test_queues_of_one_channel_share_its_credit(desk: Desk) -> None:
    credit = Credit(2)
    for queue in 'qr':
        desk.subscribe(queue, credit=credit)
    assert desk.unacked.credit() == {'q': 2, 'r': 2}
    desk.reserve('q')
    desk.reserve('r')
    assert desk.unacked.reserve('q', 1) == desk.unacked.reserve('r', 1) == []


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
    pending = desk.unacked.writes.take_ready()
    desk.unacked.release(second.tag)
    give_up([*pending, *desk.unacked.writes.take_ready()])
    assert desk.unacked.ids() == {'a', 'b'}
    with caplog.at_level(logging.WARNING):
        again = {write.doc['_id']: write for write in desk.unacked.writes.take_ready()}
        again['a'].settle(WriteResult.conflict('a'))  # it is stored already, but the response was lost
    assert caplog.records == []
    assert desk.unacked.ids() == {'b'}
    again['b'].settle(WriteResult.from_element({'id': 'b', 'rev': '3-c'}))
    assert desk.unacked.writes.take_released() == [{**again['b'].doc, '_rev': '3-c'}]


def test_nothing_is_delivered_without_a_valid_lease(desk: Desk) -> None:
    desk.subscribe()
    desk.claim()
    desk.lease.valid = False
    assert desk.take() is None
    assert desk.attempts() == [('a', None, 0)]


# -- cancel and close


def test_message_claimed_after_the_cancel_is_released(desk: Desk) -> None:
    subscription = desk.subscribe()
    desk.reserve()
    desk.unacked.cancel(subscription)
    desk.add(subscription)
    assert len(desk.mailbox) == 0
    assert desk.attempts() == [('a', None, 0)]


def test_close_counts_no_attempt_if_the_callback_succeeded(desk: Desk) -> None:
    desk.subscribe()
    for name in 'abc':
        desk.claim(name)
    first, second = desk.take(), desk.take()
    assert first
    assert second
    first.received_by_kombu = True
    desk.unacked.release_at_close(first.tag)
    desk.unacked.release_all()
    assert desk.attempts() == [('a', None, 0), ('b', None, 1), ('c', None, 0)]
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


def test_credit_wakes_the_thread_at_once_only_if_there_is_more_to_claim(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that waits for the next message causes no cycle of its own: its ack shares the next one."""
    desk.subscribe(limit=0)
    desk.unacked.flow.cost = 0.2
    woken: list[float] = []
    monkeypatch.setattr(desk.unacked.wakeup, 'set', lambda within=0.0: woken.append(within))
    for more_to_claim in (True, False):
        desk.claim(str(more_to_claim))
        desk.take()
        desk.unacked.more_to_claim = more_to_claim
        desk.unacked.request_more()
    assert woken == [0.0, 0.2]


# -- the shelf


@pytest.fixture
def fast(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk whose channels may claim two messages ahead."""
    monkeypatch.setattr(Throughput, 'ahead', lambda rate, limit, stock, now: 2)
    return desk


def shelved(subscription: Subscription) -> list[str]:
    return [delivery.doc['_id'] for delivery in subscription.credit.shelf]


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


def test_messages_of_a_queue_are_given_back_for_other_consumers(fast: Desk) -> None:
    credit = Credit(1)
    subscription = fast.subscribe('q', credit=credit)
    fast.subscribe('r', credit=credit)
    fast.claim_all('q')
    assert fast.unacked.snapshot().shelved == {'q'}
    fast.unacked.give_back({'r'})
    assert len(shelved(subscription)) == 2
    fast.unacked.give_back({'q'})
    assert fast.unacked.snapshot().shelved == set()


def test_queues_take_turns_on_the_shelf(fast: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Throughput, 'ahead', lambda rate, limit, stock, now: 3)
    credit = Credit(1)
    for queue in 'qr':
        fast.subscribe(queue, credit=credit)
    long = [fast.claim(name, ahead=True) for name in 'abc']
    other = fast.claim('d', queue='r', ahead=True)
    taken = []
    while delivery := fast.take():
        taken.append(delivery)
        fast.unacked.ack(delivery.tag)
    assert taken == [long[0], long[1], other, long[2]]


def test_message_whose_body_is_read_later_keeps_to_the_prefetch_count(fast: Desk) -> None:
    subscription = fast.subscribe(limit=1)
    claimed = [fast.claim(name, ahead=True, **ATTACHED) for name in 'ab']
    assert len(fast.mailbox) == 0
    for delivery in claimed:
        fast.unacked.set_body(delivery, b'x')
    assert len(fast.mailbox) == 1
    assert shelved(subscription) == ['b']


# -- bodies that are attachments


class Reads:
    """A client of which each read of an attachment fails with the next of `failures`."""

    address = SimpleNamespace(url='http://host/db')

    def __init__(self, failures: list[errors.CouchDBError]) -> None:
        self.failures, self.request_size = failures, RequestSize()

    def content(self, path: str, params: dict[str, str], size: int) -> bytes:
        if self.failures:
            raise self.failures.pop(0)
        return b'x' * size


def read_all(desk: Desk, failures: list[errors.CouchDBError]) -> None:
    """Claim a message, and read until its body, or the reason why there is none, is known."""
    desk.subscribe()
    desk.claim(**ATTACHED)
    client = cast(Client, Reads(failures))
    while desk.unacked.awaiting_bodies():
        try:
            bodies.deliver_some(client, desk.unacked)
        except errors.CouchDBError:
            pass


def test_body_that_fails_too_often_makes_a_dead_letter(desk: Desk) -> None:
    read_all(desk, [errors.BrokenAnswer('cut') for _ in range(bodies._MAX_FAILURES + 1)])
    assert desk.take() is None
    [letter] = desk.written()
    assert letter['reason'] == 'malformed: the attachment with the body cannot be read (cut)'


@pytest.mark.parametrize('last', [errors.BrokenAnswer('cut'), errors.RequestRefused('odd')])
def test_outages_do_not_make_a_body_unreadable(desk: Desk, last: errors.CouchDBError) -> None:
    outage: list[errors.CouchDBError] = [errors.ServerUnavailable('no response')] * (5 * bodies._MAX_FAILURES)
    read_all(desk, [*outage, last])
    delivery = desk.take()
    assert delivery is not None
    assert delivery.body == b'x' * 20_000


# -- tasks that are acknowledged when they begin


class Never:
    """Results that are never stored."""

    def mark(self) -> int:
        return 1

    def is_stored(self, mark: int) -> bool:
        return False

    def wait(self) -> bool:
        return False


@pytest.fixture
def confirming() -> Iterator[Desk]:
    desk = Desk(confirm_acks=True)
    yield desk
    desk.mailbox.close()


def unexpected(may_begin: bool) -> None:
    pytest.fail(f'decided later: {may_begin}')


def test_ack_of_a_task_that_begins_waits_for_no_result(desk: Desk) -> None:
    never = Never()
    pending_writes.register(never)
    try:
        desk.subscribe()
        late, early = desk.claim('late'), desk.claim('early')
        assert desk.unacked.begin(early.tag, unexpected)
        for delivery in (late, early):
            desk.unacked.ack(delivery.tag)
        assert desk.written() == []
        assert desk.begun() == ['early']
        assert desk.unacked.ids() == {'late'}
    finally:
        pending_writes.unregister(never)


def test_message_counts_until_the_ack_of_its_task_is_stored(desk: Desk) -> None:
    desk.subscribe(limit=1)
    delivery = desk.claim()
    assert desk.unacked.begin(delivery.tag, unexpected)
    desk.unacked.ack(delivery.tag)
    assert desk.unacked.credit() == {'q': 0}
    assert desk.begun(WriteResult.unknown('a')) == ['a']
    assert desk.unacked.credit() == {'q': 0}
    desk.begun()
    assert desk.unacked.credit() == {'q': 1}


def test_ack_of_a_task_that_begins_interrupts_the_wait_for_the_next_cycle(desk: Desk) -> None:
    desk.subscribe()
    delivery = desk.claim()
    assert desk.unacked.begin(delivery.tag, unexpected)
    desk.unacked.wakeup.wait(0.0)
    desk.unacked.ack(delivery.tag)
    assert not desk.unacked.wakeup.wait(100.0)
    assert desk.begun() == ['a']


def test_no_task_begins_in_an_outage(desk: Desk) -> None:
    desk.subscribe()
    deliveries, begun = [desk.claim(name) for name in 'abc'], dict[str, bool]()
    desk.unacked.begin_waiting(in_outage=True)
    for delivery in deliveries:
        assert desk.unacked.begin(delivery.tag, partial(begun.__setitem__, delivery.doc['_id'])) is None
    assert desk.unacked.withdraw(deliveries[2].tag)
    desk.unacked.release(deliveries[1].tag)
    assert begun == {}
    desk.unacked.begin_waiting(in_outage=False)
    assert begun == {'a': True, 'b': False}


def test_no_task_begins_while_an_ack_is_not_stored_for_long(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_acks, '_SILENCE_SECONDS', 0.0)
    desk.subscribe()
    first, second, begun = desk.claim('a'), desk.claim('b'), list[bool]()
    assert desk.unacked.begin(first.tag, unexpected)
    desk.unacked.ack(first.tag)
    assert desk.unacked.begin(second.tag, begun.append) is None
    assert begun == []
    desk.begun()
    assert begun == [True]


@pytest.mark.parametrize('confirm', [False, True])
def test_as_many_tasks_as_the_prefetch_count_have_begun_before_their_acks_are_stored(confirm: bool) -> None:
    """Beside as many that have not begun; with `confirm_acks` none has."""
    desk, begun = Desk(confirm_acks=confirm), list[str]()
    subscription = desk.subscribe(limit=2)
    for name in 'abcdefgh':
        subscription.credit.count(1)  # as claims ahead do
        desk.add(subscription, name)

    def begin_all() -> list[str]:
        while (delivery := desk.take()) is not None:
            desk.unacked.begin(delivery.tag, lambda may_begin: None)
            if not confirm:
                desk.unacked.ack(delivery.tag)
            begun.append(delivery.doc['_id'])
        return begun

    assert begin_all() == (['a', 'b'] if confirm else ['a', 'b', 'c', 'd'])
    desk.begun()
    assert begin_all() == (['a', 'b', 'c', 'd'] if confirm else [*'abcdefgh'])
    desk.mailbox.close()


@pytest.mark.parametrize('loss', ['lease', 'message'])
def test_task_whose_message_may_run_elsewhere_does_not_begin(desk: Desk, loss: str) -> None:
    desk.subscribe()
    delivery = desk.claim()
    if loss == 'lease':
        desk.lease.valid = False
    else:
        desk.unacked.drop_all()
    assert desk.unacked.begin(delivery.tag, unexpected) is False
    assert desk.unacked.held_ids() == set()


def test_task_begins_after_its_ack_is_stored(confirming: Desk, caplog: pytest.LogCaptureFixture) -> None:
    confirming.subscribe()
    delivery, begun = confirming.claim(), list[bool]()
    assert confirming.unacked.begin(delivery.tag, begun.append) is None
    assert not confirming.unacked.withdraw(delivery.tag)
    assert begun == []
    assert confirming.begun() == ['a']
    assert begun == [True]
    confirming.unacked.ack(delivery.tag)  # Celery acknowledges the task when it begins
    assert confirming.begun() == []
    assert confirming.written() == []
    assert caplog.records == []


@pytest.mark.parametrize(
    ('leaf', 'may_begin'),
    [
        ({'_rev': '3-c', '_deleted': True}, True),
        ({'_rev': '3-c', 'type': 'DoneItem'}, True),
        ({'_rev': '3-c', 'type': 'WorkItem'}, False),
        ({'_rev': '5-e', '_deleted': True}, False),
        (None, False),
    ],
    ids=['acked', 'kept', 'released', 'acked by another', 'missing'],
)
@pytest.mark.parametrize('response', ['lost', 'conflict'])
def test_task_begins_only_if_its_own_ack_is_stored(
    confirming: Desk, leaf: dict[str, Any] | None, may_begin: bool, response: str
) -> None:
    confirming.subscribe()
    begun = list[bool]()
    confirming.unacked.begin(confirming.claim().tag, begun.append)
    if response == 'lost':
        confirming.begun(WriteResult.unknown('a'))
    confirming.begun(WriteResult.conflict('a'))
    writes = confirming.unacked.writes
    writes.retry_changed(lambda ids: [None if leaf is None or leaf.get('_deleted') else leaf])
    writes.settle_doubtful(lambda doc_id: [leaf] if leaf else [])
    assert begun == [may_begin]
    assert confirming.unacked.ids() == set()
    assert confirming.unacked.credit() == {'q': 4}


def test_task_does_not_begin_if_the_thread_ends_before_its_ack_is_stored(confirming: Desk) -> None:
    confirming.subscribe()
    begun = list[bool]()
    confirming.unacked.begin(confirming.claim().tag, begun.append)
    confirming.unacked.end_waiting()
    assert begun == [False]


# -- tasks that have failed


ERROR: Any = {'type': 'ValueError', 'text': 'no', 'traceback': 'lines', 'worker': None, 'retries': 0}

REFUSED = {'error': 'document_too_large', 'reason': 'too large'}


def test_failure_that_is_too_large_is_stored_without_its_texts(desk: Desk) -> None:
    desk.subscribe()
    desk.unacked.fail(desk.claim().tag, ERROR)
    [doc] = desk.written(**REFUSED)
    assert doc['error'] == ERROR
    [doc] = desk.written()
    assert (doc['error'], doc['reason']) == ({**ERROR, 'text': '', 'traceback': ''}, 'failed: ValueError: no')
    assert desk.written() == []
    assert desk.unacked.ids() == set()


def test_failure_of_an_acknowledged_task_that_is_too_large_is_stored_without_its_texts(desk: Desk) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.unacked.ack(delivery.tag)
    assert desk.unacked.keep_failure(delivery, ERROR)
    assert [doc.get('error') for doc in desk.written(**REFUSED)] == [None, ERROR]
    [doc] = desk.written()
    assert doc['error'] == {**ERROR, 'text': '', 'traceback': ''}
    assert desk.unacked.ids() == set()


def test_failure_without_a_response_is_written_again(desk: Desk) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.unacked.ack(delivery.tag)
    desk.written()
    desk.unacked.keep_failure(delivery, ERROR)
    pending = desk.unacked.writes.take_ready()
    give_up(pending)
    assert desk.unacked.busy
    assert desk.written(error='conflict') == [write.doc for write in pending]
    assert desk.unacked.ids() == set(), 'it was stored, and only the response was lost'


@pytest.mark.parametrize('stored', [True, False])
def test_failure_waits_for_the_ack_of_its_task_and_goes_with_it(desk: Desk, stored: bool) -> None:
    """A message whose ack is refused runs elsewhere: it is not lost, and no failure."""
    desk.subscribe()
    delivery = desk.claim()
    assert desk.unacked.begin(delivery.tag, unexpected)
    desk.unacked.ack(delivery.tag)
    desk.unacked.keep_failure(delivery, ERROR)
    assert desk.written() == []
    refused = WriteResult.from_element({'id': 'a', 'error': 'forbidden', 'reason': 'no'})
    desk.begun(*([] if stored else [refused]))
    assert [doc['error'] for doc in desk.written()] == [ERROR] * stored
    desk.unacked.keep_failure(delivery, ERROR)
    assert len(desk.written()) == stored, 'the same id: CouchDB stores it once'


def test_retired_consumer_keeps_no_failure(desk: Desk) -> None:
    desk.subscribe()
    delivery = desk.claim()
    desk.unacked.ack(delivery.tag)
    desk.written()
    desk.unacked.cancel(delivery.subscription)
    assert desk.unacked.retire()
    assert not desk.unacked.keep_failure(delivery, ERROR), 'the connection gives it to another consumer'
