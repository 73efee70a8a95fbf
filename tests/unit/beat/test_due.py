"""Due dates that are sent, left out and stored, after interruptions of any length."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_couchdb.beat.due import Decision, decide, noted, planned, upcoming
from celery_couchdb.beat.entries import Entry, ScheduleState, new_state, state_of, task_id_of

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
    fresh = planned(entry(), None, 'beat:state:x', None, 1000.0)
    assert (fresh['anchor'], fresh['due'], fresh['_id']) == (1000.0, 1010.0, 'beat:state:x')
    assert state_of(dict(fresh)) == fresh
    assert planned(entry(), fresh, 'beat:state:x', '1-a', 5000.0) is fresh


def test_start_decides_where_a_schedule_begins(entry: Make) -> None:
    assert planned(entry(start=500), None, 'i', None, 1000.0)['due'] == 510.0
    assert planned(entry(start=5000), None, 'i', None, 1000.0)['due'] == 5010.0


def test_enabling_sends_nothing_for_the_past(entry: Make) -> None:
    before = planned(entry(), None, 'i', None, 1000.0)
    disabled = planned(entry(enabled=False), before, 'i', None, 1020.0)
    assert disabled['due'] is None
    assert upcoming(entry(enabled=False), disabled, 1020.0, 3) == []
    assert planned(entry(), disabled, 'i', None, 9000.0)['due'] == 9010.0
    # The same if no leader was there meanwhile: `start` tells that it was enabled anew.
    assert planned(entry(start=9000), before, 'i', None, 9500.0)['due'] == 9010.0


@pytest.mark.parametrize('change', [{'enabled': False}, {'missed': 'never'}], ids=['disabled', 'malformed'])
def test_date_that_was_sent_is_not_sent_again_when_an_entry_goes_on(entry: Make, change: dict[str, Any]) -> None:
    """An edit by another program keeps `start`. After a vacuum, CouchDB does not know the ids of sent tasks."""
    for schedule, following in (({'every': 10}, 1030.0), ({'at': 1020.0}, None)):
        known = planned(entry(schedule=schedule, start=1000), None, 'i', None, 1000.0)
        sent, known = run(entry(schedule=schedule, start=1000), known, 1020.0)
        assert sent[-1] == 1020.0
        stopped = planned(entry(schedule=schedule, start=1000, **change), known, 'i', None, 1025.0)
        assert stopped['due'] is None
        assert planned(entry(schedule=schedule, start=1000), stopped, 'i', None, 1026.0)['due'] == following


def test_other_edits_do_not_move_the_due_date(entry: Make) -> None:
    before = planned(entry(), None, 'i', None, 1000.0)
    assert planned(entry(args=[5], task='other', options={'queue': 'q'}), before, 'i', None, 1005.0) is before
    assert planned(entry(schedule={'every': 20}), before, 'i', None, 1005.0)['due'] == 1025.0


@pytest.mark.parametrize('missed', ['once', 'skip', 'all'])
def test_short_interruption_changes_nothing(entry: Make, missed: str) -> None:
    sent, left = run(entry(missed=missed), state(due=1010.0), 1069.0)
    assert sent == [1010.0, 1020.0, 1030.0, 1040.0, 1050.0, 1060.0]
    assert (left['due'], left['count'], left['skipped'], left['last']) == (1070.0, 6, 0, 1060.0)


@pytest.mark.parametrize(
    ('missed', 'expected'),
    [('once', [4600.0]), ('skip', [4600.0]), ('all', [1000.0 + 10 * count for count in range(1, 361)])],
)
def test_interruption_of_an_hour(entry: Make, missed: str, expected: list[float]) -> None:
    """The latest date is only seconds old, so that it is sent even with `skip`."""
    sent, left = run(entry(missed=missed), state(due=1010.0), 4605.0, limit=100)
    assert sent == expected
    assert left['due'] == 4610.0
    assert left['count'] + left['skipped'] == 360


@pytest.mark.parametrize(('missed', 'expected'), [('once', [87400.0]), ('skip', []), ('all', [87400.0])])
def test_single_date_was_missed(entry: Make, missed: str, expected: list[float]) -> None:
    daily = entry(missed=missed, schedule={'every': 86400})
    sent, left = run(daily, state(due=87400.0), 91000.0)
    assert sent == expected
    assert (left['due'], left['skipped']) == (173800.0, 1 - len(expected))


def test_grace_decides_what_was_missed(entry: Make) -> None:
    daily = {'missed': 'skip', 'schedule': {'every': 86400}}
    assert run(entry(**daily, grace=3600), state(due=87400.0), 91000.0)[0] == [87400.0]
    assert run(entry(**daily, grace=3599), state(due=87400.0), 91000.0)[0] == []
    assert run(entry(**daily, grace=0), state(due=87400.0), 87400.0)[0] == [87400.0]


def test_one_date_that_was_missed(entry: Make) -> None:
    once = {'schedule': {'at': 2000}}
    assert run(entry(**once), state(due=2000.0), 90000.0) == (
        [2000.0],
        state(due=None, count=1, last=2000.0, sent=90000.0, task_id=task_id_of(STATE, 2000.0)),
    )
    assert run(entry(**once, missed='skip'), state(due=2000.0), 90000.0)[0] == []
    assert planned(entry(**once), None, 'i', None, 3000.0)['due'] is None  # it was over when the entry was added


def test_interruption_with_more_dates_than_are_counted(entry: Make) -> None:
    sent, left = run(entry(schedule={'every': 1}), state(due=1001.0), 1e6)
    assert sent == []
    assert left['due'] == 1e6 + 1


def test_date_is_sent_only_after_it_was_stored(app: Celery, entry: Make) -> None:
    """Of a schedule whose dates differ between processes, at most the stored date is sent at once."""
    relative = entry(schedule={'every': 10, 'relative': True}, missed='all')
    first = decide(relative, state(due=1010.0), 1055.0, 500)
    assert first.send == [1010.0]
    late = decide(entry(missed='once'), state(due=1010.0), 5005.0, 500)
    assert late == Decision([], 399, 5000.0)


def test_ids_of_tasks_depend_on_state_and_date() -> None:
    other = new_state('beat:state:x', None)
    assert task_id_of(STATE, 5.0) == task_id_of({**STATE, 'count': 7, 'due': 8.0}, 5.0)
    assert len({task_id_of(STATE, 5.0), task_id_of(STATE, 6.0), task_id_of(other, 5.0)}) == 3


def test_error_of_a_date_is_noted_and_the_schedule_goes_on(entry: Make) -> None:
    decision = decide(entry(), state(due=1010.0), 1035.0, 500)
    after = noted(state(due=1010.0), decision, {1020.0: 'too large'}, 1035.0)
    assert (after['due'], after['count'], after['skipped'], after['error']) == (1040.0, 2, 1, 'too large')
    assert noted(after, decide(entry(), after, 1041.0, 500), {}, 1041.0)['error'] is None


@pytest.mark.parametrize(
    'broken',
    [
        {'due': 'soon'},
        {'due': -5},
        {'key': 'x'},
        {'anchor': None},
        {'count': 'many'},
        {'plan': 5},
        {'sent': float('inf')},
        {'error': 5},
        {'task_id': 7},
    ],
)
def test_malformed_state_is_replaced(entry: Make, broken: dict[str, Any]) -> None:
    assert state_of({**STATE, **broken}) is None
    assert state_of(None) is None
    fresh = planned(entry(), None, 'beat:state:x', '7-a', 1000.0)
    assert (fresh['_rev'], fresh['due']) == ('7-a', 1010.0)


def test_upcoming_dates(entry: Make) -> None:
    assert upcoming(entry(), None, 1000.0, 3) == [1010.0, 1020.0, 1030.0]
    known = planned(entry(), None, 'i', None, 1000.0)
    assert upcoming(entry(), known, 1234.0, 2) == [1010.0, 1020.0]
    assert upcoming(entry(schedule={'at': 2000}), None, 1000.0, 5) == [2000.0]
    assert upcoming(entry(task=''), None, 1000.0, 5) == []
