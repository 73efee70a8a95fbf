"""Entries as documents: what is malformed, and names."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.contrib.beat.entries import Entry, Names, check_names, code_entries, task_id_of
from celery_couchdb.contrib.beat.schedules import Malformed
from kombu_couchdb.errors import ConfigurationError

from .conftest import STATE, Make


@pytest.mark.parametrize(
    ('members', 'words'),
    [
        ({'type': 'Plan'}, 'type must be "Schedule"'),
        ({'task': ''}, 'task must be the name of a task'),
        ({'shedule': {}}, "'shedule' is not a member of an entry"),
        ({'args': {}}, 'args must be a list'),
        ({'options': {'task_id': 'x'}}, "options must not contain 'task_id'"),
        ({'options': {'headers': {'id': 'x'}}}, 'options.headers must not contain "id"'),
        ({'options': {'expires': 'soon'}}, "options.expires must be a number of seconds or a date, not 'soon'"),
        ({'options': {'expires': [5]}}, 'options.expires must be a number of seconds or a date'),
        ({'options': {'priority': 'high'}}, 'options.priority must be a whole number'),
        ({'options': {'countdown': '5'}}, 'options.countdown must be a number of seconds'),
        ({'start': False}, 'start must be a date'),
        ({'until': 'tomorrow'}, 'until must be a date'),
        ({'times': 0}, 'times must be a number from 1'),
        ({'enabled': 'yes'}, 'enabled must be true or false'),
        ({'missed': 'all'}, 'missed must be one of once, skip'),
        ({'grace': -1}, 'grace must be a number of seconds'),
        ({'source': 'me'}, 'source must be "app" or "database"'),
        ({'code': ['args']}, 'its args are in the code of the app'),
        ({'args': [{'__type__': 'what', '__value__': 5}]}, 'args cannot be decoded'),
        ({'schedule': {'every': -5}}, 'schedule.every must be a number'),
    ],
)
def test_malformed_entries_have_a_sentence(entry: Make, members: dict[str, Any], words: str) -> None:
    found = entry(**members)
    assert found.error is not None
    assert words in found.error
    assert not found.enabled
    assert found.plan == 'error'


def test_missing_member_and_long_name_have_a_sentence(app: Celery) -> None:
    assert Entry.of('x', {'type': 'Schedule', 'schedule': {'every': 5}}, app).error == 'task is missing'
    assert 'name of an entry must have 1 to 200' in str(Entry.of('x' * 201, {}, app).error)


def test_names() -> None:
    assert Names.of(None) == ('beat',)
    assert Names.of('blog').entries == 'beat-blog:entry:'
    assert Names.of(None).states == 'beat:state:'
    for wrong in ('Blog', 'a:b', '', 'x' * 41):
        with pytest.raises(ConfigurationError, match='transport option schedule_name must be'):
            Names.of(wrong)


def test_numbers_without_fraction_may_come_back_as_integers(entry: Make) -> None:
    """The embedded server returns 5 for 5.0."""
    assert entry(schedule={'every': 5.0}, start=7.0).plan == entry(schedule={'every': 5}, start=7).plan
    assert entry(schedule={'every': 5.5}).plan != entry(schedule={'every': 5}).plan
    assert task_id_of(STATE, 5.0) == task_id_of(STATE, 5)


def test_values_of_options_that_the_code_cannot_use(app: Celery) -> None:
    """Celery would raise an error at each due date."""
    for expires, wrong in ((timedelta(hours=1), True), (datetime(2030, 1, 1), False), (60, False), (None, False)):
        app.conf.beat_schedule = {'x': {'task': 't', 'schedule': 5, 'options': {'expires': expires}}}
        code = code_entries(app, {})['x']
        error = Entry.of('x', code.document(None, 'beat:entry:', 0.0), app, code).error
        assert (error is not None) == wrong
        assert not wrong or 'options.expires must be a number of seconds or a date, not datetime.timedelta' in str(
            error
        )


@pytest.mark.parametrize(
    ('name', 'meant'),
    [('queu', 'queue'), ('expire', 'expires'), ('soft_timelimit', 'soft_time_limit'), ('tenant', None)],
)
def test_misspelt_names_of_options(name: str, meant: str | None) -> None:
    """A class of tasks may have options of its own."""
    if meant is None:
        return check_names({name: 1})
    with pytest.raises(Malformed, match=f"options has '{name}', .*: is it '{meant}'"):
        check_names({'queue': 'q', name: 1})
