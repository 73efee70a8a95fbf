"""Schedules in words: brief where that is exact, otherwise the crontab itself."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from celery import Celery, schedules
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_couchdb.contrib.beat.schedules import LATEST, Asked, Fields, Malformed, rule_of
from celery_couchdb.contrib.beat.words import crontab_words, in_words


@pytest.mark.parametrize(
    ('schedule', 'words'),
    [
        ({'every': 0.5}, 'every 0.5 seconds'),
        ({'every': 1}, 'every second'),
        ({'every': 30.0}, 'every 30 seconds'),
        ({'every': 900}, 'every 15 minutes'),
        ({'every': 129_690.25}, 'every 1 day 12 hours 1 minute 30.25 seconds'),
        ({'every': 1e9}, 'every 11,574 days 1 hour 46 minutes 40 seconds'),
        ({'every': 30, 'relative': True}, 'every 30 seconds at the full second'),
        ({'every': 150, 'relative': True}, 'every 2 minutes at the full minute'),
        ({'every': 3600, 'relative': True}, 'every hour at the full hour, Europe/Berlin'),
        ({'every': 200_000, 'relative': True}, 'every 2 days at 00:00, Europe/Berlin'),
        ({'at': '2027-01-01T09:00'}, 'once at 2027-01-01 09:00 Europe/Berlin'),
        ({'at': '2027-01-01T09:00:30', 'timezone': 'Asia/Tokyo'}, 'once at 2027-01-01 09:00:30 Asia/Tokyo'),
        ({'at': '2027-01-01T00:00:00+01:00'}, 'once at 2027-01-01 00:00 UTC+01:00'),
        ({'at': 1_824_942_600}, 'once at 2027-10-31 02:30 Europe/Berlin'),
        (
            {'at': 1_824_946_200},
            'once at 2027-10-31 02:30 Europe/Berlin, the second time that the clock shows it',
        ),
    ],
)
def test_intervals_and_dates(app: Celery, schedule: dict[str, Any], words: str) -> None:
    assert in_words(schedule, rule_of(schedule, app)) == words


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('* * * * *', 'every minute'),
        ('*/5 * * * *', 'every 5 minutes'),
        ('*/5 * * 12 *', 'every 5 minutes in December, Asia/Tokyo'),
        ('5-59/10 * * * *', 'every 10 minutes from 00:05 to 23:55, Asia/Tokyo'),
        ('0 * * * *', 'at minute 0 of every hour, Asia/Tokyo'),
        ('1,2,3,50 * * * *', 'at minutes 1 to 3 and 50 of every hour, Asia/Tokyo'),
        ('30 3 * * *', 'at 03:30 every day, Asia/Tokyo'),
        ('30 3 * * mon-fri', 'at 03:30 on Monday to Friday, Asia/Tokyo'),
        ('0 8,20 * 6-8,12 0,6', 'at 08:00 and 20:00 on Saturday and Sunday in June to August and December, Asia/Tokyo'),
        ('0 0 1 * *', 'at 00:00 on day 1 of the month, Asia/Tokyo'),
        ('0 0 1-7,15 1,7 *', 'at 00:00 on days 1 to 7 and 15 of January and July, Asia/Tokyo'),
        ('*/15 9-17 * * 1', 'every 15 minutes from 09:00 to 17:45 on Monday, Asia/Tokyo'),
        ('* 3 * * *', 'every minute from 03:00 to 03:59 every day, Asia/Tokyo'),
        ('30 */2 * * *', 'every 2 hours from 00:30 to 22:30 every day, Asia/Tokyo'),
        # After minute 56 comes minute 0, and both the day and the weekday must match.
        ('*/7  * * * *', 'crontab */7 * * * *, Asia/Tokyo'),
        ('30 3 1-7 * mon', 'crontab 30 3 1-7 * mon, Asia/Tokyo'),
        ('0 22-2 * * *', 'crontab 0 22-2 * * *, Asia/Tokyo'),
        ('0 0 1-31/2 * *', 'crontab 0 0 1-31/2 * *, Asia/Tokyo'),
    ],
)
def test_crontabs(app: Celery, text: str, words: str) -> None:
    schedule = {'crontab': text, 'timezone': 'Asia/Tokyo'}
    assert in_words(schedule, rule_of(schedule, app)) == words


def test_sun(app: Celery) -> None:
    pytest.importorskip('ephem')
    for event, words in (('dusk_nautical', 'nautical dusk'), ('solar_noon', 'solar noon'), ('sunset', 'sunset')):
        schedule = {'solar': event, 'latitude': 48.1371, 'longitude': -11}
        assert in_words(schedule, rule_of(schedule, app)) == f'at {words} at 48.1371 N, 11 W'


def test_rules_of_the_code_and_malformed_ones(app: Celery) -> None:
    schedule = {'code': 'shop.Business', 'parameters': 'x'}
    assert in_words(schedule, Asked(schedules.schedule(5), app)) == 'by shop.Business in the code'
    assert in_words({'crontab': '61 * * * *', 'timezone': None}, None) == '61 * * * * None'
    assert in_words('hourly', None) == '-'


def parts_of(numbers: range, steps: tuple[int, ...] = (1, 2)) -> set[tuple[int, ...]]:
    """Return some sequences of numbers as the fields of crontabs have them."""
    return {tuple(numbers[first:end:step]) for first in (0, 1, 4) for end in (2, 5, 6, None) for step in steps} - {()}


def test_crontabs_with_the_same_words_are_the_same() -> None:
    always = (tuple(range(24)), tuple(range(1, 32)), tuple(range(1, 13)), tuple(range(7)))
    found = dict[str, Fields]()
    steps = (1, 2, 3, 5, 7, 15, 29)
    for minutes, hours in product(parts_of(range(60), steps), parts_of(range(24), steps)):
        fields = Fields(minutes, hours, *always[1:])
        assert found.setdefault(crontab_words(fields) or str(fields), fields) == fields
    for hours, *days in product(((3,), always[0]), *map(parts_of, (range(1, 32), range(1, 13), range(7)))):
        fields = Fields((6,), hours, *days)
        assert found.setdefault(crontab_words(fields) or str(fields), fields) == fields
    assert sum(not words.startswith('Fields') for words in found) > 500


FIELD = st.lists(
    st.one_of(
        st.sampled_from(['*', '*/2', '*/7', '1-5', '5-2', 'mon', 'sun-tue', 'jan', '1-12/5']),
        st.integers(0, 60).map(str),
        st.builds('{}-{}/{}'.format, st.integers(0, 31), st.integers(0, 31), st.integers(1, 9)),
    ),
    min_size=1,
    max_size=6,
).map(','.join)
ZONE = st.fixed_dictionaries({}, optional={'timezone': st.sampled_from(['Asia/Kathmandu', 'America/Havana', 'UTC'])})
SCHEDULE = st.one_of(
    st.builds(dict, every=st.floats(0.01, 1e9) | st.integers(1, 10**9), relative=st.booleans()),
    st.builds(lambda fields, zone: {'crontab': ' '.join(fields), **zone}, st.tuples(*[FIELD] * 5), ZONE),
    st.builds(dict, at=st.floats(0, LATEST) | st.datetimes(timezones=st.none() | st.timezones()).map(str)),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEDULE)
def test_any_accepted_rule_has_words(schedule: dict[str, Any]) -> None:
    app = Celery('shop', set_as_current=False, broker='memory://', timezone='Australia/Lord_Howe')
    try:
        rule = rule_of(schedule, app)
    except Malformed:
        return
    words = in_words(schedule, rule)
    assert words.isprintable()
    assert words.split()[0] in ('every', 'at', 'once', 'crontab')
    assert '  ' not in words
