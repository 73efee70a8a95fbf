"""Entries, states and code of any content: only the entry in question is malformed, in beat and in the commands."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab
from hypothesis import strategies as st

from celery_couchdb.contrib.beat import Schedules
from celery_couchdb.contrib.beat.entries import new_state
from kombu_couchdb.couchdb.client import Client
from tests.hostile.documents import NOW
from tests.hostile.strategies import found, json_values, retyped
from tests.integration.conftest import Beat, beat, schedules, until
from tests.support import command_of, items

__all__ = ['beat', 'schedules']

PLANS: list[dict[str, Any]] = [
    *({'every': 5}, {'every': 5, 'relative': True}, {'at': '9999-12-31T23:59:59-23:59'}, {'at': '0001-01-01'}),
    *({'crontab': '*/2 1-5 * * *', 'timezone': 'Europe/Berlin'}, {'crontab': '* * 31 2 *'}, {'crontab': '61 * * * *'}),
    *({'crontab': '0 * * * *', 'timezone': zone} for zone in ('/etc', '..', 'Etc')),
    *({'solar': 'sunset', 'latitude': 52.5, 'longitude': 13.4}, {'code': 'x'}),
]
ENTRY: dict[str, Any] = {
    'type': 'Schedule',
    'task': 'add',
    'args': [{'__type__': 'datetime', '__value__': '2030-01-01'}],
    'kwargs': {'x': 1},
    'options': {'queue': 'q', 'priority': 5, 'expires': 60, 'headers': {'a': 1}, 'serializer': 'json', 'job_key': 'k'},
    'enabled': True,
    'removed': 5.0,
    'missed': 'skip',
    'grace': 60,
    'start': NOW,
    'until': 2 * NOW,
    'times': 9,
    'source': 'app',
    'digest': 'x',
    'code': ['args', 'options'],
}
STATE: dict[str, Any] = {**new_state('beat:state:e'), 'anchor': NOW, 'due': NOW, 'last': NOW, 'task_id': 'x'}


class Own(BaseSchedule):
    """A schedule of an application, whose answer is arbitrary."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def is_due(self, last_run_at: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


ANY = st.sampled_from([object(), float('nan'), '\udc80', {1, 2}, LookupError('no table'), RecursionError()])
CODE_SCHEDULE = ANY | ANY.map(Own) | st.tuples(ANY, ANY).map(Own) | st.just(crontab())
CODE = ANY | st.builds(
    lambda plan, members: {'task': 'add', 'schedule': plan, **members},
    CODE_SCHEDULE,
    st.fixed_dictionaries({}, optional=dict.fromkeys(('task', 'args', 'kwargs', 'options', 'relative'), ANY)),
)
NAMES = st.sampled_from([None, 5, '', '\udc80', 'x' * 300]) | st.integers()


@pytest.fixture
def check(app: Celery, client: Client, beat: Beat, schedules: Schedules, caplog: pytest.LogCaptureFixture) -> Any:
    """A function that checks that beat and the commands work, with the entries in the database and in this code."""

    def check(code: dict[Any, Any]) -> None:
        scheduler = beat({**code, 'good': {'task': 'add', 'schedule': 0.05, 'args': (1, 1)}})

        def good() -> bool:
            assert 'just now' not in caplog.text, caplog.text
            state = client.get_or_none('beat:state:good')
            return bool(state and state['count'] >= 3)

        until(scheduler, good, 'the good entry')
        scheduler.close()
        for item in schedules.list():
            item.upcoming(client.clock.now(), 3)
            assert item.name != 'good' or item.error is None
        for words in (['list'], ['list', '--json'], ['show', 'e0'], ['show', 'e0', '--json']):
            done = command_of(app)('schedule', *words)
            assert done.exit_code == 0 or 'there is no schedule entry' in done.stderr, (done.output, done.exception)
        assert items(client)
        logging.getLogger().setLevel(logging.WARNING)

    return check


def test_any_document_stops_nobody(client: Client, check: Any) -> None:
    plans = [{**ENTRY, 'schedule': plan} for plan in PLANS]
    entries = [*plans, *found(st.sampled_from(plans).flatmap(retyped), 200)]
    entries += [{**ENTRY, 'schedule': plan} for plan in found(json_values(), 20)]
    states = found(retyped(STATE), 100)
    client.bulk([{**doc, '_id': f'beat:entry:e{number}'} for number, doc in enumerate(entries)])
    client.bulk([{**doc, '_id': f'beat:state:e{number}'} for number, doc in enumerate(states)])
    check({})


def test_any_entry_of_the_code_stops_nobody(check: Any) -> None:
    check(dict(found(st.tuples(NAMES, CODE), 100)))
