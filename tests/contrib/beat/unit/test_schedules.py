"""Due dates: crontabs across both changes of the clock, intervals without drift, objects of the app."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule, solar

from celery_couchdb.contrib.beat.schedules import Asked, Malformed, described, rule_of

BERLIN = ZoneInfo('Europe/Berlin')


def dates(app: Celery, doc: dict[str, Any], start: str, count: int, code: Any = None) -> list[str]:
    """Return due dates as local times with their offsets."""
    rule, found = rule_of(doc, app, code and Asked(code, app)), list[str]()
    anchor = after = datetime.fromisoformat(start).replace(tzinfo=BERLIN).timestamp()
    for _ in range(count):
        due = rule.next(anchor, after)
        assert due is not None
        assert due > after
        found.append(datetime.fromtimestamp(due, BERLIN).strftime('%d. %H:%M:%S %z').replace(':00 ', ' '))
        after = due
    return found


@pytest.mark.parametrize(
    ('text', 'start', 'expected'),
    [
        # In the night to 29 March 2026, 02:00 to 03:00 are skipped.
        ('30 2 * * *', '2026-03-28', ['28. 02:30 +0100', '29. 03:30 +0200', '30. 02:30 +0200']),
        ('30 * * * *', '2026-03-29T00:59', ['29. 01:30 +0100', '29. 03:30 +0200', '29. 04:30 +0200']),
        ('*/30 2-4 * * *', '2026-03-29', ['29. 03:00 +0200', '29. 03:30 +0200', '29. 04:00 +0200', '29. 04:30 +0200']),
        # On 25 October 2026, 02:00 to 03:00 occur twice.
        ('30 2 * * *', '2026-10-24', ['24. 02:30 +0200', '25. 02:30 +0200', '26. 02:30 +0100']),
        ('30 * * * *', '2026-10-25T01:35', ['25. 02:30 +0200', '25. 02:30 +0100', '25. 03:30 +0100']),
        ('*/20 2 * * *', '2026-10-25', ['25. 02:00 +0200', '25. 02:20 +0200', '25. 02:40 +0200', '26. 02:00 +0100']),
        # Without a change of the clock.
        ('15,45 9 * * mon-fri', '2026-06-05T09:15', ['05. 09:45 +0200', '08. 09:15 +0200']),
        ('0 0 31 * *', '2026-08-31', ['31. 00:00 +0100', '31. 00:00 +0100']),
        ('0 12 29 2 *', '2026-01-01', ['29. 12:00 +0100']),
    ],
)
def test_crontab(app: Celery, text: str, start: str, expected: list[str]) -> None:
    assert dates(app, {'crontab': text, 'timezone': 'Europe/Berlin'}, start, len(expected)) == expected


def test_crontab_has_the_app_s_time_zone_by_default(app: Celery) -> None:
    assert dates(app, {'crontab': '0 9 * * *'}, '2026-06-05', 1) == ['05. 09:00 +0200']
    assert dates(app, {'crontab': '0 9 * * *', 'timezone': 'Asia/Tokyo'}, '2026-06-05', 1) == ['05. 02:00 +0200']


@pytest.mark.parametrize('zone', ['America/Havana', 'Australia/Lord_Howe', 'Asia/Kathmandu'])
@pytest.mark.parametrize('text', ['0 0 * * *', '*/30 * * * *'])
def test_crontab_where_the_clock_changes_at_midnight_or_by_half_an_hour(app: Celery, zone: str, text: str) -> None:
    """Every date is later than the one before, and the dates of a year are about as many as they should be."""
    rule = rule_of({'crontab': text, 'timezone': zone}, app)
    start = datetime(2023, 1, 1, tzinfo=ZoneInfo(zone)).timestamp()
    after, found, end = start, 0, start + 365 * 86400
    while after < end:
        due = rule.next(start, after)
        assert due is not None
        assert after < due < after + 2 * 86400
        # The same date is found from everywhere between the two.
        assert rule.next(start, (after + due) / 2) == due
        after, found = due, found + 1
    assert abs(found - 365 * (48 if text == '*/30 * * * *' else 1)) <= 2


def test_intervals_do_not_drift(app: Celery) -> None:
    rule = rule_of({'every': 0.1}, app)
    anchor = 1_700_000_000.123
    due = anchor
    for count in range(1, 500):
        found = rule.next(anchor, due)
        assert found == round(anchor + count * 0.1, 3)
        due = found
    assert rule.next(anchor, anchor - 100) == round(anchor + 0.1, 3)


def test_one_date(app: Celery) -> None:
    for at in ('2027-01-01T09:00:00+01:00', '2027-01-01T08:00:00Z', '2027-01-01T09:00', 1798790400):
        rule = rule_of({'at': at}, app)
        assert rule.next(0.0, 0.0) == 1798790400.0
        assert rule.next(0.0, 1798790400.0) is None
    assert rule_of({'at': '2027-01-01T09:00', 'timezone': 'UTC'}, app).next(0.0, 0.0) == 1798794000.0


def test_solar(app: Celery) -> None:
    pytest.importorskip('ephem')
    doc = {'solar': 'sunset', 'latitude': 48.1, 'longitude': 11.6}
    found = dates(app, doc, '2026-06-21T12:00', 3)
    assert [text[:8] for text in found] == ['21. 21:1', '22. 21:1', '23. 21:1']
    assert described(solar('sunset', 48.1, 11.6, app=app)) == doc
    with pytest.raises(Malformed, match="needs the member 'latitude'"):
        rule_of({'solar': 'sunset'}, app)
    with pytest.raises(Malformed, match='must be between -90 and 90'):
        rule_of({'solar': 'sunset', 'latitude': 100, 'longitude': 0}, app)


class Business(BaseSchedule):
    """Every hour, from now on."""

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        return True, 3600.0


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        (lambda app: schedule(90, app=app), {'every': 90.0}),
        (lambda app: schedule(timedelta(days=1), True, app=app), {'every': 86400.0, 'relative': True}),
        (lambda app: crontab('1', '*/2', app=app), {'crontab': '1 */2 * * *', 'timezone': 'Europe/Berlin'}),
        (
            lambda app: crontab(
                minute=[5, 3], hour=2, day_of_week='mon,fri', day_of_month=1, month_of_year='1', app=app
            ),
            {'crontab': '3,5 2 1 1 mon,fri', 'timezone': 'Europe/Berlin'},
        ),
        (lambda app: schedule(0, app=app), {'code': 'celery.schedules.schedule'}),
        (
            lambda app: crontab(nowfun=lambda: datetime.now(timezone.utc), app=app),
            {'code': 'celery.schedules.crontab'},
        ),
        (lambda app: Business(app=app), {'code': f'{__name__}.Business'}),
    ],
)
def test_schedules_of_celery_as_documents(app: Celery, given: Any, expected: dict[str, Any]) -> None:
    found = described(given(app))
    assert {name: value for name, value in found.items() if name != 'parameters'} == expected
    assert ('parameters' in found) == ('code' in found)
    rule_of(found, app, Asked(given(app), app))


@pytest.mark.parametrize(
    ('doc', 'words'),
    [
        ({}, 'exactly one of the members every, crontab, at, solar, code'),
        ({'every': 1, 'timezone': 'UTC'}, "unknown member 'timezone'"),
        ({'every': 0}, 'number of seconds from 0.01'),
        ({'every': True}, 'number of seconds'),
        ({'every': 1, 'relative': 'yes'}, 'relative must be true or false'),
        ({'crontab': '* * * *'}, 'five fields'),
        ({'crontab': '61 * * * *'}, 'crontab: the minute must be 0 to 59'),
        ({'crontab': '* * * * *', 'timezone': 'Mars/Olympus'}, "timezone 'Mars/Olympus' is not the name"),
        ({'crontab': '* * * * *', 'timezone': '../../etc/passwd'}, 'is not the name'),
        ({'at': 'tomorrow'}, 'at must be a date'),
        ({'at': 1e300}, 'at must be a date'),
    ],
)
def test_malformed_schedules(app: Celery, doc: Any, words: str) -> None:
    with pytest.raises(Malformed, match=words):
        rule_of(doc, app)
