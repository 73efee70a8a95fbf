"""The protocol of beat: each due date is sent once, whatever happens in whatever order (`tests.model.beat`)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from celery_couchdb.contrib.beat import scheduler as beat_scheduler
from celery_couchdb.contrib.beat.entries import Entry, deleted_state
from celery_couchdb.contrib.beat.scheduler import DueTasks
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.leases.leader import LEASE_SECONDS, LeaderLease

from .beat import START, Beat, Clock, Killed, World
from .exploring import Fault, assert_found, explore, finds_faults

BEAT = st.integers(0, 2)

#: At which stop of a beat something happens; 0: nothing.
STOP = st.integers(0, 12)

STEP = st.sampled_from([-86400.0, -3600.0, -60.0, -1.0, 0.0, 1.0, 60.0, 3600.0])


class Beats(RuleBasedStateMachine):
    """Three beats; an entry that nobody edits, one that is edited, one that is deleted, and a malformed one."""

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.world = World()
        self.place = self.world.in_place()
        self.place.__enter__()
        self.app = Celery('model', broker='couchdb://model/celery', set_as_current=False)
        self.app.conf.result_expires = None
        self.world.beats = [Beat(self.world, self.app) for _ in range(3)]
        #: The versions of the entry that is edited: its interval, its start, and the server's time of the edit.
        self.versions: list[tuple[float, float, float]] = []
        #: What was sent and checked.
        self.checked, self.seen = 0, set[tuple[str, float]]()
        #: Whether the server's clock was set back.
        self.set_back = False

    def teardown(self) -> None:
        """Check that everything is sent when the faults are over."""
        try:
            self.finish()
        finally:
            self.place.__exit__(None, None, None)
            logging.disable(logging.NOTSET)

    # -- rules

    @initialize()
    def begin(self) -> None:
        """Entries are added."""
        for name, seconds in (('kept', 7), ('edited', 5)):
            self.world.put(name, self.entry(seconds, START))
        self.versions.append((5, START, START))
        self.world.put('deleted', self.entry(4, START - 60))
        self.world.put('malformed', {**self.entry(5, START), 'start': ''})

    @rule(
        number=BEAT,
        at=STOP,
        what=st.sampled_from(['killed', 'cut']),
        sees=st.booleans(),
        seconds=st.sampled_from([0.0, 4.0, 8.0]),
    )
    def tick(self, number: int, at: int, what: str, sees: bool, seconds: float) -> None:
        """After some seconds a beat works, and may be killed or lose its connection before or after any request."""
        self.world.elapsed += seconds

        def strike() -> None:
            raise Killed if what == 'killed' else ServerUnavailable('cut')

        self.work(number, at, strike, sees)

    @rule(number=BEAT, at=st.integers(1, 12), seconds=st.sampled_from([3.0, 16.0, 31.0]), busy=st.booleans())
    def pause(self, number: int, at: int, seconds: float, busy: bool) -> None:
        """A beat is paused, or computes for long. If `busy`, others work meanwhile, and somebody edits an entry."""

        def meanwhile() -> None:
            self.world.elapsed += seconds
            if not busy:
                return
            self.edit(8, False)
            self.world.beats[number].is_running = False
            for other in {0, 1, 2} - {number}:
                for _ in range(3):
                    self.world.beats[other].tick()
            self.world.beats[number].is_running = True

        self.work(number, at, meanwhile, True)

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 20.0, 70.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        """Time passes, and no beat works meanwhile."""
        self.world.elapsed += seconds

    @rule(count=st.integers(1, 4))
    def all_work(self, count: int) -> None:
        """All beats work for some seconds."""
        for _ in range(count):
            self.world.elapsed += 2.0
            for beat in self.world.beats:
                beat.tick()

    @rule(seconds=st.sampled_from([3, 5, 8]), by_command=st.booleans())
    def edit(self, seconds: int, by_command: bool) -> None:
        """The schedule of an entry is edited. The command sets its start, another program leaves it."""
        start = round(self.world.now, 3) if by_command else self.versions[-1][1]
        # Beats know nothing of a version that none has read: then the edit counts that came before.
        state, doc = (self.world.docs.get(f'beat:{kind}:edited') for kind in ('state', 'entry'))
        is_known = state is not None and state['plan'] == Entry.of('edited', doc or {}, self.app).plan
        self.versions.append((seconds, start, self.world.now if is_known else min(start, self.versions[-1][2])))
        self.world.put('edited', self.entry(seconds, start))

    @rule()
    def disable(self) -> None:
        """An entry is disabled, and enabled some seconds later by a program that leaves its start as it is."""
        seconds, start, _ = self.versions[-1]
        self.world.put('edited', {**self.entry(seconds, start), 'enabled': False})
        self.all_work(2)
        self.edit(int(seconds), False)

    @rule(number=BEAT, at=STOP, what=st.sampled_from(['state', 'entry', 'both', 'by command']))
    def delete(self, number: int, at: int, what: str) -> None:
        """At any moment of a beat's work, somebody deletes the state of an entry, or the entry and writes it again."""

        def strike() -> None:
            entry, state = (self.world.docs.get(f'beat:{kind}:deleted') for kind in ('entry', 'state'))
            if state is not None and what != 'entry':
                self.world.delete(state['_id'], deleted_state(state, self.world.now) if what == 'by command' else None)
            if entry is not None and what != 'state':
                self.world.delete(entry['_id'])
                self.world.put('deleted', {name: value for name, value in entry.items() if name != '_rev'})

        self.work(number, at, strike, True)

    @rule(step=STEP)
    def set_server_clock(self, step: float) -> None:
        """The server's clock is set."""
        self.set_back = self.set_back or step < self.world.server_step
        self.world.server_step = step
        self.world.latest = max(self.world.latest, self.world.now)
        # What was in the past of an edit may now be in its future.
        self.versions = [(seconds, start, min(edited, self.world.now)) for seconds, start, edited in self.versions]

    @rule(number=BEAT, step=STEP)
    def set_clock(self, number: int, step: float) -> None:
        """The clock of a machine is set."""
        self.world.beats[number].client.clock.local_step = step

    # -- promises

    @invariant()
    def at_every_moment(self) -> None:
        """Check that nothing was sent twice, that nothing of the past was, and that at most one beat leads."""
        assert len(self.world.leaders()) <= 1, 'two beats lead'
        new, self.checked = self.world.sent[self.checked :], len(self.world.sent)
        for name, date in new:
            # Only a state knows what was sent before the server's clock was set back.
            is_known = name != 'deleted' or not self.set_back
            assert not is_known or (name, date) not in self.seen, f'{name} was sent twice: {date}'
            self.seen.add((name, date))
            if name == 'edited':
                assert any(
                    is_on_grid(date, seconds, start) and (edited <= start or date > edited - LEASE_SECONDS)
                    for seconds, start, edited in self.versions
                ), f'{date} is in the past of each edit'

    def finish(self) -> None:
        """End all faults, and let the beats work."""
        self.all_work(20)
        for _ in range(20):
            for beat in self.world.beats:
                beat.tick()
        self.at_every_moment()
        state = self.world.docs['beat:state:kept']
        last = round((state['last'] - START) / 7) if state['last'] else 0
        dates = {date for name, date in self.world.sent if name == 'kept'}
        # One may have been sent by a beat that was killed before it noted that, before the server's clock was set back.
        assert dates >= {START + 7.0 * count for count in range(1, last + 1)}, 'a due date is missing'
        assert all(is_on_grid(date, 7, START) for date in dates)
        for name in ('kept', 'edited', 'deleted'):
            [leader] = self.world.leaders()  # it writes a deleted state again when it is due
            assert (leader.duty._states[name]['due'] or 0) > self.world.now, f'{name} is not sent any more'
        assert self.world.docs['beat:state:malformed']['error'], 'the malformed entry was not noticed'

    def work(self, number: int, at: int, strike: Any, sees: bool) -> None:
        """Let a beat do one step; at its stop number `at`, something happens."""
        count = 0

        def stop(beat: Beat) -> None:
            nonlocal count
            if beat is self.world.beats[number]:
                count += 1
                if count == at:
                    self.world.on_stop = lambda beat: None
                    strike()

        self.world.on_stop = stop
        try:
            self.world.beats[number].tick(sees)
        finally:
            self.world.on_stop = lambda beat: None

    @staticmethod
    def entry(seconds: int | float, start: float) -> dict[str, Any]:
        return {'type': 'Schedule', 'task': 't', 'schedule': {'every': seconds}, 'start': start, 'grace': 1e9}


