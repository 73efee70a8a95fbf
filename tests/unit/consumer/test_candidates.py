"""The candidates of one queue (`candidates`, `candidate_reader`), with a server in memory and a clock that is set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb import design
from kombu_couchdb.consumer import candidates, ending, paging, probes
from kombu_couchdb.consumer.candidate_reader import CandidateReader
from kombu_couchdb.consumer.candidates import QueueCandidates
from kombu_couchdb.consumer.runs import Runs
from kombu_couchdb.couchdb.unusable import Unusable
from kombu_couchdb.design.rows import WaitingRow
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.leases.peers import Turns
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
        self.client = SimpleNamespace(
            clock=clock, fetch=self.fetch, request=self.request, unusable=Unusable(), waits_for_indexes=False
        )
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

    def request(self, method: str, path: str, params: Any, body: Any, *, repeat: bool, shape: Any) -> Document:
        queries = body['queries']
        self.asked.append(
            ('ready', (queries[0]['limit'], params.get('update', 'true'), queries[0].get('startkey_docid')))
        )
        answer = {'results': [{'rows': self.rows(query)} for query in queries]}
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
        self.queue_candidates.set_consumers(f'm{position}', [f'm{number}' for number in range(count)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.queue_candidates, name)

    def __len__(self) -> int:
        return len(self.queue_candidates)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    for module in (paging, candidates, probes, ending):
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=store.monotonic))
    return store


def candidates_of(store: FakeStore, read_ahead: int = 1024) -> Consumer:
    return Consumer(store, read_ahead)


def names(docs: Sequence[Document]) -> list[str]:
    return [doc['_id'] for doc in docs]


def names_for(turn: int, members: int = 2, position: int = 0, prefix: str = 'item') -> Any:
    """Yield ids of messages that a consumer at `position` claims after `turn` others."""
    turns = Turns([f'm{number}' for number in range(members)], f'm{position}')
    return (name for name in (f'{prefix}{n:04}' for n in count()) if turns.idle_before(name) == turn)


def add_foreign(store: FakeStore, count: int) -> list[str]:
    """Add `count` messages that the other one of two consumers claims first, and return their ids."""
    foreign = names_for(1)
    return [store.add(next(foreign))['_id'] for _ in range(count)]


def placed(store: FakeStore, members: int = 2) -> Consumer:
    """Return the candidates of the first of several consumers, after the pause that the others' arrival causes."""
    queue_candidates = candidates_of(store)
    queue_candidates.set_consumers((0, members))
    store.passed += 1.0
    return queue_candidates


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


# -- several consumers


def test_own_messages_first_and_others_after_their_delay(store: FakeStore) -> None:
    queue_candidates = placed(store, 3)
    own, second, third = (next(names_for(turn, 3)) for turn in range(3))
    for name in (third, second, own):
        store.add(name)
    queue_candidates.refill()
    assert names(queue_candidates.take(10)) == [own]
    assert queue_candidates.take(10) == []
    store.passed += 0.1
    assert names(queue_candidates.take(10)) == [second]
    assert queue_candidates.take(10) == []
    store.passed += 0.1
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
    assert names(queue_candidates.take(10))[0] == foreign


def test_only_a_share_of_the_messages_of_others_is_taken(store: FakeStore) -> None:
    queue_candidates = placed(store)
    left = add_foreign(store, 10)
    queue_candidates.refill()
    store.passed += 1.0
    assert names(queue_candidates.take(8)) == left[:4]
    assert names(queue_candidates.take(1)) == left[4:5]


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


def test_many_messages_of_others_are_verified_in_one_read(store: FakeStore) -> None:
    queue_candidates = placed(store)
    many = add_foreign(store, 100)
    queue_candidates.refill()
    for name in many[:90]:
        store.docs[name] = workitem.claim(store.docs[name], 'another', NOW)
    store.passed += 1.0
    store.asked.clear()
    assert names(queue_candidates.take(64)) == many[90:]
    assert len(store.reads('ready')) == 1
    assert store.reads('fetch') == [many[90:]]
    assert len(queue_candidates) == 0
    assert queue_candidates.is_outdated


