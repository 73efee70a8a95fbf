"""The slots of one consumer, with responses that a test chooses."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.consumer import refusals
from kombu_couchdb.consumer.pending_writes import PendingWrite
from kombu_couchdb.consumer.slots import Slots
from kombu_couchdb.couchdb.responses import Unusable
from kombu_couchdb.couchdb.write_result import REFUSED, WriteResult, WriteStatus


class World:
    """A client that stores every creation, unless `status` says something else, and the state of a consumer."""

    def __init__(self) -> None:
        self.status, self.error = WriteStatus.STORED, ''
        self.created: list[str] = []
        #: The documents to be written in the last cycle.
        self.written: list[dict[str, Any]] = []
        self.held: set[str] = set()
        self.running: dict[str, float] = {}
        self.lease = SimpleNamespace(id='first')
        self.unusable = Unusable()
        client: Any = SimpleNamespace(
            bulk=self._bulk,
            clock=SimpleNamespace(now=lambda: 1.0),
            replicas=1,
            address=SimpleNamespace(url='url'),
            id_range=lambda prefix: [],
            unusable=self.unusable,
        )
        unacked: Any = SimpleNamespace(
            held_ids=lambda: self.held,
            may_run=lambda: self.running,
            wakeup=SimpleNamespace(set=lambda within=0.0: None),
        )
        self.slots = Slots(client, self.lease, unacked)  # type: ignore[arg-type]

    def _bulk(self, docs: list[dict[str, Any]]) -> list[WriteResult]:
        self.created += [doc['_id'] for doc in docs]
        return [WriteResult(doc['_id'], self.status, '1-a', self.error, 'because') for doc in docs]

    def cycle(self, *names: str, limit: int = 1) -> tuple[list[str], list[str]]:
        """Claim messages in a cycle; return the ids of those that are admitted, and of all documents to be written."""
        headers = {'concurrency_key': 'k', 'concurrency_limit': limit}
        docs = [{'_id': name, '_rev': '1-a', 'queue': 'q', 'message': {'headers': headers}} for name in names]
        writes: list[PendingWrite] = []
        self.slots.begin()
        admitted = [doc['_id'] for doc in self.slots.admit({'q': docs}, writes)['q']]
        self.slots.free(writes)
        self.held.update(admitted)
        self.slots.settle()
        self.written = [dict(doc) for doc, _ in writes]
        return admitted, [doc['_id'] for doc, _ in writes]


@pytest.fixture
def world() -> World:
    return World()


def test_one_of_two_messages_is_admitted_and_the_other_parked(world: World) -> None:
    assert world.cycle('a', 'b') == (['a'], ['b'])
    assert world.created == ['slot:k:0']


def test_slot_is_used_again_or_freed(world: World) -> None:
    world.cycle('a')
    world.held.clear()
    assert world.cycle('b') == (['b'], [])
    assert len(world.created) == 1
    world.held.clear()
    assert world.cycle() == ([], ['slot:k:0'])


def test_slot_of_an_ended_lease_is_not_used_again(world: World) -> None:
    world.cycle('a')
    world.held.clear()
    world.lease.id = 'second'
    assert world.cycle('b') == ([], ['b', 'slot:k:0'])


def test_slot_of_a_task_that_may_be_running_is_kept(world: World) -> None:
    world.cycle('a')
    world.held.clear()
    world.running = {'a': 1e9}
    assert world.cycle('b') == ([], ['b'])


@pytest.mark.parametrize('status', [WriteStatus.UNPROVEN, WriteStatus.CONFLICT])
def test_slot_that_is_not_proven_is_not_used(world: World, status: WriteStatus) -> None:
    world.status = status
    admitted, written = world.cycle('a')
    assert not admitted
    assert written == (['a', 'slot:k:0'] if status is WriteStatus.UNPROVEN else ['a'])


def test_slot_that_is_refused_for_ever_stops_only_its_message(world: World) -> None:
    world.status, world.error = WriteStatus.REFUSED, REFUSED
    assert world.cycle('a') == ([], ['a'])
    [dead] = world.written
    assert dead['reason'] == 'malformed: the concurrency slot of this message cannot be stored: because'
    assert (dead['status'], 'parked' in dead) == ('fail', False)
    world.status, world.error = WriteStatus.STORED, ''
    assert world.cycle('b') == (['b'], [])


def test_slot_that_is_refused_for_now_is_tried_again_later(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The message is parked. Meanwhile no request is made for its key, and one line is logged."""
    world.status, world.error = WriteStatus.REFUSED, 'forbidden'
    assert world.cycle('a', limit=3) == ([], ['a'])
    assert 'parked' in world.written[0]
    assert world.cycle('b', limit=3) == ([], ['b'])
    assert len(world.created) == 1
    [line] = caplog.messages
    assert line.startswith("the concurrency slot of key 'k' was not stored, and its messages wait: CouchDB refuses it")
    monkeypatch.setattr(refusals, 'time', SimpleNamespace(monotonic=lambda: time.monotonic() + 31))
    world.status, world.error = WriteStatus.STORED, ''
    assert world.cycle('a', limit=3) == (['a'], [])


def test_limit_of_several(world: World) -> None:
    admitted, written = world.cycle('a', 'b', 'c', 'd', limit=3)
    assert (admitted, written) == (['a', 'b', 'c'], ['d'])
    assert sorted(world.created) == ['slot:k:0', 'slot:k:1', 'slot:k:2']
