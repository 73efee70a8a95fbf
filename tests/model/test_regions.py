"""The protocol of regions: each task runs once and ends at home, whatever happens in any order (`.regions`)."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from celery import states
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from celery_couchdb.contrib.regions.home import Home
from celery_couchdb.contrib.regions.lending import Lender
from celery_couchdb.contrib.regions.link import Link
from celery_couchdb.contrib.regions.outcomes import ResultsAtHome
from celery_couchdb.contrib.regions.taker import Taker
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.contrib.regions.region import Giver
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ServerUnavailable

from .exploring import Fault, assert_found, explore, finds_faults
from .regions import LATE, NAMES, Killed, ModelFollower, ModelLeader, ModelMessages, Place, loads_of

REGION, LEADER = st.sampled_from(NAMES), st.integers(0, 1)

#: Two regions: the own one and another one. Most happens between two of them.
PAIR = st.sampled_from(
    [('us', 'eu'), ('eu', 'us')] * 3 + [('us', 'asia'), ('asia', 'us'), ('eu', 'asia'), ('asia', 'eu')]
)

#: At which of its writes a leader is killed or cut off, before or after CouchDB has carried it out; 0: at none.
WHEN = st.sampled_from(range(12))

#: Where the code of the product looks at the clock.
_CLOCKS = [
    'celery_couchdb.contrib.regions.link.time',
    'celery_couchdb.contrib.regions.lending.time',
    'celery_couchdb.contrib.regions.home.time',
    'celery_couchdb.contrib.parcels.inbox.time',
]


class Sent:
    """What was sent, and what has become of it."""

    def __init__(self, home: str, *, may_fail: bool) -> None:
        self.home = home
        #: Whether no region can put it into a queue, or home cannot.
        self.may_fail = may_fail
        #: Whether a worker was killed after the task had run, or its message was deleted by somebody.
        self.is_disturbed = False


class Records(RuleBasedStateMachine):
    """Three regions, with two leaders each."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.now = 1000.0
        self.places = {name: Place(name, SimpleNamespace(now=lambda: self.now)) for name in NAMES}
        self.sent: dict[str, Sent] = {}
        self.runs: Counter[str] = Counter()
        self.patches = ExitStack()
        for name in _CLOCKS:
            self.patches.enter_context(mock.patch(name, SimpleNamespace(monotonic=lambda: self.now)))
        self.patches.enter_context(mock.patch('celery_couchdb.contrib.parcels.inbox.Follower', ModelFollower))
        self.patches.enter_context(mock.patch('celery_couchdb.contrib.regions.link.loads_of', loads_of))
        for module in ('home', 'taker'):
            self.patches.enter_context(
                mock.patch(f'celery_couchdb.contrib.regions.{module}.ParcelMessages', ModelMessages)
            )
        for module in ('home', 'taker', 'outcomes'):
            backend_of = f'celery_couchdb.contrib.regions.{module}.couchdb_backend_of'
            self.patches.enter_context(mock.patch(backend_of, lambda app: app.backend))
        for own in NAMES:
            for other in NAMES:
                for number in range(2) if own != other else ():
                    self.start(own, other, number)

    def start(self, own: str, other: str, number: int) -> None:
        """Start a process that believes that it leads."""
        self.places[own].links[other, number] = ModelLeader(self.places[own], self.places[other])

    def teardown(self) -> None:
        """Check that all tasks end when the faults are over."""
        try:
            self.finish()
        finally:
            self.patches.close()
            logging.disable(logging.NOTSET)

    # -- rules

    @initialize(
        kinds=st.lists(st.sampled_from(['named', 'any', 'home']), min_size=1, max_size=3),
        seconds=st.sampled_from([1.0, 6.0]),
        is_cancelled=st.booleans(),
    )
    def begin(self, kinds: list[str], seconds: float, is_cancelled: bool) -> None:
        """Tasks are sent, and the other region wants some. They may be due to be withdrawn, or be cancelled."""
        self.places['eu'].want(len(kinds))
        for kind in kinds:
            self.send(('us', 'eu'), kind, '', True)
        self.now += seconds
        for doc in self.places['us'].regions.live('p:') if is_cancelled else []:
            self.places['us'].regions.bulk([{**doc, 'cancelled': self.now}])

    @rule(
        pair=PAIR,
        kind=st.sampled_from(['named', 'any', 'fallback', 'home']),
        exchange=st.sampled_from(['', '', LATE]),
        is_valid=st.sampled_from([True, True, True, False]),
    )
    def send(self, pair: tuple[str, str], kind: str, exchange: str, is_valid: bool) -> None:
        """A task is sent. Its fallback is the third region, or home."""
        home, to = pair
        [third] = {*NAMES} - {*pair}
        task_id = f'task{len(self.sent)}'
        fallback = {'fallback': third, 'home': home}.get(kind)
        is_valid = is_valid or kind == 'any'
        to = region.ANY if kind == 'any' else to
        self.places[home].send(task_id, to, fallback=fallback, exchange=exchange, is_valid=is_valid)
        self.sent[task_id] = Sent(home, may_fail=not is_valid or exchange == LATE)

    @rule(pair=PAIR, number=LEADER, when=WHEN, killed=st.booleans())
    def lead(self, pair: tuple[str, str], number: int, when: int, killed: bool) -> None:
        """A leader works, and may be killed or cut off. The other leader of its region may work meanwhile."""
        self.work(*pair, number, when, Killed() if killed else ServerUnavailable('cut'))

    @rule(pair=PAIR, at=st.sampled_from([1, 1, 1, 2, 3, 4, 5, 7]), home_too=st.booleans())
    def pause(self, pair: tuple[str, str], at: int, home_too: bool) -> None:
        """A leader pauses at a write. Meanwhile workers and the other region, or the other leader, work."""
        count, (own, other) = 0, pair

        def pauses() -> None:
            nonlocal count
            count += 1
            if count == at:
                self.hook(lambda: None)
                self.run_one(own)
                self.work(other, own, 0)
                if home_too:
                    self.work(own, other, 1)
                self.hook(pauses)

        self.hook(pauses)
        self.work(own, other, 0, hooked=True)

    def claim(self, name: str) -> None:
        """The worker claims a message."""
        for doc in self.places[name].waiting()[:1]:
            self.places[name].broker.bulk([workitem.claim(doc, 'x', self.now)])

    @rule(name=REGION, what=st.sampled_from(['claim', 'run', 'run', 'killed']))
    def worker(self, name: str, what: str) -> None:
        """The worker claims a message, or runs its task; it may be killed before it acknowledges the message."""
        self.claim(name) if what == 'claim' else self.run_one(name, acknowledge=what == 'run')

    def run_one(self, name: str, *, acknowledge: bool = True) -> None:
        """Let the worker run a task, and store its result."""
        place = self.places[name]
        if not place.claimed():
            self.claim(name)
        for item in place.claimed()[:1]:
            task_id = item['message']['headers']['id']
            if ran := place.end(item, acknowledge=acknowledge):
                self.runs[ran] += 1
            self.sent[task_id].is_disturbed |= not acknowledge

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A program cancels a task that was given away."""
        records = [doc for place in self.places.values() for doc in place.regions.live('p:')]
        if records:
            doc = data.draw(st.sampled_from(records))
            home = self.places[self.sent[doc['id']].home]
            home.regions.bulk([{**doc, 'cancelled': self.now}])

    @rule(name=REGION, what=st.sampled_from(['want', 'expire', 'cut', 'restore', 'bind', 'vacuum']))
    def event(self, name: str, what: str) -> None:
        """A region wants tasks, for example, or nobody reaches it from elsewhere, or a queue is declared there."""
        place = self.places[name]
        if what == 'want':
            place.want(2)
        elif what == 'bind':
            place.is_bound = True
        elif what in ('cut', 'restore'):
            place.is_cut = what == 'cut'
        else:
            self.expire(name) if what == 'expire' else self.vacuum()

    def expire(self, name: str) -> None:
        """A message is deleted in its queue, so that its task never runs."""
        for doc in self.places[name].waiting()[:1]:
            if Giver.of(doc['message']['headers']):  # it came from another region
                self.places[name].broker.bulk([workitem.dropped(doc, self.now)])
                self.sent[doc['message']['headers']['id']].is_disturbed = True

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0, 61.0]))
    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def vacuum(self) -> None:
        """A vacuum purges all old tombstones, but not those of messages whose records exist."""
        for own in NAMES:
            for other, number in [*self.places[own].links]:
                self.work(own, other, number)
        self.now += 301
        for name, place in self.places.items():
            kept = {
                parcel.moved_id(region.SOURCE, doc['_id'])
                for home in NAMES
                for doc in self.places[home].regions.live('p:' if home == name else region.records_to(name))
            }
            place.broker.purge(kept, self.now - 300)
            place.regions.purge(set(), self.now - 300)

    # -- promises

    @invariant()
    def at_every_moment(self) -> None:
        """Check that no task ran twice or in vain, and that each can be seen at home."""
        for task_id, sent in self.sent.items():
            home, result = self.places[sent.home], self.result_of(task_id)
            assert self.runs[task_id] <= 1 or sent.is_disturbed, f'{task_id} ran twice'
            assert result != states.REVOKED or not self.runs[task_id] or sent.is_disturbed, f'{task_id} ran in vain'
            docs = [*home.regions.live('p:'), *home.broker.live()]
            is_visible = any(doc['message']['headers']['id'] == task_id for doc in docs if 'message' in doc)
            assert is_visible or result, f'{task_id} is lost'

    def result_of(self, task_id: str) -> str | None:
        """Return the state of the result of a task at home."""
        home = self.places[self.sent[task_id].home]
        found = home.results.docs.get(home.backend.get_key_for_task(task_id))
        return found['status'] if found else None

    def finish(self) -> None:
        """Let all work be done without faults."""
        for place in self.places.values():
            place.is_cut, place.is_bound = False, True
        for _ in range(2 * len(self.sent) + 16):
            self.now += 61
            self.work_all()
            self.at_every_moment()
        for task_id, sent in self.sent.items():
            result = self.result_of(task_id)
            assert result in states.READY_STATES, f'{task_id} has not ended'
            assert result != states.FAILURE or sent.may_fail, f'{task_id} has failed'
            assert (result == states.SUCCESS) == (self.runs[task_id] > 0) or sent.is_disturbed, f'{task_id}: {result}'
        for place in self.places.values():
            refused = [doc for doc in place.regions.live('p:') if region.state_of(doc) == 'refused']
            left = [doc for doc in place.regions.live() if doc['type'] != 'Region' and doc not in refused]
            assert place.broker.live() == [] == left, 'something is left'
        before = [dict(base.changed) for place in self.places.values() for base in place.databases]
        self.work_all()
        assert before == [base.changed for place in self.places.values() for base in place.databases], 'no rest'

    def work_all(self) -> None:
        for own in NAMES:
            for other, number in [*self.places[own].links]:
                self.work(own, other, number)
                self.run_one(own)

    def work(
        self, own: str, other: str, number: int, when: int = 0, error: BaseException | None = None, hooked: bool = False
    ) -> None:
        """Let a leader do all that is due; it fails at the write `when`."""
        count = 0

        def writes() -> None:
            nonlocal count
            count += 1
            if count == when and error:
                raise error

        if not hooked:
            self.hook(writes)
        link = self.places[own].links[other, number]
        try:
            for _ in range(10):
                if link.step() > 0:
                    break
        except Killed:
            self.start(own, other, number)
        except ServerUnavailable:
            pass
        finally:
            self.hook(lambda: None)

    def hook(self, on_write: Any) -> None:
        for place in self.places.values():
            for database in place.databases:
                database.on_write = on_write


@pytest.mark.slow
def test_each_task_runs_once_and_ends_at_home_in_any_order_of_events() -> None:
    explore(Records, 80, steps=40)


FAULTS = [
    Fault(
        'a region takes tasks without saying so first',
        Records,
        Taker,
        '_claimed',
        "if region.state_of(doc) == 'there'",
        '',
    ),
    Fault('home does not look whether it was faster', Records, Home, '_withdrawn', 'if result.is_proven else None', ''),
    Fault('cancelled tasks are taken', Records, region, 'is_takeable', " and 'cancelled' not in doc", ''),
    Fault('results do not return', Records, ResultsAtHome, 'take', 'self.store(list(best.values()))', '{}'),
    Fault(
        'a cancelled record is deleted before its result is stored',
        Records,
        Home,
        '_end',
        "is_stored = self._results.store_outcome(doc, states.REVOKED, 'it was cancelled')",
        'delete_current(self._own, [doc]); '
        "is_stored = self._results.store_outcome(doc, states.REVOKED, 'it was cancelled')",
    ),
    Fault('nobody looks for messages that ended alone', Records, Taker, '_look_up', 'if end]', 'if False]'),
    Fault(
        'a leader that was cut off does not read again',
        Records,
        Link,
        'work',
        'self._arriving.repeat()',
        'pass',
    ),
    Fault('home tries for ever what it cannot publish', Records, region, 'decide', ' and run_in is None', ''),
    Fault('items are lent over a claim', Records, Lender, '_lend', 'if result.is_proven', 'if True'),
    Fault('nobody finishes what a killed leader lends', Records, Lender, '_finish', 'found += rivals', 'pass'),
]


@finds_faults
@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(fault, monkeypatch, 1000, steps=40)