def is_on_grid(date: float, seconds: float, start: float) -> bool:
    return date > start and abs((date - start) / seconds - round((date - start) / seconds)) < 0.001


@pytest.mark.slow
def test_each_due_date_is_sent_once_in_any_order_of_events() -> None:
    explore(Beats, 100, steps=30)


FAULTS = [
    Fault(
        'a step of the local clock counts', Beats, Clock, 'now', '+ self._offset', '+ self._offset + self.local_step'
    ),
    Fault(
        'after an edit, the dates begin at the start of the entry',
        Beats,
        beat_scheduler,
        'planned',
        "_next(entry, anchor, max(after, fresh['last'] or 0.0))",
        '_next(entry, anchor, anchor)',
    ),
    Fault(
        'an entry that was written anew has due dates in the past',
        Beats,
        beat_scheduler,
        'planned',
        'anchor if anchor >= earliest else now',
        'anchor',
    ),
    Fault('a malformed entry raises an error', Beats, Entry, 'of', 'return cls(name, doc, error_of(exc))', 'raise'),
    Fault(
        "a standby believes the date of the leader's document",
        Beats,
        LeaderLease,
        '_replaceable',
        'asked - self._seen_since >= self._lease',
        "self._client.clock.now() - found['date'] > 20",
    ),
    Fault('the ids of tasks are not fixed', Beats, beat_scheduler, 'task_id_of', '{due:.3f}', '{due:.3f} {id(state)}'),
    Fault(
        'the due date is noted before the task is sent',
        Beats,
        DueTasks,
        '_send',
        'results = iter(',
        'self._store({n: noted(self._states[n], d, {}, now) for n, d in decisions.items()}); results = iter(',
    ),
]


@finds_faults
@pytest.mark.parametrize('fault', FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(fault, monkeypatch, 300, steps=30)
