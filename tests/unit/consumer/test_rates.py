"""The starts that one consumer takes, with responses that a test chooses."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.consumer import refusals
from kombu_couchdb.consumer.pending_writes import PendingWrite
from kombu_couchdb.consumer.rates import Rates
from kombu_couchdb.couchdb.write_result import REFUSED, WriteResult, WriteStatus


class World:
    """A database with the documents of rates, and a consumer. Writes get the results in `statuses` first."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.statuses: list[WriteStatus] = []
        self.docs: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.withdrawn: set[str] = set()
        self.error = 'forbidden'
        #: The documents that were to be written with the last claims.
        self.written: list[dict[str, Any]] = []
        client: Any = SimpleNamespace(
            bulk=self._bulk,
            find=self._find,
            clock=SimpleNamespace(now=lambda: self.now),
            replicas=1,
            address=SimpleNamespace(url='url'),
        )
        slots: Any = SimpleNamespace(admit=lambda taken, writes: taken, withdraw=self.withdrawn.update)
        lease: Any = SimpleNamespace(id='me')
        self.rates = Rates(client, lease, slots)

    def _find(self, ids: list[str]) -> list[dict[str, Any] | None]:
        self.requests.append('find')
        return [self.docs.get(doc_id) for doc_id in ids]

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
            results.append(WriteResult(doc['_id'], status, rev, self.error, 'error'))
        return results

    def admit(self, *names: str, rate: str = '10/s', parked: bool = False) -> tuple[list[str], list[str]]:
        """Return the ids of the messages that get a start, and of those that are parked."""
        message = {'headers': {'rate': rate, 'rate_key': 'k'}}
        where = {'parked': {'key': 'rate:q:k', 'date': 1}} if parked else {}
        docs = [{'_id': name, '_rev': '1-a', 'queue': 'q', 'message': message, **where} for name in names]
        writes: list[PendingWrite] = []
        admitted = self.rates.admit({'q': docs}, writes)['q']
        self.written = [dict(doc) for doc, _ in writes]
        return [doc['_id'] for doc in admitted], [doc['_id'] for doc in self.written]

    @property
    def next(self) -> float:
        return float(self.docs['rate:k']['next'])


@pytest.fixture
def world() -> World:
    return World()


def test_one_start_at_a_time(world: World) -> None:
    assert world.admit('a', 'b') == (['a'], ['b'])
    assert world.next == pytest.approx(1000.11)
    assert world.docs['rate:k']['by'] == 'me'
    world.now += 0.02
    assert world.admit('b', parked=True) == (['b'], [])  # up to BURST_SECONDS before its time
    assert world.admit('c') == ([], ['c'])


def test_no_request_while_it_is_known_that_there_is_no_start(world: World) -> None:
    world.admit('a')
    world.requests.clear()
    assert world.admit('b') == ([], ['b'])
    assert world.admit('c', parked=True) == ([], [])
    assert not world.requests


def test_the_known_revision_is_written_without_a_read(world: World) -> None:
    world.admit('a')
    world.now += 1
    world.requests.clear()
    world.admit('b')
    assert world.requests == ['bulk']


def test_a_start_that_another_consumer_has_taken_is_not_used(world: World) -> None:
    world.admit('a')
    world.now += 1
    world.docs['rate:k'] = {**world.docs['rate:k'], '_rev': '9-b', 'next': world.now + 0.11, 'by': 'other'}
    assert world.admit('b') == ([], ['b'])
    assert world.withdrawn == {'b'}
    assert world.next == pytest.approx(world.now + 0.11)


def test_conflict_with_starts_left(world: World) -> None:
    world.admit('a')
    world.now += 1
    world.docs['rate:k'] |= {'_rev': '9-b', 'next': world.now, 'by': 'other'}
    assert world.admit('b') == (['b'], [])


def test_an_unproven_start_is_lost(world: World) -> None:
    world.statuses = [WriteStatus.UNPROVEN]
    assert world.admit('a') == ([], ['a'])
    assert world.next == pytest.approx(1000.11)


def test_conflicts_end(world: World) -> None:
    world.statuses = [WriteStatus.CONFLICT] * 9
    assert world.admit('a') == ([], ['a'])
    assert world.requests.count('bulk') == 3


def test_messages_wait_after_a_refusal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.statuses = [WriteStatus.REFUSED]
    assert world.admit('a') == ([], ['a'])
    assert world.rates.due({'q': 1}) > time.monotonic() + 29
    world.requests.clear()
    assert world.admit('b') == ([], ['b'])
    assert not world.requests
    monkeypatch.setattr(refusals, 'time', SimpleNamespace(monotonic=lambda: time.monotonic() + 31))
    assert world.admit('a', parked=True) == (['a'], [])


def test_message_whose_start_is_refused_for_ever_becomes_a_dead_letter(world: World) -> None:
    world.statuses, world.error = [WriteStatus.REFUSED] * 9, REFUSED
    assert world.admit('a') == ([], ['a'])
    assert world.written[0]['reason'] == 'malformed: the next start of this message cannot be stored: error'
    world.statuses = []
    assert world.admit('b') == (['b'], [])


def test_burst_of_a_high_rate(world: World) -> None:
    """In the first moment start as many as are due within BURST_SECONDS, and no more."""
    names = [str(number) for number in range(50)]
    admitted, parked = world.admit(*names, rate='100/s')
    assert len(admitted) == 10
    assert len(parked) == 40


def test_only_queues_with_credit_are_looked_at(world: World) -> None:
    world.admit('a', 'b')
    assert world.rates.due({'q': 1}) < float('inf')
    assert world.rates.due({'q': 0}) == world.rates.due({'other': 1}) == float('inf')


@pytest.mark.parametrize(
    ('rate', 'consumers', 'most'), [('1/s', 2, 1.0), ('50/s', 1, 0.088), ('50/s', 2, 0.176), ('50/s', 100, 1.0)]
)
def test_others_look_later_than_the_consumer_with_the_last_start(
    world: World, monkeypatch: pytest.MonkeyPatch, rate: str, consumers: int, most: float
) -> None:
    """The later the more they are, so that they do not read more often together."""
    spans: list[float] = []

    def uniform(least: float, most: float) -> float:
        spans.append(most)
        return least

    monkeypatch.setattr(random, 'uniform', uniform)
    world.rates.consumers = lambda queue: {'q': consumers}[queue]
    world.docs['rate:k'] = {'_id': 'rate:k', '_rev': '1-a', 'next': world.now + 5, 'by': 'other'}
    assert world.admit('a', rate=rate) == ([], ['a'])
    assert spans == [pytest.approx(most)]


def test_messages_that_other_consumers_parked(world: World) -> None:
    for parked in (None, 'a concurrency key', 'rate:'):
        world.rates.saw(parked)
    assert world.rates.due({'q': 1}) == float('inf')
    world.rates.saw('rate:q:k')
    assert world.rates.due({'q': 1}) < float('inf')