def test_messages_of_others_in_a_long_queue_are_verified_one_by_one(store: FakeStore) -> None:
    queue_candidates = candidates_of(store, read_ahead=50)
    queue_candidates.set_consumers((0, 2))
    store.passed += 1.0
    for name in add_foreign(store, 60):
        queue_candidates.offer(store.docs[name])
    store.passed += 1.0
    assert len(queue_candidates.take(10)) == 5
    assert len(queue_candidates) == 55


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
    store.passed = 0.0  # it is read now
    queue_candidates.queue_candidates._paused_until = 0.0
    queue_candidates.offer(doc)
    store.docs[name] = workitem.claim(doc, 'another', NOW)
    store.passed += 0.5
    assert queue_candidates.take(10) == []


def test_new_candidate_is_not_read_again(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    queue_candidates.set_consumers((0, 2))
    queue_candidates.queue_candidates._paused_until = 0.0
    queue_candidates.offer(store.add(next(names_for(0))))
    assert len(queue_candidates.take(10)) == 1
    assert store.reads('fetch') == []


# -- consumers without credit


def test_busy_consumer_is_not_waited_for(store: FakeStore) -> None:
    queue_candidates = placed(store, 3)
    third = names_for(2, 3)
    queue_candidates.offer(store.add(next(third)))
    assert queue_candidates.take(1) == []
    store.passed += 0.21
    [doc] = queue_candidates.take(1)
    queue_candidates.won(doc['_id'])
    claimed(store, [doc])
    for _ in range(3):
        queue_candidates.offer(store.add(next(third)))
    store.passed += 0.011  # a moment for consumers that only seem to be busy
    assert len(queue_candidates.take(3)) == 3


def test_consumer_that_claims_again_gets_its_turn_back(store: FakeStore) -> None:
    queue_candidates = placed(store)
    first, second, third = (next(foreign) for foreign in [names_for(1)] for _ in range(3))
    queue_candidates.offer(store.add(first))
    store.passed += 0.11
    queue_candidates.won(queue_candidates.take(1)[0]['_id'])
    for name in (second, third):
        queue_candidates.offer(store.add(name))
    store.docs[second] = workitem.claim(store.docs[second], 'm1', NOW)
    store.passed += 0.011
    queue_candidates.take(1)  # it is read, and m1 has claimed it
    assert queue_candidates.take(1) == []
    store.passed += 0.1
    assert names(queue_candidates.take(1)) == [third]


def test_consumer_that_wins_a_claim_gets_its_turn_back(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    queue_candidates.won(store.add(next(foreign))['_id'])
    queue_candidates.lost(store.add(next(foreign))['_id'])
    queue_candidates.offer(store.add(next(foreign)))
    store.passed += 0.011
    assert queue_candidates.take(1) == []


def test_probes_find_busy_consumers_in_a_long_queue(store: FakeStore) -> None:
    """One of three other consumers claims its share, and two have no credit: their shares are claimed here."""
    queue_candidates = placed(store, 4)
    fill(store, 4000)
    turns = Turns([f'm{number}' for number in range(4)], 'm0')
    taken: list[str] = []
    for _ in range(8):
        queue_candidates.refill()
        for name in [
            row.id
            for row in list(queue_candidates.queue_candidates._candidates.values())
            if turns.first(row.id) == 'm1'
        ]:
            store.docs[name] = workitem.claim(store.docs[name], 'm1', NOW)
        docs = queue_candidates.take(1000)
        for doc in docs:
            queue_candidates.won(doc['_id'])
        claimed(store, docs)
        taken += names(docs)
        store.passed += 0.11
    assert queue_candidates.queue_candidates._order.turns.busy == {'m2', 'm3'}
    assert {turns.first(name) for name in taken} == {'m0', 'm2', 'm3'}


# -- changes of the consumers


def test_change_of_consumers_causes_a_pause_and_a_new_read(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    own, foreign = next(names_for(0)), next(names_for(1))
    for name in (own, foreign):
        store.add(name)
    queue_candidates.refill()
    queue_candidates.set_consumers((0, 2))
    assert queue_candidates.take(10) == []
    assert queue_candidates.wake_at() == pytest.approx(store.monotonic() + 0.1)
    store.docs[own] = {**store.docs[own], '_rev': '2-b'}
    store.passed += 0.11
    assert [(doc['_id'], doc['_rev']) for doc in queue_candidates.take(10)] == [(own, '2-b')]
    assert names(queue_candidates.take(10)) == [foreign]
    assert store.reads('fetch') == [[own], [foreign]]


def test_unchanged_consumers_cause_no_pause(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    store.add('a')
    queue_candidates.refill()
    queue_candidates.set_consumers((0, 1))
    assert names(queue_candidates.take(10)) == ['a']


def test_last_consumer_comes_first_for_all_messages(store: FakeStore) -> None:
    queue_candidates = placed(store)
    foreign = names_for(1)
    left = [next(foreign) for _ in range(4)]
    for name in left:
        store.add(name)
    queue_candidates.refill()
    queue_candidates.set_consumers((0, 1))
    store.passed += 0.2
    assert names(queue_candidates.take(10)) == left


def test_last_consumer_reads_its_candidates_again(store: FakeStore) -> None:
    queue_candidates = placed(store)
    name = next(names_for(0))
    queue_candidates.offer(store.add(name))
    queue_candidates.set_consumers((0, 1))
    store.docs[name] = workitem.claim(store.docs[name], 'another', NOW)
    store.passed += 0.2
    assert queue_candidates.take(10) == []


# -- long queues


def fill(store: FakeStore, number: int, priority: int = 0, prefix: str = 'item') -> list[str]:
    names = [f'{prefix}{n:05}' for n in range(number)]
    for n, name in enumerate(names):
        store.add(name, priority, published=NOW - 1000 + n / 1000)
    return names


def claimed(store: FakeStore, docs: Sequence[Any]) -> None:
    for doc in docs:
        store.docs[doc['_id']] = workitem.claim(doc, 'me', NOW)


def owned(page: Sequence[str], position: int, members: int = 2) -> list[str]:
    """Return the ids on a page of a long queue that the consumer at `position` claims first."""
    runs, turns = Runs(), Turns([f'm{number}' for number in range(members)], f'm{position}')
    runs.read([WaitingRow(name, 9, NOW, '1-a', planned=False) for name in page], members)
    return [name for name in page if turns.idle_before(runs.key(name)) == 0]


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
    fill(store, 10)
    queue_candidates.refill()
    assert store.reads('ready') == [(384, 'true', None)]


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


def test_in_a_long_queue_messages_of_others_are_left_to_them(store: FakeStore) -> None:
    queue_candidates = placed(store)
    items = fill(store, 400)
    queue_candidates.refill()
    store.passed += 0.5
    share = owned(items[:256], 0)
    assert 64 < len(share) < 192
    assert names(queue_candidates.take(1000)) == share
    assert queue_candidates.take(1000) == []
    assert queue_candidates.wake_at() is None


def at_the_end(store: FakeStore) -> tuple[Consumer, list[str]]:
    """Return a consumer that has claimed its share of a queue, and the ids that it leaves to the other consumer."""
    queue_candidates = placed(store)
    items = fill(store, 200)
    queue_candidates.refill()
    claimed(store, queue_candidates.take(1000))
    store.passed += 0.15
    return queue_candidates, [name for name in items if name not in owned(items, 0)]


def test_messages_that_others_claim_quickly_are_left_to_them(store: FakeStore) -> None:
    queue_candidates, left = at_the_end(store)
    claimed(store, [store.docs[name] for name in left[:40]])
    assert queue_candidates.take(64) == []  # it reads the head before it claims messages of others
    assert len(queue_candidates) == len(left) - 40
    assert not queue_candidates.has_claimable
    assert not queue_candidates.needs_page
    assert queue_candidates.is_stale  # the feed is not followed
    assert queue_candidates.wake_at() == pytest.approx(store.monotonic() + 0.25)
    store.passed += 0.25
    assert names(queue_candidates.take(64)) == left[40:72]  # the other consumer has stopped


def test_messages_that_others_leave_are_claimed(store: FakeStore) -> None:
    queue_candidates, left = at_the_end(store)
    assert names(queue_candidates.take(64)) == left[:32]  # nothing was claimed since the last read
    assert queue_candidates._order.turns.idle == 2


def test_messages_that_others_claim_slowly_are_claimed(store: FakeStore) -> None:
    queue_candidates, left = at_the_end(store)
    claimed(store, [store.docs[left[0]]])
    assert names(queue_candidates.take(64)) == left[1:33]


def test_few_messages_of_others_are_followed_by_the_feed(store: FakeStore) -> None:
    queue_candidates, left = at_the_end(store)
    claimed(store, [store.docs[name] for name in left[20:]])
    store.passed += 0.3
    queue_candidates.refill()
    assert not queue_candidates.is_stale
    assert sorted(names(queue_candidates.take(64) + queue_candidates.take(64))) == left[:20]


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


def test_consumers_update_the_index_in_turn(store: FakeStore) -> None:
    fill(store, 1000)
    queue_candidates = placed(store, 3)
    queue_candidates.refill()
    for _ in range(6):
        store.passed += 1.01
        queue_candidates.refill()
    assert [update for limit, update, _ in store.reads('ready') if limit == 16].count('lazy') == 2


# -- forged Consumer documents: any member of the database may write many


@pytest.mark.parametrize(('forged', 'seconds'), [(3, 0.31), (40, 0.81), (64, 0.81), (600, 0.02)])
@pytest.mark.parametrize('known', [True, False])
def test_forged_consumers_cause_only_a_short_wait(store: FakeStore, forged: int, seconds: float, known: bool) -> None:
    members, queue_candidates = forged + 1, candidates_of(store)
    queue_candidates.set_consumers((0, members))
    store.passed += 1
    last = next(names_for(forged, members))
    doc = store.add(last)
    if known:
        queue_candidates.offer(doc)
    else:
        queue_candidates.refill()
    store.passed += seconds
    assert names(queue_candidates.take(10)) == [last]


def test_among_many_consumers_one_that_claims_has_its_turn(store: FakeStore) -> None:
    queue_candidates, members = candidates_of(store), 101
    queue_candidates.set_consumers((0, members))
    store.passed += 1
    turns = Turns([f'm{number}' for number in range(members)], 'm0')
    of_one = (name for name in (f'item{number:04}' for number in count()) if turns.first(name) == 'm50')
    taken, left = next(of_one), next(of_one)
    queue_candidates.offer(store.add(taken))
    store.docs[taken] = workitem.claim(store.docs[taken], 'm50', NOW)
    store.passed += 0.02
    assert queue_candidates.take(10) == []
    queue_candidates.offer(store.add(left))
    store.passed += 0.05
    assert queue_candidates.take(10) == []
    store.passed += 0.06
    assert names(queue_candidates.take(10)) == [left]


def test_consumer_that_comes_and_goes_does_not_stop_the_others(store: FakeStore) -> None:
    queue_candidates = candidates_of(store)
    queue_candidates.set_consumers((0, 2))
    store.passed += 1
    queue_candidates.offer(store.add(next(names_for(1))))
    for number in range(40):
        queue_candidates.queue_candidates.set_consumers('m0', ['m0', f'new{number}'])
        store.passed += 0.05
        if taken := queue_candidates.take(10):
            break
    assert len(taken) == 1


def test_of_many_consumers_several_update_the_index(store: FakeStore) -> None:
    fill(store, 1000)
    queue_candidates = candidates_of(store, 128)
    queue_candidates.set_consumers((0, 601))
    store.passed += 0.2
    queue_candidates.refill()
    for _ in range(20):
        store.passed += 1.01
        queue_candidates.refill()
    assert [update for limit, update, _ in store.reads('ready') if limit == 16].count('lazy') >= 2


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
    own = names_for(0)
    for _ in range(100):
        store.add(next(own))
    add_foreign(store, 10)
    shared = placed(store)
    shared.refill()
    assert shared.most_ahead(20) == 20
    assert shared.most_ahead(128) == pytest.approx(36, abs=8)  # a run may have messages of others
    assert not shared.leaves_none
    shared.take(100)
    assert shared.most_ahead(128) < 0
    assert shared.leaves_none


def test_consumer_may_claim_ahead_from_a_queue_that_it_has_not_read_to_the_end(store: FakeStore) -> None:
    shared = placed(store)
    assert shared.is_stale
    assert shared.most_ahead(128) == 128
    assert not shared.leaves_none


def test_busy_consumers_need_no_messages(store: FakeStore) -> None:
    [foreign] = add_foreign(store, 1)
    shared = placed(store)
    shared.refill()
    shared.won(foreign)
    assert shared.most_ahead(128) == 128
    assert not shared.leaves_none
