"""The candidates of one queue (`candidates`, `claims`), with a server in memory and a clock that is set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb import design
from kombu_couchdb.consumer.claims import CandidateReader
from kombu_couchdb.couchdb.bulk import Unusable
from kombu_couchdb.couchdb.pacing import Pace
from kombu_couchdb.documents import workitem
from kombu_couchdb.fleet import candidates
from kombu_couchdb.fleet.candidates import QueueCandidates

Document = dict[str, Any]

#: The server's time when a test begins.
NOW = 1_763_709_000.0


class FakeStore:
    """Documents, and the view `waiting`. It records the reads; time passes only by setting `passed`."""

    def __init__(self) -> None:
        self.docs: dict[str, Any] = {}
        self.passed = 0.0
        #: The ids that were fetched; and of each read of the view: the limit, the option `update`, and where it begins.
        self.fetched: list[str] = []
        self.reads: list[tuple[int, str, str | None]] = []
        clock = SimpleNamespace(now=lambda: NOW + self.passed)
        self.client = SimpleNamespace(
            clock=clock, fetch=self.fetch, query=self.query, unusable=Unusable(), pace=Pace('a server')
        )
        self.begun = time.monotonic()

    def monotonic(self) -> float:
        return self.begun + self.passed

    def add(self, name: str, priority: int = 0, date: float | None = None, published: float = NOW) -> Any:
        doc = workitem.new(name, 'q', {'headers': {}, 'properties': {}, 'body': ''}, published)
        self.docs[name] = {**doc, '_rev': '1-a', 'priority': priority, 'date': date}
        return self.docs[name]

    def fetch(self, ids: Sequence[str]) -> list[Document | None]:
        self.fetched += ids
        return [self.docs.get(name) for name in ids]

    def query(self, design: str, method: str, view: str, params: Any, body: Any, *, shape: Any) -> Document:
        queries = body.get('queries', [body])
        self.reads.append((queries[0]['limit'], params.get('update', 'true'), queries[0].get('startkey_docid')))
        results = [{'rows': self.rows(query)} for query in queries]
        answer = {'results': results} if 'queries' in body else results[0]
        assert shape(answer)
        return answer

    def rows(self, query: Document) -> list[Document]:
        rows = []
        for doc in filter(workitem.is_waiting, self.docs.values()):
            rank = 9 - doc['priority']
            place = [rank, doc['published']] if doc['date'] is None else [design.PLANNED, doc['date']]
            rows.append({'id': doc['_id'], 'key': [doc['queue'], *place], 'value': [rank, doc['_rev']]})
        rows.sort(key=lambda row: (row['key'], row['id']))
        start = ([*query['startkey'], -1, -1][:3], query.get('startkey_docid', ''))
        end = [NOW * 10 if part == {} else part for part in query['endkey']]
        found = [row for row in rows if (row['key'], row['id']) >= start and row['key'][: len(end)] <= end]
        return found[query.get('skip', 0) :][: query['limit']]


class Consumer:
    """The candidates of a queue, and their reader."""

    def __init__(self, store: FakeStore) -> None:
        self.queue_candidates = QueueCandidates(store.client.clock, 'q', 1024)
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue_candidates, name)

    def __len__(self) -> int:
        return len(self.queue_candidates)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    monkeypatch.setattr(candidates, 'time', SimpleNamespace(monotonic=store.monotonic))
    return store


def names(docs: Sequence[Document]) -> list[str]:
    return [doc['_id'] for doc in docs]


def placed(store: FakeStore, consumers: int = 2) -> Consumer:
    """Return the candidates of the first of several consumers, all of which listen."""
    queue_candidates = Consumer(store)
    listeners = [f'm{number}' for number in range(consumers)]
    queue_candidates.queue_candidates.set_consumers('m0', listeners, listeners)
    return queue_candidates


def fill(store: FakeStore, number: int) -> list[str]:
    names = [f'item{n:05}' for n in range(number)]
    for n, name in enumerate(names):
        store.add(name, published=NOW - 1000 + n / 1000)
    return names


def claimed(store: FakeStore, docs: Sequence[Any]) -> None:
    for doc in docs:
        store.docs[doc['_id']] = workitem.claim(doc, 'me', NOW)


def test_messages_from_the_feed_and_scheduled_ones_are_in_order(store: FakeStore) -> None:
    store.add('old', published=NOW - 5)
    store.add('planned', date=NOW - 3, published=NOW - 50)
    queue_candidates = Consumer(store)
    queue_candidates.refill()
    for name, published in (('new', NOW), ('oldest', NOW - 6), ('new', NOW + 1)):
        queue_candidates.offer(store.add(name, published=published))
    queue_candidates.offer(store.add('high', 9))
    assert queue_candidates.take(0) == []
    assert names(queue_candidates.take(2)) == ['high', 'oldest']
    assert names(queue_candidates.take(10)) == ['old', 'planned', 'new']
    assert queue_candidates.take(10) == []


def rounds(store: FakeStore, queue_candidates: Consumer, seconds: float) -> list[str]:
    """Claim for some seconds what may be claimed, as the cycle does; return the ids."""
    taken: list[str] = []
    until = store.passed + seconds
    while store.passed < until:
        if queue_candidates.needs_page:
            queue_candidates.refill()
        docs = queue_candidates.reader.take_docs({'q': queue_candidates.queue_candidates}, {'q': 1000})['q']
        claimed(store, docs)
        taken += names(docs)
        store.passed += 0.02
    return taken


def test_nothing_is_tried_that_others_have_claimed(store: FakeStore) -> None:
    queue_candidates = placed(store)
    fill(store, 40)
    queue_candidates.refill()
    claimed(store, queue_candidates.take(100))
    claimed(store, [doc for doc in store.docs.values() if workitem.is_waiting(doc)])
    store.fetched.clear()
    assert rounds(store, queue_candidates, 2.0) == []
    assert store.fetched == []
    assert not queue_candidates.is_stale


@pytest.mark.parametrize('number', [20, 300])
@pytest.mark.parametrize('date', [None, NOW - 10.0], ids=['now', 'scheduled'])
def test_messages_of_a_consumer_without_credit_are_claimed(store: FakeStore, number: int, date: float | None) -> None:
    queue_candidates = placed(store)
    items = fill(store, number)
    for name in items:
        store.docs[name]['date'] = date
    assert sorted(rounds(store, queue_candidates, 5.0)) == items


def test_after_a_bell_nobody_is_waited_for(store: FakeStore) -> None:
    usual, hurried = placed(store, 8), placed(store, 8)
    items = fill(store, 40)
    hurried.queue_candidates.hurries = True
    for queue_candidates in (usual, hurried):
        queue_candidates.refill()
    first = names(hurried.take(2))
    assert first == names(usual.take(2))  # the own share comes first
    assert sorted(first + names(hurried.take(100)) + names(hurried.take(100))) == items


def test_forged_consumers_cause_only_a_short_wait(store: FakeStore) -> None:
    """Any member of the database may write consumer documents."""
    queue_candidates = placed(store, 41)
    items = fill(store, 30)
    assert sorted(rounds(store, queue_candidates, 3.0)) == items


def test_consumers_choose_different_messages_of_one_that_claims_nothing(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, 'random', Random(1))
    fill(store, 120)
    ids = [f'm{number}' for number in range(4)]
    consumers = [Consumer(store) for _ in ids[1:]]
    for own, consumer in zip(ids, consumers, strict=False):
        consumer.queue_candidates.set_consumers(own, ids, ids)
        consumer.refill()
        claimed(store, consumer.take(1000))
    store.passed += 2.0
    left = sum(map(workitem.is_waiting, store.docs.values()))
    found = [names(consumer.take(100)) for consumer in consumers]
    assert [len(each) for each in found] == [left // 4] * 3
    assert len({*found[0], *found[1], *found[2]}) > left // 2


def test_of_messages_that_others_left_the_highest_priority_comes_first(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 40)
    claimed(store, _taken_by(placed(store)))
    left = [doc for doc in store.docs.values() if workitem.is_waiting(doc)]
    left[-1]['priority'] = 9
    for seed in range(10):
        monkeypatch.setattr(candidates, 'random', Random(seed))
        consumer = placed(store)
        assert _taken_by(consumer) == []
        store.passed += 2.0
        assert names(consumer.take(16)) == [left[-1]['_id']]


def _taken_by(consumer: Consumer) -> list[Document]:
    consumer.refill()
    return consumer.take(1000)


def test_documents_are_read_again_only_if_they_have_changed(store: FakeStore) -> None:
    fill(store, 60)
    consumer = placed(store)
    consumer.refill()
    claimed(store, consumer.take(1))  # reads the documents that follow, too
    before, store.fetched = set(store.fetched[1:]), []
    changed = min(before)
    store.docs[changed] = {**store.docs[changed], '_rev': '2-b'}
    consumer.mark_stale()
    consumer.refill()
    consumer.take(1000)
    assert before & {*store.fetched} == {changed}


def test_long_queue_is_read_page_by_page(store: FakeStore) -> None:
    items = fill(store, 300)
    queue_candidates = Consumer(store)
    taken = []
    while queue_candidates.is_stale:
        queue_candidates.refill()
        docs = queue_candidates.take(1000)
        claimed(store, docs)
        taken += names(docs)
    assert taken == items
    assert [after for _, _, after in store.reads][:2] == [None, items[127]]


def test_head_is_read_again_for_higher_priorities(store: FakeStore) -> None:
    fill(store, 1000)
    queue_candidates = Consumer(store)
    queue_candidates.refill()
    claimed(store, queue_candidates.take(100))
    store.add('urgent', 9)
    assert not queue_candidates.is_outdated
    store.passed += 1.01
    assert queue_candidates.is_outdated
    queue_candidates.refill()
    assert store.reads[-1] == (16, 'lazy', None)
    assert names(queue_candidates.take(2)) == ['urgent', 'item00100']
    assert not queue_candidates.is_outdated


def test_known_messages_at_the_head_are_not_new(store: FakeStore) -> None:
    fill(store, 1000)
    queue_candidates = Consumer(store)
    queue_candidates.refill()
    taken = queue_candidates.take(100)  # claimed, and the index does not know it yet
    store.passed += 1.01
    queue_candidates.refill()
    assert len(queue_candidates) == 28
    taken += queue_candidates.take(1)
    assert names(taken[100:]) == ['item00100']
    assert [after for _, _, after in store.reads] == [None, None]
    claimed(store, taken)
    for doc in taken[:3]:
        store.docs[doc['_id']] = doc  # released
    store.passed += 5.0
    queue_candidates.refill()
    assert names(queue_candidates.take(4)) == ['item00000', 'item00001', 'item00002', 'item00101']
