"""Due dates that are sent, left out and stored, after interruptions of any length."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, schedstate, schedule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_couchdb.contrib.beat.due_dates import Decision, decide, done_since, noted, planned, upcoming
from celery_couchdb.contrib.beat.entries import (
    MALFORMED,
    CodeEntry,
    Entry,
    ScheduleState,
    deleted_state,
    new_state,
    state_of,
    tells_dates,
)
from celery_couchdb.contrib.beat.schedules import Asked

from .conftest import STATE, Make


def state(**members: Any) -> ScheduleState:
    return {**STATE, 'anchor': 1000.0, **members}  # type: ignore[typeddict-item]


def run(entry: Entry, known: ScheduleState, now: float, limit: int = 500) -> tuple[list[float], ScheduleState]:
    """Decide until nothing is due any more; return what was sent, and the last state."""
    sent: list[float] = []
    while known['due'] is not None and known['due'] <= now:
        decision = decide(entry, known, now, limit)
        assert len(decision.send) <= limit
        sent += decision.send
        known = noted(known, decision, {}, now)
    return sent, known


def test_new_entry_is_due_after_its_first_interval(entry: Make) -> None:
    fresh = planned(entry(), None, STATE, 1000.0)
    assert (fresh['anchor'], fresh['due'], fresh['_id']) == (1000.0, 1010.0, 'beat:state:x')
    assert state_of(dict(fresh)) == fresh
    assert planned(entry(schedule={'at': 2000}), None, STATE, 3000.0)['due'] is None  # it was over by then


def test_enabling_sends_nothing_for_the_past(entry: Make) -> None:
    before = planned(entry(), None, STATE, 1000.0)
    disabled = planned(entry(enabled=False), before, STATE, 1020.0)
    assert disabled['due'] is None
    assert planned(entry(), disabled, STATE, 9000.0)['due'] == 9010.0
    # The same if no leader was there meanwhile: `start` tells that it was enabled anew.
    assert planned(entry(start=9000), before, STATE, 9500.0)['due'] == 9010.0


@pytest.mark.parametrize('change', [{'enabled': False}, {'missed': 'never'}], ids=['disabled', 'malformed'])
def test_entry_that_goes_on_sends_nothing_for_the_past(entry: Make, change: dict[str, Any]) -> None:
    """An edit by another program keeps `start`. After a vacuum, CouchDB does not know the ids of sent tasks."""
    for rule, following in (({'every': 10}, 1060.0), ({'at': 1020.0}, None)):
        known = planned(entry(schedule=rule, start=1000), None, STATE, 1000.0)
        sent, known = run(entry(schedule=rule, start=1000), known, 1020.0)
        assert sent[-1] == 1020.0
        stopped = planned(entry(schedule=rule, start=1000, **change), known, STATE, 1025.0)
        assert stopped['due'] is None
        assert planned(entry(schedule=rule, start=1000), stopped, STATE, 1056.0)['due'] == following


def test_edit_of_the_schedule_alone_sends_nothing_for_the_past(entry: Make) -> None:
    """A program that is not ours has edited the schedule, and `start` is as it was."""
    day = 1_763_683_200.0  # midnight, UTC
    nightly = {'crontab': '0 3 * * *', 'timezone': 'UTC'}
    known = planned(entry(schedule=nightly, start=day - 86400), None, STATE, day - 86400)
    _, known = run(entry(schedule=nightly, start=day - 86400), known, day + 3 * 3600)
    assert known['last'] == day + 3 * 3600
    edited = entry(schedule={'crontab': '0 3,15 * * *', 'timezone': 'UTC'}, start=day - 86400)
    assert planned(edited, known, STATE, day + 10 * 3600)['due'] == day + 15 * 3600


def test_edit_of_the_start_alone_sends_nothing_for_the_past_or_twice(entry: Make) -> None:
    known = planned(entry(start=1000), None, STATE, 1000.0)
    _, known = run(entry(start=1000), known, 1055.0)
    for start in (0, 500, 999.5):  # back
        assert planned(entry(start=start), known, STATE, 2003.0)['due'] > 2003.0  # type: ignore[operator]
    # To a later date, also in the past: the leader has just been told, or no beat has run since.
    assert planned(entry(start=1500), known, STATE, 2003.0, 1988.0)['due'] == 1990.0
    assert planned(entry(start=1500), known, STATE, 2003.0)['due'] == 1510.0
    assert planned(entry(start=1040), known, STATE, 2003.0)['due'] == 1060.0  # 1050 was sent


def test_added_entry_has_no_due_date_in_the_past(entry: Make) -> None:
    """A leader was told of it at 2003, so that it was written after 1988, whatever its start is."""
    for start, due in ((500, 2010.0), (1980, 2010.0), (1988, 1998.0), (1999.5, 2009.5), (2100, 2110.0)):
        assert planned(entry(start=start), None, STATE, 2003.0, 1988.0)['due'] == due
    # No beat has run since it was added.
    assert planned(entry(start=1500), None, STATE, 2003.0)['due'] == 1510.0


def test_state_that_was_deleted_tells_what_was_sent(entry: Make) -> None:
    _, known = run(entry(start=1000), planned(entry(start=1000), None, STATE, 1000.0), 1055.0)
    left = deleted_state({**known, '_rev': '7-a'}, 1058.0)
    assert (state_of(left), tells_dates(left), tells_dates(None)) == (None, True, True)
    anew = new_state('beat:state:x', left)
    assert (anew['key'], anew['last'], anew['count'], anew.get('_rev')) == (known['key'], None, 0, None)
    assert planned(entry(start=1000), None, anew, 1065.0)['due'] == 1060.0
    assert planned(entry(schedule={'every': 1}, start=1000), None, anew, 1065.0)['due'] == 1059.0
    # It was deleted before a date that was due had been sent.
    late = new_state('beat:state:x', deleted_state({**known, '_rev': '7-a'}, 1075.0))
    assert planned(entry(start=1000), None, late, 1076.0)['due'] == 1060.0
    for foreign in ({'_id': 'x', '_rev': '7-a', '_deleted': True}, {**left, 'key': 5}, {**left, 'until': 'x'}):
        assert not tells_dates(foreign)
        assert planned(entry(start=1000), None, new_state('i', foreign), 2003.0, 1988.0)['due'] == 2010.0


def test_new_time_zone_of_the_app_counts_at_once(app: Celery, entry: Make) -> None:
    schedule = {'crontab': '0 9 * * *'}
    now = datetime(2025, 11, 21, 12, tzinfo=ZoneInfo('UTC')).timestamp()
    berlin = planned(entry(schedule=schedule, start=now - 5), None, STATE, now)
    app.conf.timezone = 'Asia/Tokyo'
    app.__dict__.pop('timezone', None)
    tokyo = planned(entry(schedule=schedule, start=now - 5), berlin, STATE, now + 1)
    assert berlin['due'] == datetime(2025, 11, 22, 8, tzinfo=ZoneInfo('UTC')).timestamp()
    assert tokyo['due'] == datetime(2025, 11, 22, 0, tzinfo=ZoneInfo('UTC')).timestamp()
    assert planned(entry(schedule={'every': 5}, start=now), None, STATE, now)['plan'] != tokyo['plan']


def test_short_interruption_changes_nothing(entry: Make) -> None:
    sent, left = run(entry(missed='skip'), state(due=1010.0), 1069.0)
    assert sent == [1010.0, 1020.0, 1030.0, 1040.0, 1050.0, 1060.0]
    assert (left['due'], left['count'], left['skipped'], left['last']) == (1070.0, 6, 0, 1060.0)


@pytest.mark.parametrize('more', [{'missed': 'once'}, {'missed': 'skip'}, {'grace': 3600}])
def test_interruption_of_an_hour(entry: Make, more: dict[str, Any]) -> None:
    """The latest date is only seconds old, so that it is sent even with `skip`."""
    sent, left = run(entry(**more), state(due=1010.0), 4605.0, limit=100)
    assert sent == ([1000.0 + 10 * count for count in range(1, 361)] if 'grace' in more else [4600.0])
    assert left['due'] == 4610.0
    assert left['count'] + left['skipped'] == 360


def test_grace_decides_what_was_missed(entry: Make) -> None:
    daily = {'missed': 'skip', 'schedule': {'every': 86400}}
    assert run(entry(**daily, grace=3600), state(due=87400.0), 91000.0)[0] == [87400.0]
    assert run(entry(**daily, grace=3599), state(due=87400.0), 91000.0)[0] == []
    assert run(entry(schedule={'at': 2000}, missed='skip'), state(due=2000.0), 90000.0)[0] == []
    assert run(entry(schedule={'at': 2000}), state(due=2000.0), 90000.0)[0] == [2000.0]
    # Beat itself is late by some seconds while much is due.
    assert run(entry(**daily, grace=0), state(due=87400.0), 87409.9)[0] == [87400.0]
    assert run(entry(**daily, grace=0), state(due=87400.0), 87411.0)[0] == []


@pytest.mark.parametrize(
    ('ends', 'expected'),
    [
        ({'until': 1040}, [1010.0, 1020.0, 1030.0, 1040.0]),
        ({'until': 1039.9}, [1010.0, 1020.0, 1030.0]),
        ({'times': 2}, [1010.0, 1020.0]),
        ({'times': 9, 'until': 1015}, [1010.0]),
    ],
)
def test_entry_ends(entry: Make, ends: dict[str, Any], expected: list[float]) -> None:
    ending = entry(start=1000, **ends)
    fresh = planned(ending, None, STATE, 1000.0)
    assert upcoming(ending, None, 1000.0, 9) == expected
    for limit in (1, 3):
        known, sent = fresh, list[float]()
        for now in (1012.0, 1065.0, 1095.0):
            more, known = run(ending, known, now, limit)
            sent += more
            assert upcoming(ending, known, now, 20)[:1] == [date for date in expected if date > now][:1]
        assert sent == expected
        assert known['due'] is None
        assert done_since(ending, known) == max(known['sent'] or 0.0, ends.get('until', 0.0))
    # Of the missed dates the latest one before the end is sent.
    late = run(entry(start=1000, grace=0, **ends), fresh, 5000.0)[0]
    assert late[:1] == (expected[-1:] if 'until' in ends else [5000.0])


def test_end_that_is_set_later_counts_what_was_sent(entry: Make) -> None:
    _, known = run(entry(start=1000), planned(entry(start=1000), None, STATE, 1000.0), 1055.0)
    for times, due in ((5, None), (4, None), (6, 1060.0)):
        assert planned(entry(start=1000, times=times), known, STATE, 1056.0)['due'] == due


def test_entry_that_is_done(entry: Make) -> None:
    """Not one that is disabled, or has not been read since an edit; of a skipped date the date itself counts."""
    once = entry(schedule={'at': 2000.0}, start=1000, missed='skip')
    fresh = planned(once, None, STATE, 1000.0)
    assert done_since(once, fresh) is None
    _, known = run(once, fresh, 9000.0)
    assert (known['sent'], done_since(once, known)) == (None, 2000.0)
    assert done_since(entry(schedule={'at': 2000.0}, start=1001, missed='skip'), known) is None
    off = entry(schedule={'at': 2000.0}, start=1000, enabled=False)
    assert done_since(off, planned(off, known, STATE, 9000.0)) is None


ZONES = ['Europe/Berlin', 'America/New_York', 'Australia/Lord_Howe', 'Asia/Beirut', 'UTC']


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schedule=st.one_of(
        st.builds(
            lambda minute, hour, zone: {'crontab': f'{minute} {hour} * * *', 'timezone': zone},
            st.sampled_from(['0', '30', '*/20']),
            st.sampled_from(['*', '2', '0,1,2,3', '*/5', '23']),
            st.sampled_from(ZONES),
        ),
        st.builds(lambda seconds: {'every': seconds}, st.floats(300, 90_000)),
        st.builds(
            lambda seconds: {'every': seconds, 'relative': True},
            st.sampled_from([60, 90, 600, 3600, 5400, 7200, 86400, 100_000, 172_800]),
        ),
    ),
    start=st.integers(1_740_000_000, 1_770_000_000),
    days=st.integers(0, 3),
    seconds=st.integers(0, 86_400),
)
def test_computed_dates_are_those_that_steps_would_find(
    entry: Make, schedule: dict[str, Any], start: int, days: int, seconds: int
) -> None:
    rule: Any = entry(schedule=schedule).rule
    now, due = start + days * 86400.0 + seconds, rule.next(start, start)
    dates = [due]
    while (following := rule.next(start, dates[-1])) <= now:
        dates.append(following)
    if due + 11 < now:
        decision = decide(entry(schedule=schedule, grace=0), state(due=due, anchor=float(start)), now, 500)
        assert decision == (
            Decision([], len(dates) - 1, dates[-1]) if len(dates) > 1 else Decision(dates, 0, following)
        )


CODE: dict[str, Any] = {'type': 'Schedule', 'task': 't', 'schedule': {'code': 'x.Hourly'}}


class Hourly(BaseSchedule):
    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        return True, 3600


class Broken(BaseSchedule):
    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        raise LookupError('no table')


def in_code(app: Celery, schedule: Any, **members: Any) -> Entry:
    return Entry.of('x', {**CODE, **members}, app, CodeEntry('x', rule=Asked(schedule, app)))


def test_class_of_the_app_is_late(app: Celery) -> None:
    """What it would have answered meanwhile is not known: only the stored date is missed."""
    for missed, expected in (('once', [4600.0]), ('skip', [])):
        sent, left = run(in_code(app, Hourly(app=app), missed=missed), state(due=4600.0), 1e6)
        assert (sent, left['due'], left['skipped']) == (expected, 1e6 + 3600, 1 - len(expected))


@pytest.mark.parametrize('kind', [Broken, BaseSchedule])
def test_class_that_raises_an_error_makes_its_entry_malformed(app: Celery, kind: Any) -> None:
    broken = in_code(app, kind(app=app))
    decision = decide(broken, state(due=4600.0), 4700.0, 500)
    assert decision[:3] == ([], 0, None)
    noticed = noted(state(due=4600.0), decision, {}, 4700.0)
    assert noticed['plan'] == MALFORMED
    assert 'its next due date cannot be computed' in str(noticed['error'])
    assert upcoming(broken, noticed, 1000.0, 3) == []
    # The next leader tries again.
    assert planned(in_code(app, Hourly(app=app)), noticed, STATE, 5000.0)['due'] == 5001.0


class Weekdays(schedule):
    """A class with an `is_due` of its own, the usual way in Celery."""

    asked: list[datetime]

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        self.asked.append(last_run_at)
        self.times.append(self.now())
        return self.answer

    times: list[datetime]
    answer: Any = (False, 5)


@pytest.fixture
def weekdays(app: Celery) -> Weekdays:
    found = Weekdays(30, app=app)
    found.asked, found.times = [], []
    return found


def test_class_with_is_due_of_its_own_is_asked(app: Celery, weekdays: Weekdays) -> None:
    asks = in_code(app, weekdays)
    fresh = planned(asks, None, STATE, 1000.0)
    assert fresh['due'] == 1001.0
    assert decide(asks, fresh, 1001.5, 500) == Decision([], 0, 1006.0)  # not due; asked again in 5 seconds
    weekdays.answer = schedstate(True, 30)
    assert decide(asks, {**fresh, 'due': 1006.5, 'last': 900.0}, 1007.0, 500) == Decision([1006.5], 0, 1036.5)
    berlin = ZoneInfo('Europe/Berlin')
    assert weekdays.asked == [datetime.fromtimestamp(date, berlin) for date in (1000, 900)]
    assert weekdays.times == [datetime.fromtimestamp(date, berlin) for date in (1001, 1006.5)]
    assert all(date.utcoffset() == timedelta(hours=1) for date in weekdays.asked + weekdays.times)
    assert upcoming(asks, {**fresh, 'due': 1037.0, 'plan': asks.plan}, 1000.0, 3) == [1037.0]


@pytest.mark.parametrize('answer', [None, (True,), (True, 'soon'), (True, float('nan')), 5])
def test_class_that_answers_nonsense_makes_its_entry_malformed(app: Celery, weekdays: Weekdays, answer: Any) -> None:
    weekdays.answer = answer
    decision = decide(in_code(app, weekdays), state(due=1001.0), 1002.0, 500)
    assert (decision.error is not None, decision.send, decision.due) == (True, [], None)


def test_error_of_a_date_is_noted_and_the_schedule_goes_on(entry: Make) -> None:
    decision = decide(entry(), state(due=1010.0), 1035.0, 500)
    after = noted(state(due=1010.0), decision, {1020.0: 'too large'}, 1035.0)
    assert (after['due'], after['count'], after['skipped'], after['error']) == (1040.0, 2, 1, 'too large')
    assert noted(after, decide(entry(), after, 1041.0, 500), {}, 1041.0)['error'] is None


@pytest.mark.parametrize('broken', [{'due': 'soon'}, {'anchor': None}, {'plan': 5}, {'last': 1e300}, {'count': -1}])
def test_malformed_state_is_replaced(entry: Make, broken: dict[str, Any]) -> None:
    assert state_of({**STATE, **broken}) is None
    former = {**STATE, **broken, '_rev': '7-a'}
    assert new_state('beat:state:x', former)['_rev'] == '7-a'


@pytest.mark.parametrize('forged', [{'anchor': 0.0}, {'anchor': 3e10}, {'last': 3e10}, {'due': 0.0}])
def test_forged_state_costs_no_time(entry: Make, forged: dict[str, Any]) -> None:
    """Its numbers are dates, but no dates of the schedule."""
    often = entry(schedule={'every': 0.01}, grace=1e9, start=1000)
    known: Any = {**planned(often, None, STATE, 1000.0), **forged}
    assert state_of(known) == known
    decision = decide(often, known, 1_763_709_000.0, 500)
    assert len(decision.send) <= 500
