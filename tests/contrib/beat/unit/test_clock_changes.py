"""Due dates in the nights in which the clock changes, beside those of Celery's own beat.

The differences are listed in docs/development/beat.rst, each with a reason.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import product
from typing import Any
from zoneinfo import ZoneInfo

import celery
import pytest
from celery import Celery
from celery.schedules import crontab, schedule

from celery_couchdb.contrib.beat.due_dates import decide, noted, planned
from celery_couchdb.contrib.beat.entries import Entry

from .conftest import STATE

#: The days on which the clock changes.
CHANGES = {
    ('Europe/Berlin', 'spring'): '2026-03-29',
    ('Europe/Berlin', 'autumn'): '2026-10-25',
    ('Australia/Lord_Howe', 'spring'): '2026-10-04',
    ('Australia/Lord_Howe', 'autumn'): '2026-04-05',
}

CRONTABS = [
    '30 2 * * *',
    '45 1 * * *',
    '0 3 * * *',
    '0 * * * *',
    '*/20 * * * *',
    '*/20 2 * * *',
    '0 0-6 * * *',
    '*/15 1,2 * * *',
]

#: The dates that only one of the two has: with "+" those of this scheduler, with "-" those of Celery.
DIFFERENCES = {
    # Celery sends one task for all times that the clock skips; here each is moved by the length of the gap.
    ('Europe/Berlin', 'spring', '*/20 2 * * *'): ['+03:20', '+03:40'],
    ('Europe/Berlin', 'spring', '*/15 1,2 * * *'): ['+03:15', '+03:30', '+03:45'],
    ('Australia/Lord_Howe', 'spring', '*/20 2 * * *'): ['+02:50'],
    # Celery sends nothing in the second of two hours that are called the same; here "each hour" means both.
    ('Europe/Berlin', 'autumn', '0 * * * *'): ['+02:00'],
    ('Europe/Berlin', 'autumn', '*/20 * * * *'): ['+02:00', '+02:20', '+02:40'],
    ('Australia/Lord_Howe', 'autumn', '*/20 * * * *'): ['+01:40'],
    # Celery sends at the end of the gap, though the crontab does not name that minute.
    ('Australia/Lord_Howe', 'spring', '0 * * * *'): ['-02:30'],
    ('Australia/Lord_Howe', 'spring', '*/20 * * * *'): ['-02:30'],
}


def kinds(app: Celery) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return schedules as documents and as Celery's objects, by name."""
    found: dict[str, tuple[dict[str, Any], Any]] = {}
    for text in CRONTABS:
        found[text] = {'crontab': text}, crontab(*text.split(), app=app)
    for seconds, relative in product((1800, 3600, 7200, 86400), (False, True)):
        doc = {'every': seconds, **({'relative': True} if relative else {})}
        found[str(doc)] = doc, schedule(timedelta(seconds=seconds), relative, app=app)
    return found


def of_celery(schedule: Any, start: float, end: float, zone: ZoneInfo) -> set[int]:
    """Return the dates at which Celery's beat sends a task, if it looks whenever the schedule says so."""
    now, last, found = start, datetime.fromtimestamp(start, zone), set()
    schedule.nowfun = lambda: datetime.fromtimestamp(now, zone)
    while now < end:
        is_due, seconds = schedule.is_due(last)
        if is_due:
            found.add(round(now))
            last = datetime.fromtimestamp(now, zone)
        now = round(now + max(seconds, 0.001), 3)
    return found


def ours(app: Celery, doc: dict[str, Any], start: float, end: float) -> set[int]:
    """Return the dates at which this scheduler sends a task."""
    entry = Entry.of('x', {'type': 'Schedule', 'task': 't', 'schedule': doc, 'start': start}, app)
    state, found = planned(entry, None, STATE, start), list[float]()
    while state['due'] is not None and state['due'] < end:
        decision = decide(entry, state, state['due'], 1)
        found += decision.send
        state = noted(state, decision, {}, state['due'])
    assert len(found) == len(set(found))
    return {round(date) for date in found}


@pytest.mark.skipif(celery.VERSION < (5, 7), reason='older versions of Celery have other dates in these nights')
@pytest.mark.parametrize(('zone', 'season'), CHANGES)
def test_dates_are_those_of_celery_but_for_the_listed_differences(zone: str, season: str) -> None:
    app, at = Celery('shop', set_as_current=False), ZoneInfo(zone)
    app.conf.timezone = zone
    start = (datetime.fromisoformat(CHANGES[zone, season]).replace(tzinfo=at) - timedelta(days=1)).timestamp()
    found = {}
    for name, (doc, given) in kinds(app).items():
        mine, others = ours(app, doc, start, start + 3 * 86400), of_celery(given, start, start + 3 * 86400, at)
        dates = [('+', date) for date in sorted(mine - others)] + [('-', date) for date in sorted(others - mine)]
        if dates:
            found[zone, season, name] = [f'{sign}{datetime.fromtimestamp(date, at):%H:%M}' for sign, date in dates]
    assert found == {case: dates for case, dates in DIFFERENCES.items() if case[:2] == (zone, season)}
