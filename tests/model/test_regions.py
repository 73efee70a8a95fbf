"""The protocol of parcels: each task runs once, whatever happens in whatever order (`tests.model.regions`)."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from celery_couchdb.regions.lending import Lender
from kombu_couchdb.documents import workitem

from .exploring import Fault, assert_found, explore, finds_faults
from .regions import Crash, Place, other

REGION, FERRY = st.sampled_from(['us', 'eu']), st.integers(0, 1)

#: At which request a ferry crashes, before or after CouchDB has carried it out; 0: not at all.
CRASH = st.integers(0, 10)


class Parcels(RuleBasedStateMachine):
    """Two regions, two ferries in each."""

    fallbacks = False

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.now = 100.0
        self.clock = SimpleNamespace(now=lambda: self.now)
        self.places = {name: Place(name, self.clock) for name in ('us', 'eu')}
        self.sent: list[str] = []
        self.runs: Counter[str] = Counter()

    def teardown(self) -> None:
        """Check that all tasks run when the faults are over."""
        try:
            self.finish()
        finally:
            logging.disable(logging.NOTSET)

    # -- rules

    @initialize(tasks=st.lists(st.sampled_from(['any', 'eu']), min_size=2, max_size=4))
    def begin(self, tasks: list[str]) -> None:
        """Tasks wait in one region, and the other one wants some."""
        for to in tasks:
            self.send('us', to)
        self.want('eu', len(tasks))

    @rule(home=REGION, to=st.sampled_from(['any', 'us', 'eu']))
    def send(self, home: str, to: str) -> None:
        """A task is sent."""
        self.sent.append(f'task{len(self.sent)}')
        self.places[home].send(self.sent[-1], to, self.now + 5 if self.fallbacks else None)

    @rule(name=REGION, count=st.integers(0, 4))
    def want(self, name: str, count: int) -> None:
        """A region says how many tasks it wants, and the other one learns of it."""
        self.places[name].want(count)
        self.places[other(name)].pull(self.places[name])

    @rule(to=REGION)
    def replicate(self, to: str) -> None:
        """A region pulls from the other one: late, again, or never."""
        self.places[to].pull(self.places[other(to)])

    @rule(name=REGION, number=FERRY, what=st.sampled_from(['arrive', 'lend', 'fall_back']), crash=CRASH)
    def ferry(self, name: str, number: int, what: str, crash: int) -> None:
        """A ferry works, and may be killed at any request. The other ferry of its region may work meanwhile."""
        self.work(name, number, what, crash, killed=True)

    @rule(name=REGION, what=st.sampled_from(['arrive', 'lend']), at=st.integers(1, 9), busy=st.booleans())
    def pause(self, name: str, what: str, at: int, busy: bool) -> None:
        """A ferry pauses at a request. Meanwhile consumers work; if `busy`, ferries and the replication, too."""
        place, count = self.places[name], 0

        def pauses() -> None:
            nonlocal count
            count += 1
            if count == at:
                self.hook(place, lambda: None)
                self.claim(name)
                if busy:
                    self.work(name, 1, what, 0)
                    self.places[other(name)].pull(place)
                    self.work(other(name), 0, 'arrive', 0)
                    self.run_one(other(name))
                    place.pull(self.places[other(name)])
                self.hook(place, pauses)

        self.hook(place, pauses)
        getattr(place.ferries[0], what)()
        self.hook(place, lambda: None)

    @rule(name=REGION)
    def claim(self, name: str) -> None:
        """A consumer claims a message."""
        for doc in self.waiting(name)[:1]:
            self.places[name].broker.bulk([workitem.claim(doc, 'x', self.now)])

    @rule(name=REGION)
    def run_one(self, name: str) -> None:
        """A consumer claims a message, if none is claimed, runs its task, and acknowledges it."""
        broker = self.places[name].broker
        claimed = [doc for doc in broker.live() if workitem.claimant(doc)]
        for doc in (claimed or self.waiting(name))[:1]:
            self.runs[doc['message']['headers']['id']] += 1
            broker.bulk([workitem.deleted(doc)])

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    # -- promises

    @invariant()
    def at_every_moment(self) -> None:
        """Check that no task ran twice, and that none is lost."""
        if not self.fallbacks:
            assert all(count == 1 for count in self.runs.values()), f'ran twice: {self.runs}'
        here = {
            doc['message']['headers']['id']
            for place in self.places.values()
            for database in (place.broker, place.regions)
            for doc in database.live()
            if 'message' in doc
        }
        assert {*self.sent} <= here | {*self.runs}, 'a task is lost'

    def finish(self) -> None:
        """Let all work be done without faults."""
        for name, place in self.places.items():
            place.restart(0)
            self.hook(self.places[name], lambda: None)
        for _ in range(2 * len(self.sent) + 6):
            for name in self.places:
                for what in ('arrive', 'lend', 'fall_back'):
                    self.work(name, 0, what, 0)
                self.run_one(name)
                self.replicate(name)
            self.at_every_moment()
        assert {*self.runs} == {*self.sent}, 'a task did not run'
        for place in self.places.values():
            assert place.broker.live() == [] == place.regions.live('p:*'), 'something is left'

    def waiting(self, name: str) -> list[Any]:
        return [
            doc for doc in self.places[name].broker.live() if doc['type'] == 'WorkItem' and workitem.is_waiting(doc)
        ]

    def work(self, name: str, number: int, what: str, crash: int, *, killed: bool = False) -> None:
        """Let a ferry do something; it crashes at the request `crash`."""
        place, count = self.places[name], 0

        def requests() -> None:
            nonlocal count
            count += 1
            if count == crash:
                raise Crash('killed')

        self.hook(place, requests)
        try:
            getattr(place.ferries[number], what)()
        except Crash:
            if killed:
                place.restart(number)
        finally:
            self.hook(place, lambda: None)

    @staticmethod
    def hook(place: Place, on_request: Any) -> None:
        for database in (place.broker, place.regions):
            database.on_request = on_request


class WithFallbacks(Parcels):
    """Each task for the other region has a fallback. It may run twice, but is never lost."""

    fallbacks = True


@pytest.mark.slow
@pytest.mark.parametrize(('machine', 'examples'), [(Parcels, 80), (WithFallbacks, 30)])
def test_each_task_runs_in_any_order_of_events(machine: Any, examples: int) -> None:
    explore(machine, examples, steps=40)


FAULTS = [
    Fault(
        'items are deleted without being marked as lent: a consumer may claim one meanwhile',
        Parcels,
        Lender,
        '_move',
        'now = self._broker.clock.now()',
        'return self._send(prepared)',
    ),
    Fault('nobody finishes what a killed ferry has begun', Parcels, Lender, '_finish', 'if not rows:', 'if True:'),
]


@finds_faults
@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(fault, monkeypatch, 300, steps=40)
