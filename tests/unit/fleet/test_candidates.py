"""The candidates of one queue (`candidates`, `claims`), with a server in memory and a clock that is set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb import design
from kombu_couchdb.consumer.claims import CandidateReader
from kombu_couchdb.couchdb.bulk import Unusable
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.fleet import candidates
from kombu_couchdb.fleet.candidates import QueueCandidates
from kombu_couchdb.fleet.claim_order import ClaimOrder
from kombu_couchdb.queues.waiting import HORIZON_SECONDS

Document = dict[str, Any]

#: The server's time when a test begins.
NOW = 1_763_709_000.0


class FakeStore:
    """Documents, and the view `waiting`. It records the requests; time passes only by setting `passed`."""

    def __init__(self) -> None:
        self.docs: dict[str, Any] = {}
        self.passed = 0.0
        self.asked: list[tuple[str, Any]] = []
        clock = SimpleNamespace(now=lambda: NOW + self.passed)
        self.client = SimpleNamespace(clock=clock, fetch=self.fetch, query=self.query, unusable=Unusable())
        self.begun = time.monotonic()

    def monotonic(self) -> float:
        return self.begun + self.passed

    def add(self, name: str, priority: Any = 0, date: Any = None, published: float = NOW, **more: Any) -> Any:
        doc = {
            **workitem.new(name, 'q', {'headers': {}, 'properties': {}, 'body': ''}, published),
            '_rev': '1-a',
            'priority': priority,
            'date': date,
            **more,
        }
        self.docs[name] = doc
        return doc

    def fetch(self, ids: Sequence[str]) -> list[Document | None]:
        if ids:
            self.asked.append(('fetch', list(ids)))
        return [self.docs.get(name) for name in ids]

    def query(self, design: str, method: str, view: str, params: Any, body: Any, *, shape: Any) -> Document:
        queries = body.get('queries', [body])
        self.asked.append(
            ('ready', (queries[0]['limit'], params.get('update', 'true'), queries[0].get('startkey_docid')))
        )
        results = [{'rows': self.rows(query)} for query in queries]
        answer = {'results': results} if 'queries' in body else results[0]
        assert shape(answer)
        return answer

    def rows(self, query: Document) -> list[Document]:
        rows = []
        for doc in filter(workitem.is_waiting, self.docs.values()):
            rank = 9 - int(doc['priority']) if isinstance(doc.get('priority'), (int, float)) else 9
            planned = isinstance(doc.get('date'), (int, float))
            date = doc['date'] if planned else doc['published'] if doc.get('date') is None else 0
            rows.append(
                {
                    'id': doc['_id'],
                    'key': [doc['queue'], design.PLANNED if planned else rank, date],
                    'value': [rank, doc['_rev']],
                }
            )
        rows.sort(key=lambda row: (row['key'], row['id']))
        start = ([*query['startkey'], -1, -1][:3], query.get('startkey_docid', ''))
        end = [NOW * 10 if part == {} else part for part in query['endkey']]
        found = [row for row in rows if (row['key'], row['id']) >= start and row['key'][: len(end)] <= end]
        return found[query.get('skip', 0) :][: query['limit']]

    def reads(self, kind: str) -> list[Any]:
        return [what for asked, what in self.asked if asked == kind]


class Consumer:
    """The candidates of a queue, and their reader."""

    def __init__(self, store: FakeStore, read_ahead: int) -> None:
        self.queue_candidates = QueueCandidates(store.client.clock, 'q', read_ahead)
        self.reader = CandidateReader(store.client)  # type: ignore[arg-type]

    def refill(self) -> None:
        self.reader.refill([self.queue_candidates])

    def take(self, count: int) -> list[Document]:
        taken: dict[str, list[Document]] = {'q': []}
        self.reader._choose({'q': self.queue_candidates}, {'q': count}, taken)
        if self.queue_candidates._verifying:
            self.refill()
            self.reader._choose({'q': self.queue_candidates}, {'q': count}, taken)
        return taken['q']

    def set_consumers(self, place: tuple[int, int]) -> None:
        position, count = place
        consumers = [f'm{number}' for number in range(count)]
        self.queue_candidates.set_consumers(f'm{position}', consumers, consumers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue_candidates, name)

    def __len__(self) -> int:
        return len(self.queue_candidates)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    monkeypatch.setattr(candidates, 'time', SimpleNamespace(monotonic=store.monotonic))
    return store


def candidates_of(store: FakeStore, read_ahead: int = 1024) -> Consumer:
    return Consumer(store, read_ahead)


def names(docs: Sequence[Document]) -> list[str]:
    return [doc['_id'] for doc in docs]


def names_for(turn: int, consumers: int = 2) -> Iterator[str]:
    """Yield ids of messages that the first of the consumers claims after `turn` others."""
    order = ClaimOrder()
    order.set_consumers('m0', *[[f'm{number}' for number in range(consumers)]] * 2)
    return (name for name in (f'item{n:04}' for n in count()) if order.of(name)[0] == turn)


def placed(store: FakeStore, consumers: int = 2) -> Consumer:
    """Return the candidates of the first of several consumers, all of which listen."""
    queue_candidates = candidates_of(store)
    queue_candidates.set_consumers((0, consumers))
    return queue_candidates


def fill(store: FakeStore, number: int, priority: int = 0, prefix: str = 'item') -> list[str]:
    names = [f'{prefix}{n:05}' for n in range(number)]
    for n, name in enumerate(names):
        store.add(name, priority, published=NOW - 1000 + n / 1000)
    return names


def claimed(store: FakeStore, docs: Sequence[Any]) -> None:
    for doc in docs:
        store.docs[doc['_id']] = workitem.claim(doc, 'me', NOW)


# -- alone


def test_priority_then_due_date_then_id(store: FakeStore) -> None:
    for name, priority, published in [
        ('c', 0, NOW - 5),
        ('d', 0, NOW - 4),
        ('b', 0, NOW - 5),
        ('z', 9, NOW),
        ('y', 5, NOW - 9),
    ]:
        store.add(name, priority, published=published)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert len(queue_candidates) == 5
    assert names(queue_candidates.take(10)) == ['z', 'y', 'b', 'c', 'd']
    assert len(queue_candidates) == 0


def test_scheduled_message_is_ordered_by_its_due_date(store: FakeStore) -> None:
    store.add('planned', date=NOW - 3, published=NOW - 50)
    store.add('older', published=NOW - 4)
    store.add('newer', published=NOW - 2)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert names(queue_candidates.take(10)) == ['older', 'planned', 'newer']


def test_messages_from_the_feed_are_in_order(store: FakeStore) -> None:
    store.add('old', published=NOW - 5)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    queue_candidates.offer(store.add('new', published=NOW))
    queue_candidates.offer(store.add('high', 9))
    queue_candidates.offer(store.add('oldest', published=NOW - 6))
    assert names(queue_candidates.take(10)) == ['high', 'oldest', 'old', 'new']


def test_each_message_is_taken_once(store: FakeStore) -> None:
    for name in 'abcde':
        store.add(name)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert queue_candidates.take(0) == []
    assert names(queue_candidates.take(2)) == ['a', 'b']
    assert names(queue_candidates.take(2)) == ['c', 'd']
    assert names(queue_candidates.take(2)) == ['e']
    assert queue_candidates.take(2) == []


def test_documents_are_read_ahead_and_none_twice(store: FakeStore) -> None:
    for name in 'abc':
        store.add(name)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert [names(queue_candidates.take(1)) for _ in range(3)] == [['a'], ['b'], ['c']]
    assert store.reads('ready') == [(128, 'true', None)]
    assert store.reads('fetch') == [['a', 'b', 'c']]


def test_few_large_documents_are_read_ahead(store: FakeStore) -> None:
    for name in fill(store, 100):
        store.docs[name]['message']['body'] = 'x' * 300_000
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    for _ in range(100):
        queue_candidates.take(1)
    assert [len(ids) for ids in store.reads('fetch')] == [8, *[3] * 30, 2]


def test_more_and_more_small_documents_are_read_ahead(store: FakeStore) -> None:
    fill(store, 128)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    for _ in range(128):
        queue_candidates.take(1)
    assert [len(ids) for ids in store.reads('fetch')] == [8, 16, 32, 64, 8]


def test_after_a_read_that_failed_fewer_are_read(store: FakeStore) -> None:
    fill(store, 128)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    fetch, store.client.fetch = store.client.fetch, None
    for _ in range(2):
        with pytest.raises(TypeError):
            queue_candidates.take(1)
        queue_candidates.clear()
        queue_candidates.refill()
    store.client.fetch = fetch
    queue_candidates.take(1)
    assert [len(ids) for ids in store.reads('fetch')] == [2]


def test_message_offered_twice_is_one_candidate(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    doc = store.add('a')
    queue_candidates.offer(doc)
    queue_candidates.offer({**doc, '_rev': '2-b'})
    assert [found['_rev'] for found in queue_candidates.take(10)] == ['2-b']
    assert queue_candidates.take(10) == []


@pytest.mark.parametrize(
    'changes',
    [
        {'priority': 'high'},
        {'priority': None},
        {'published': 'now'},
        {'date': 'soon'},
        {'attempts': None},
        {'message': None},
    ],
    ids=repr,
)
def test_malformed_message_is_a_candidate(store: FakeStore, changes: Document) -> None:
    queue_candidates = candidates_of(store)
    queue_candidates.offer(store.add('malformed', **changes))
    assert names(queue_candidates.take(10)) == ['malformed']


def test_message_without_a_priority_is_a_candidate(store: FakeStore) -> None:
    doc = store.add('malformed')
    del doc['priority']
    queue_candidates = candidates_of(store)
    queue_candidates.offer(doc)
    assert names(queue_candidates.take(10)) == ['malformed']


# -- scheduled messages


def test_only_the_due_date_of_a_scheduled_message_is_kept(store: FakeStore) -> None:
    store.add('later', date=NOW + HORIZON_SECONDS + 20)
    store.add('sooner', date=NOW + HORIZON_SECONDS + 10)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert len(queue_candidates) == 0
    assert queue_candidates.next_due == NOW + HORIZON_SECONDS + 10


def test_only_the_due_date_of_an_offered_message_is_kept(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    for wait in (30, 10, 20):
        queue_candidates.offer(store.add(f'in {wait}', date=NOW + wait))
    assert len(queue_candidates) == 0
    assert queue_candidates.next_due == NOW + 10


def test_message_that_is_due_soon_is_kept(store: FakeStore) -> None:
    store.add('soon', date=NOW + 3)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert len(queue_candidates) == 1
    assert queue_candidates.take(10) == []
    assert queue_candidates.wake_at() == pytest.approx(store.monotonic() + 3)
    store.passed = 3.01
    assert names(queue_candidates.take(10)) == ['soon']


def test_message_with_a_new_due_date_is_a_candidate_again(store: FakeStore) -> None:
    queue_candidates = placed(store)
    name = next(names_for(0))
    store.add(name)
    queue_candidates.refill()
    store.add(name, date=NOW + store.passed + 2)
    assert queue_candidates.take(10) == []
    assert queue_candidates.wake_at() == pytest.approx(store.monotonic() + 2)
    store.passed += 2.01
    assert names(queue_candidates.take(10)) == [name]


@pytest.mark.parametrize('priority', ['high', None, 4.5], ids=repr)
def test_malformed_scheduled_message_is_a_candidate(store: FakeStore, priority: Any) -> None:
    queue_candidates = placed(store)
    name = next(names_for(0))
    store.add(name, priority=priority, date=NOW + store.passed + 2)
    queue_candidates.refill()
    assert queue_candidates.take(10) == []
    store.passed += 2.01
    assert names(queue_candidates.take(10)) == [name]


def test_scheduled_message_becomes_due(store: FakeStore) -> None:
    store.add('later', date=NOW + 60)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert queue_candidates.wake_at() == pytest.approx(store.monotonic() + 60)
    store.passed = 59.9
    assert not queue_candidates.is_due
    store.passed = 60.0
    assert queue_candidates.is_due
    queue_candidates.refill()
    assert not queue_candidates.is_due
    assert names(queue_candidates.take(10)) == ['later']


def test_empty_queue_has_no_time_to_wake(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert queue_candidates.wake_at() is None
    assert not queue_candidates.is_stale
    assert not queue_candidates.is_due


# -- several consumers, few messages: the listeners


def test_own_messages_first_and_others_after_their_delay(store: FakeStore) -> None:
    queue_candidates = placed(store, 3)
    own, second, third = (next(names_for(turn, 3)) for turn in range(3))
    for name in (third, second, own):
        store.add(name)
    queue_candidates.refill()
    assert names(queue_candidates.take(10)) == [own]
    assert queue_candidates.take(10) == []
    assert queue_candidates.wake_at() == pytest.approx(store.monotonic() + 0.1)
    store.passed += 0.11
    assert names(queue_candidates.take(10)) == [second]
    assert queue_candidates.take(10) == []
    store.passed += 0.06
    assert names(queue_candidates.take(10)) == [third]


def test_own_message_comes_before_older_ones_of_others(store: FakeStore) -> None:
    queue_candidates = placed(store)
    own, foreign = next(names_for(0)), next(names_for(1))
    store.add(foreign, published=NOW - 100)
    store.add(own)
    queue_candidates.refill()
    store.passed += 1.0
    assert names(queue_candidates.take(10)) == [own]
    assert names(queue_candidates.take(10)) == [foreign]


def test_priority_comes_before_the_claim_order(store: FakeStore) -> None:
    queue_candidates = placed(store)
    own, foreign = next(names_for(0)), next(names_for(1))
    store.add(own, 0)
    store.add(foreign, 9)
    queue_candidates.refill()
    store.passed += 1.0
    assert names(queue_candidates.take(10)) == [foreign, own]


def test_only_a_share_of_the_messages_of_others_is_taken(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    left = [store.add(next(foreign))['_id'] for _ in range(6)]
    queue_candidates.refill()
    store.passed += 1.0
    assert names(queue_candidates.take(6)) == left[:3]
    assert names(queue_candidates.take(1)) == left[3:4]


def test_messages_of_others_are_read_again(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    taken, left = next(foreign), next(foreign)
    for name in (taken, left):
        queue_candidates.offer(store.add(name))
    store.docs[taken] = workitem.claim(store.docs[taken], 'another', NOW)
    store.docs[left] = {**store.docs[left], '_rev': '3-c'}
    store.passed += 1.0
    docs = queue_candidates.take(10)
    assert [(doc['_id'], doc['_rev']) for doc in docs] == [(left, '3-c')]
    assert store.reads('fetch') == [[taken, left]]


def test_deleted_and_dead_messages_are_forgotten(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    gone, dead = next(foreign), next(foreign)
    for name in (gone, dead):
        queue_candidates.offer(store.add(name))
    del store.docs[gone]
    store.docs[dead] = dead_letter.made_of(store.docs[dead], 'because', NOW)
    store.passed += 1.0
    assert queue_candidates.take(10) == []
    assert len(queue_candidates) == 0


def test_old_candidate_is_read_again(store: FakeStore) -> None:
    queue_candidates = placed(store)
    name = next(names_for(0))
    doc = store.add(name)
    queue_candidates.offer(doc)
    store.docs[name] = workitem.claim(doc, 'another', NOW)
    store.passed += 0.5
    assert queue_candidates.take(10) == []


def test_new_candidate_is_not_read_again(store: FakeStore) -> None:
    queue_candidates = placed(store)
    queue_candidates.offer(store.add(next(names_for(0))))
    assert len(queue_candidates.take(10)) == 1
    assert store.reads('fetch') == []


def test_busy_listener_is_not_waited_for(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    queue_candidates.won(store.add(next(foreign))['_id'])
    second, third = store.add(next(foreign)), store.add(next(foreign))
    queue_candidates.offer(second)
    store.passed += 0.011
    assert names(queue_candidates.take(1)) == [second['_id']]
    queue_candidates.offer(third)
    queue_candidates.lost(second['_id'])  # it claims again
    store.passed += 0.011
    assert queue_candidates.take(1) == []
    store.passed += 0.1
    assert names(queue_candidates.take(1)) == [third['_id']]


def test_document_shows_who_claims(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    taken, left = store.add(next(foreign)), store.add(next(foreign))
    queue_candidates.won(taken['_id'])
    queue_candidates.offer(taken)
    store.docs[taken['_id']] = workitem.claim(taken, 'm1', NOW)
    store.passed += 0.05
    assert queue_candidates.take(1) == []
    queue_candidates.offer(left)
    store.passed += 0.05
    assert queue_candidates.take(1) == []  # m1 is not busy


def test_own_released_message_waits_for_nobody(store: FakeStore) -> None:
    queue_candidates = placed(store)
    doc = store.add(next(names_for(1)))
    queue_candidates.queue_candidates.offer(doc, own=True)
    assert names(queue_candidates.take(1)) == [doc['_id']]


def test_when_a_consumer_leaves_its_messages_are_claimed_at_once(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    left = [store.add(next(foreign))['_id'] for _ in range(4)]
    queue_candidates.refill()
    assert queue_candidates.take(10) == []
    queue_candidates.set_consumers((0, 1))
    assert names(queue_candidates.take(10)) == left


def test_when_consumers_change_documents_are_read_again(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    name = next(names_for(0))
    queue_candidates.offer(store.add(name))
    queue_candidates.set_consumers((0, 2))
    store.docs[name] = workitem.claim(store.docs[name], 'another', NOW)
    assert queue_candidates.take(10) == []
    assert store.reads('fetch') == [[name]]


# -- several consumers, more messages: all share them


def rounds(store: FakeStore, queue_candidates: Consumer, seconds: float, credit: int = 1000) -> list[str]:
    """Claim for some seconds what may be claimed, as the cycle does; return the ids."""
    taken: list[str] = []
    until = store.passed + seconds
    while store.passed < until:
        if queue_candidates.needs_page:
            queue_candidates.refill()
        docs = queue_candidates.reader.take({'q': queue_candidates.queue_candidates}, {'q': credit})['q']
        claimed(store, docs)
        taken += names(docs)
        store.passed += 0.02
    return taken


def test_own_share_is_claimed_at_once(store: FakeStore) -> None:
    queue_candidates = placed(store)
    items = fill(store, 40)
    queue_candidates.refill()
    share = names(queue_candidates.take(100))
    assert 10 < len(share) < 30
    assert set(share) < set(items)
    assert share == sorted(share)


def test_share_of_others_is_claimed_after_a_later_read_of_the_head(store: FakeStore) -> None:
    queue_candidates = placed(store)
    items = fill(store, 40)
    queue_candidates.refill()
    share = names(queue_candidates.take(100))
    claimed(store, [store.docs[name] for name in share])
    left = [name for name in items if name not in share]
    claimed(store, [store.docs[name] for name in left[:5]])  # the other consumer is alive
    assert rounds(store, queue_candidates, 0.2) == []
    reads = len(store.reads('ready'))
    assert rounds(store, queue_candidates, 0.2) == left[5:]
    assert len(store.reads('ready')) > reads


def test_nothing_is_tried_that_others_have_claimed(store: FakeStore) -> None:
    queue_candidates = placed(store)
    fill(store, 40)
    queue_candidates.refill()
    claimed(store, queue_candidates.take(100))
    claimed(store, [doc for doc in store.docs.values() if workitem.is_waiting(doc)])
    store.asked.clear()
    assert rounds(store, queue_candidates, 2.0) == []
    assert store.reads('fetch') == []
    assert not queue_candidates.is_stale


def test_more_consumers_open_shares_by_powers_of_two(store: FakeStore) -> None:
    queue_candidates = placed(store, 8)
    fill(store, 80)
    shares = [len(rounds(store, queue_candidates, 0.24)) for _ in range(4)]
    assert sum(shares) == 80
    assert all(share > 3 for share in shares)


@pytest.mark.parametrize('number', [20, 1000, 3000])
@pytest.mark.parametrize('date', [None, NOW - 10.0], ids=['now', 'scheduled'])
def test_messages_of_a_consumer_without_credit_are_claimed(store: FakeStore, number: int, date: float | None) -> None:
    queue_candidates = placed(store)
    items = fill(store, number)
    for name in items:
        store.docs[name]['date'] = date
    assert sorted(rounds(store, queue_candidates, 5.0)) == items


def test_in_a_long_queue_the_next_page_comes_before_messages_of_others(store: FakeStore) -> None:
    queue_candidates = placed(store)
    items = fill(store, 400)
    queue_candidates.refill()
    share = names(queue_candidates.take(1000))
    assert 20 < len(share) < 108
    assert set(share) < set(items[:128])
    store.passed += 0.5
    assert queue_candidates.take(1000) == []
    assert not queue_candidates.has_claimable
    assert queue_candidates.needs_page
    queue_candidates.refill()
    assert store.reads('ready')[-1] == (256, 'false', items[127])


def test_after_a_bell_nobody_is_waited_for(store: FakeStore) -> None:
    queue_candidates = placed(store, 8)
    items = fill(store, 40)
    queue_candidates.queue_candidates.hurries = True
    queue_candidates.refill()
    assert sorted(names(queue_candidates.take(100)) + names(queue_candidates.take(100))) == items


def test_after_a_bell_the_own_share_comes_first(store: FakeStore) -> None:
    fill(store, 40)
    usual, hurried = placed(store, 8), placed(store, 8)
    hurried.queue_candidates.hurries = True
    for queue_candidates in (usual, hurried):
        queue_candidates.refill()
    assert names(hurried.take(2)) == names(usual.take(2))


def test_a_bell_is_forgotten_when_the_queue_is_empty(store: FakeStore) -> None:
    queue_candidates = placed(store)
    queue_candidates.queue_candidates.hurries = True
    queue_candidates.found_empty()
    assert not queue_candidates.hurries
    assert not queue_candidates.is_stale
    assert queue_candidates.wake_at() is None


@pytest.mark.parametrize('forged', [1, 40, 600])
def test_forged_consumers_cause_only_a_short_wait(store: FakeStore, forged: int) -> None:
    """Any member of the database may write consumer documents."""
    queue_candidates = placed(store, forged + 1)
    items = fill(store, 30)
    assert sorted(rounds(store, queue_candidates, 3.0)) == items


# -- what a listener without credit must know


def test_first_messages_are_those_that_are_due_whoever_may_claim_them(store: FakeStore) -> None:
    queue_candidates = placed(store)
    own, foreign = next(names_for(0)), next(names_for(1))
    for name in (foreign, own):
        store.add(name)
    store.add('soon', date=NOW + 3)
    assert queue_candidates.due_at() == float('-inf')  # it must be read
    queue_candidates.refill()
    assert queue_candidates.first(1) == [own]
    assert sorted(queue_candidates.first(9)) == sorted([own, foreign])
    assert queue_candidates.due_at() == pytest.approx(store.monotonic() + 3)
    store.passed += 3.01
    assert 'soon' in queue_candidates.first(9)
    assert queue_candidates.due_at() == float('inf')


def test_next_scheduled_message_wakes_a_listener(store: FakeStore) -> None:
    queue_candidates = placed(store)
    store.add('later', date=NOW + 60)
    queue_candidates.refill()
    assert queue_candidates.due_at() == pytest.approx(store.monotonic() + 60)


# -- long queues


def test_long_queue_is_read_page_by_page(store: FakeStore) -> None:
    items = fill(store, 300)
    queue_candidates = candidates_of(store)
    taken = []
    while queue_candidates.is_stale:
        queue_candidates.refill()
        docs = queue_candidates.take(1000)
        claimed(store, docs)
        taken += names(docs)
    assert taken == items
    assert [after for _, _, after in store.reads('ready')][:2] == [None, items[127]]


def test_fast_consumer_reads_larger_pages_up_to_the_limit(store: FakeStore) -> None:
    fill(store, 5000)
    queue_candidates = candidates_of(store, read_ahead=600)
    for _ in range(4):
        queue_candidates.refill()
        claimed(store, queue_candidates.take(1000))
    assert [limit for limit, _, _ in store.reads('ready')] == [128, 512, 600, 600]


def test_several_consumers_read_larger_pages(store: FakeStore) -> None:
    queue_candidates = placed(store, 3)
    fill(store, 200)
    queue_candidates.refill()
    claimed(store, queue_candidates.take(1000))
    queue_candidates.refill()
    assert [limit for limit, _, _ in store.reads('ready')] == [128, 384]


def test_long_queue_is_stale_until_its_end_was_read(store: FakeStore) -> None:
    fill(store, 128)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert queue_candidates.is_stale  # there may be more
    claimed(store, queue_candidates.take(1000))
    queue_candidates.refill()  # reads on, finds nothing
    assert queue_candidates.is_stale  # the head may have changed meanwhile
    queue_candidates.refill()
    assert not queue_candidates.is_stale
    assert [after is None for _, _, after in store.reads('ready')] == [True, False, True]


def test_head_is_read_again_for_higher_priorities(store: FakeStore) -> None:
    fill(store, 1000)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    claimed(store, queue_candidates.take(100))
    store.add('urgent', 9)
    assert not queue_candidates.is_outdated
    store.passed += 1.01
    assert queue_candidates.is_outdated
    queue_candidates.refill()
    assert store.reads('ready')[-1] == (16, 'lazy', None)
    assert names(queue_candidates.take(2)) == ['urgent', 'item00100']
    assert not queue_candidates.is_outdated


def test_head_full_of_new_messages_is_read_completely(store: FakeStore) -> None:
    fill(store, 1000)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    claimed(store, queue_candidates.take(100))
    urgent = fill(store, 40, 9, 'urgent')
    store.passed += 1.01
    queue_candidates.refill()
    assert [after for _, _, after in store.reads('ready')] == [None, None, None]
    assert names(queue_candidates.take(50))[:41] == [*urgent, 'item00100']


def test_queue_without_candidates_left_is_outdated(store: FakeStore) -> None:
    fill(store, 200)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    assert not queue_candidates.is_outdated
    queue_candidates.take(1000)
    assert queue_candidates.is_outdated


def test_clear_forgets_everything(store: FakeStore) -> None:
    fill(store, 200)
    store.add('later', date=NOW + 100)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    queue_candidates.clear()
    assert (
        len(queue_candidates),
        queue_candidates.is_stale,
        queue_candidates.next_due,
        queue_candidates.is_outdated,
    ) == (
        0,
        True,
        None,
        True,
    )
    queue_candidates.refill()
    assert store.reads('ready')[-1] == (128, 'true', None)


def test_known_messages_at_the_head_are_not_new(store: FakeStore) -> None:
    fill(store, 1000)
    queue_candidates = candidates_of(store)
    queue_candidates.refill()
    taken = queue_candidates.take(100)  # claimed, and the index does not know it yet
    store.passed += 1.01
    queue_candidates.refill()
    assert len(queue_candidates) == 28
    taken += queue_candidates.take(1)
    assert names(taken[100:]) == ['item00100']
    assert [after for _, _, after in store.reads('ready')] == [None, None]
    claimed(store, taken)
    for doc in taken[:3]:
        store.docs[doc['_id']] = doc  # released
    store.passed += 5.0
    queue_candidates.refill()
    assert names(queue_candidates.take(4)) == ['item00000', 'item00001', 'item00002', 'item00101']


def test_one_of_the_consumers_updates_the_index(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 1000)
    queue_candidates = placed(store, 3)
    queue_candidates.refill()
    dice = iter([0.1, 0.5, 0.9, 0.3, 0.4, 0.6])
    monkeypatch.setattr(candidates, 'random', SimpleNamespace(random=lambda: next(dice)))
    for _ in range(6):
        store.passed += 1.01
        queue_candidates.refill()
    assert [update for limit, update, _ in store.reads('ready') if limit == 16].count('lazy') == 2


# -- claiming ahead


def test_lone_consumer_may_claim_everything_ahead(store: FakeStore) -> None:
    for n in range(5):
        store.add(f'item{n}')
    alone = candidates_of(store)
    alone.refill()
    assert alone.most_ahead(5) == 5
    alone.take(5)
    assert not alone.leaves_none


def test_consumer_leaves_messages_to_others_that_may_be_idle(store: FakeStore) -> None:
    fill(store, 120, prefix='task')
    shared = placed(store)
    shared.refill()
    own = len(list(shared._own()))
    assert own == 68
    assert shared.most_ahead(3) == 3
    assert shared.most_ahead(128) == own - 64
    assert not shared.leaves_none
    shared.take(own)
    assert shared.most_ahead(128) < 0
    assert shared.leaves_none


def test_consumer_may_claim_ahead_from_a_queue_that_it_has_not_read_to_the_end(store: FakeStore) -> None:
    shared = placed(store)
    assert shared.is_stale
    assert shared.most_ahead(128) == 128
    assert not shared.leaves_none
