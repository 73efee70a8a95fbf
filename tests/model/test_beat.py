"""The protocol of beat: each due date is sent once, whatever happens in whatever order (`tests.model.beat`)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from celery_couchdb.beat import due_dates
from celery_couchdb.beat import scheduler as beat_scheduler
from celery_couchdb.beat.entries import Entry
from celery_couchdb.beat.scheduler import DueTasks
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.leases.leader import LEASE_SECONDS, LeaderLease, LeadLost

from .beat import START, Beat, Clock, Killed, ModelClient, World

BEAT = st.integers(0, 2)

#: At which stop of a beat something happens; 0: nothing.
STOP = st.integers(0, 12)

STEP = st.sampled_from([-86400.0, -3600.0, -60.0, -1.0, 0.0, 1.0, 60.0, 3600.0])


class Beats(RuleBasedStateMachine):
    """Three beats; an entry that nobody edits, one that is edited, and a malformed one."""

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

    @rule(step=STEP)
    def set_server_clock(self, step: float) -> None:
        """The server's clock is set."""
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
            assert (name, date) not in self.seen, f'{name} was sent twice: {date}'
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
        for name in ('kept', 'edited'):
            assert (self.world.docs[f'beat:state:{name}']['due'] or 0) > self.world.now, f'{name} is not sent any more'
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
        return {'type': 'Schedule', 'task': 't', 'schedule': {'every': seconds}, 'start': start, 'missed': 'all'}


def is_on_grid(date: float, seconds: float, start: float) -> bool:
    return date > start and abs((date - start) / seconds - round((date - start) / seconds)) < 0.001


SETTINGS = settings(
    max_examples=300, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
)


def test_explored() -> None:
    run_state_machine_as_test(Beats, settings=SETTINGS)


def clock_that_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the local clock counts until the next response."""
    monkeypatch.setattr(Clock, 'now', lambda self: START + self._world.elapsed + self._offset + self.local_step)


def duty_that_outlives_its_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead is taken up again in the same term, and entries that were taken when it ended are forgotten."""
    send, step = DueTasks._send, LeaderLease.step

    def forgetful(self: Any) -> None:
        try:
            send(self)
        except LeadLost:
            for state in self._states.values():
                if state['due'] is not None and state['due'] <= self._client.clock.now():
                    state['due'] = None

    def again(self: LeaderLease) -> Any:
        before = self._term
        term = step(self)
        if term is not None and before is not None and term is not before:
            before.until, before.rev = term.until, term.rev
            self._term = before
        return self.term

    monkeypatch.setattr(DueTasks, '_send', forgetful)
    monkeypatch.setattr(LeaderLease, 'step', again)


def past_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an edit, the dates begin at the start of the entry."""
    planned = due_dates.planned

    def from_start(entry: Any, state: Any, *args: Any) -> Any:
        fresh = planned(entry, state, *args)
        if fresh is not state and fresh['due'] is not None:
            fresh['due'] = entry.rule.next(fresh['anchor'], fresh['anchor'])
        return fresh

    monkeypatch.setattr(beat_scheduler, 'planned', from_start)


def entry_that_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A malformed entry raises an error."""
    of = Entry.of

    def raising(*args: Any) -> Entry:
        found = of(*args)
        if found.error:
            raise TypeError(found.error)
        return found

    monkeypatch.setattr(Entry, 'of', raising)


def age_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby believes the date of the leader's document."""
    monkeypatch.setattr(
        LeaderLease,
        '_replaceable',
        lambda self, asked: (
            found['_rev']
            if (found := self._client.get_or_none(self._id)) and self._client.clock.now() - found['date'] > 20
            else None
            if found
            else ''
        ),
    )


def ids_that_are_not_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat that repeats what a killed one has sent gives it other ids."""
    create = ModelClient.create_once
    monkeypatch.setattr(
        ModelClient,
        'create_once',
        lambda self, calls: create(self, [call._replace(task_id=str(id(call))) for call in calls]),
    )


def note_before_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The due date is noted before the task is sent."""
    send = DueTasks._send

    class Later:
        """Keeps the calls until they are noted."""

        def __init__(self) -> None:
            self.calls: list[Any] = []

        def send(self, calls: Any, seconds: float) -> list[None]:
            self.calls += calls
            return [None] * len(calls)

    def early(self: Any) -> None:
        messages, self._messages = self._messages, Later()
        later = self._messages
        try:
            send(self)
        finally:
            self._messages = messages
        if later.calls:
            messages.send(later.calls, 1.0)

    monkeypatch.setattr(DueTasks, '_send', early)


@pytest.mark.parametrize(
    'plant',
    [
        clock_that_steps,
        duty_that_outlives_its_lead,
        past_that_comes_back,
        entry_that_stops_the_others,
        age_by_the_clock,
        ids_that_are_not_fixed,
        note_before_the_message,
    ],
)
def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Beats, settings=settings(SETTINGS, phases=[Phase.generate]))
