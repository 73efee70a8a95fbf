"""The gate of one consumer, with responses of CouchDB that a test chooses."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.couchdb.write_result import PendingWrite, WriteResult, WriteStatus
from kombu_couchdb.limits import permits
from kombu_couchdb.limits.gate import Gate


class World:
    """A database without parked messages, and a consumer. Slots and starts get the results in `statuses` first."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.statuses: list[WriteStatus] = []
        self.docs: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.held: set[str] = set()
        self.shown: dict[str, dict[str, Any]] = {}  # what the view shows in place of documents
        self.living: set[str] = set()  # the consumers with a heartbeat
        self.lease = SimpleNamespace(id='me')
        clock = SimpleNamespace(now=lambda: self.now)
        client = SimpleNamespace(bulk=self._bulk, find=self._find, id_range=self._id_range, clock=clock, replicas=1)
        client.view, client.fetch = self._view, self._find
        store: Any = SimpleNamespace(client=client, alive=self.living.intersection)
        peers: Any = SimpleNamespace(consumers_of=lambda queue, own: ['me'])
        topology: Any = SimpleNamespace(paused=frozenset())
        lease: Any = self.lease
        self.gate = Gate(store, lease, topology, peers)

    def _find(self, ids: list[str]) -> list[dict[str, Any] | None]:
        self.requests.append('find')
        return [self.docs.get(doc_id) for doc_id in ids]

    def _id_range(self, prefix: str) -> list[dict[str, Any]]:
        return [{'id': doc_id} for doc_id in self.docs if doc_id.startswith(prefix)]

    def _view(self, *names: Any, startkey: list[str], **keys: Any) -> list[dict[str, Any]]:
        docs = {**self.docs, **self.shown}
        return [{'id': doc_id} for doc_id, doc in docs.items() if doc.get('by') == startkey[1]]

    def _bulk(self, docs: list[dict[str, Any]]) -> list[WriteResult]:
        self.requests.append('bulk')
        results = []
        for doc in docs:
            stored = self.docs.get(doc['_id'], {}).get('_rev')
            status = self.statuses.pop(0) if self.statuses else WriteStatus.STORED
            if status is WriteStatus.STORED and stored != doc.get('_rev'):
                status = WriteStatus.CONFLICT
            if status in (WriteStatus.STORED, WriteStatus.UNPROVEN):
                self.docs[doc['_id']] = {**doc, '_rev': f'{len(self.requests)}-a'}
            rev = self.docs.get(doc['_id'], {}).get('_rev', '')
            results.append(WriteResult(doc['_id'], status, rev, 'forbidden', 'because'))
        return results

    def cycle(self, *names: str, **headers: Any) -> tuple[list[str], list[str]]:
        """Claim messages in a cycle; return the ids of those that are admitted, and of all documents to be written."""
        docs = [{'_id': name, '_rev': '1-a', 'queue': 'q', 'message': {'headers': headers}} for name in names]
        writes: list[PendingWrite] = []
        self.gate.begin(lambda: self.held)
        admitted = [doc['_id'] for doc in self.gate.admit({'q': docs}, writes)['q']]
        self.gate.wake(writes)
        self.gate.free(writes)
        self.held = {*self.held, *admitted}
        self.gate.settle(lambda: self.held)
        assert all('parked' in write.doc or write.doc.get('_deleted') for write in writes)
        return admitted, [write.doc['_id'] for write in writes]

    def limited(self, *names: str, limit: int = 1) -> tuple[list[str], list[str]]:
        return self.cycle(*names, concurrency_key='k', concurrency_limit=limit)

    def rated(self, *names: str) -> tuple[list[str], list[str]]:
        return self.cycle(*names, rate='10/s', rate_key='k')

    @property
    def next(self) -> float:
        return float(self.docs['rate:k']['next'])


@pytest.fixture
def world() -> World:
    return World()


# -- slots


def test_message_that_was_read_before_its_claim_gets_no_second_slot(world: World) -> None:
    world.limited('a', 'b', limit=2)
    world.held = {'b'}
    admitted, written = world.limited('b', limit=2)  # the claim is a conflict
    assert admitted == ['b']
    [slot] = written  # that of `a`
    assert slot.startswith('slot:')


def test_message_that_was_read_before_its_claim_keeps_its_slot(world: World) -> None:
    both: dict[str, Any] = {'concurrency_key': 'k', 'concurrency_limit': 1, 'rate': '1/s', 'rate_key': 'k'}
    assert world.cycle('a', **both) == (['a'], [])
    world.docs['rate:k'] |= {'_rev': '9-b', 'next': world.now + 5, 'by': 'other'}  # there is no start any more
    assert world.cycle('a', **both)[1] == ['a']
    assert [name for name in world.docs if name.startswith('slot:')] == ['slot:k:0']


def test_unproven_slot_is_not_used(world: World) -> None:
    world.statuses = [WriteStatus.UNPROVEN]
    assert world.limited('a') == ([], ['a', 'slot:k:0'])


def test_unproven_slot_is_not_used_by_the_next_message(world: World) -> None:
    world.statuses = [WriteStatus.UNPROVEN]
    world.gate.begin(set)
    for name, limit, expected in (('a', 1, []), ('b', 2, ['b'])):
        headers = {'concurrency_key': 'k', 'concurrency_limit': limit}
        doc = {'_id': name, '_rev': '1-a', 'queue': 'q', 'message': {'headers': headers}}
        assert [doc['_id'] for doc in world.gate.admit({'q': [doc]}, [])['q']] == expected
    assert {*world.docs} == {'slot:k:0', 'slot:k:1'}


def test_slot_that_another_consumer_has_taken_since_is_kept(world: World) -> None:
    slot = {'_id': 'slot:k:0', '_rev': '1-a', 'type': 'Slot'}
    world.docs['slot:k:0'], world.shown['slot:k:0'] = {**slot, 'by': 'third'}, {**slot, 'by': 'other'}
    leases: Any = {'slot': {'other': {'count': 1}}, 'consumer': {}, 'parked': {}}
    world.gate.sweep(leases, 'me', ['other'])
    assert '_deleted' not in world.docs['slot:k:0']


def test_slot_of_a_living_consumer_is_kept_although_the_view_does_not_show_its_lease_yet(world: World) -> None:
    world.docs['slot:k:0'] = {'_id': 'slot:k:0', '_rev': '1-a', 'type': 'Slot', 'by': 'other'}
    leases: Any = {'slot': {'other': {'count': 1}}, 'consumer': {}, 'parked': {}}
    world.living.add('other')
    world.gate.sweep(leases, 'me', ())
    assert '_deleted' not in world.docs['slot:k:0']
    world.living.clear()
    world.gate.sweep(leases, 'me', ())
    assert '_deleted' in world.docs['slot:k:0']


# -- starts


def test_a_start_that_another_consumer_has_taken_is_not_used(world: World) -> None:
    world.rated('a')
    world.now += 1
    world.docs['rate:k'] |= {'_rev': '9-b', 'next': world.now + 0.11, 'by': 'other'}
    assert world.rated('b') == ([], ['b'])
    assert world.next == pytest.approx(world.now + 0.11)


def test_an_unproven_start_is_lost(world: World) -> None:
    world.statuses = [WriteStatus.UNPROVEN]
    assert world.rated('a') == ([], ['a'])
    assert world.next == pytest.approx(1000.11)


# -- refusals


@pytest.mark.parametrize(
    ('kind', 'what', 'headers'),
    [
        ('Slot', 'the concurrency slot', {'concurrency_key': 'k', 'concurrency_limit': 3}),
        ('Rate', 'the next start', {'rate': '10/s', 'rate_key': 'k'}),
    ],
)
def test_messages_wait_after_a_refusal(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    what: str,
    headers: dict[str, Any],
) -> None:
    """The message is parked. Meanwhile no request is made for its key, and one line is logged."""
    world.statuses = [WriteStatus.REFUSED]
    assert world.cycle('a', **headers) == ([], ['a'])
    assert world.gate.due({'q': 1}) > time.monotonic() + 29
    world.requests.clear()
    assert world.cycle('b', **headers) == ([], ['b'])
    assert not world.requests
    [line] = caplog.messages
    assert line.startswith(f"{what} of key 'k' was not stored, and its messages wait: CouchDB refuses it (because)")
    monkeypatch.setattr(permits, 'time', SimpleNamespace(monotonic=lambda: time.monotonic() + 31))
    assert world.cycle('a', **headers) == (['a'], [])
    assert [doc['type'] for doc in world.docs.values()] == [kind]
