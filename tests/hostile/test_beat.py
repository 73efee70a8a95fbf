"""Entries, states and code of any content: only the entry in question is malformed, in beat and in the commands."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule
from hypothesis import given
from hypothesis import strategies as st

from celery_couchdb.beat import CouchDBScheduler, Schedules
from celery_couchdb.beat.entries import new_state
from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.integration.conftest import command_of
from tests.support import items

TEXT = st.text(st.characters(exclude_categories=['Cs']), max_size=8)
NUMBER = st.one_of(
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False),
    st.sampled_from([0, -1, 1e300, -1e300, 3e10, 0.001, 1_763_709_000]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBER, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
FIELD = st.sampled_from(['*', '0', '*/2', '1-5', '61', 'x', '31', '2', '*/0', ''])
SCHEDULE = st.one_of(
    JSON,
    st.builds(lambda value: {'every': value}, NUMBER),
    st.builds(lambda value: {'every': value, 'relative': True}, NUMBER),
    st.builds(
        lambda fields, zone: {'crontab': ' '.join(fields), **zone},
        st.lists(FIELD, min_size=4, max_size=6),
        st.one_of(
            st.just({}),
            st.builds(
                lambda zone: {'timezone': zone},
                st.one_of(TEXT, st.sampled_from(['Europe/Berlin', 'Australia/Lord_Howe', '/etc', '..', 'Etc'])),
            ),
        ),
    ),
    st.builds(
        lambda value: {'at': value},
        st.one_of(NUMBER, TEXT, st.sampled_from(['2027-01-01', '9999-12-31T23:59:59-23:59', '0001-01-01'])),
    ),
    st.builds(
        lambda name, value: {'solar': name, 'latitude': value, 'longitude': value},
        st.one_of(TEXT, st.just('sunset')),
        JSON,
    ),
    st.builds(lambda value: {'code': value}, JSON),
)
OPTIONS = [
    *('headers', 'queue', 'priority', 'expires', 'countdown', 'eta', 'exchange', 'job_key', 'serializer'),
    *('compression', 'link', 'retry', 'time_limit'),
]
MEMBERS: dict[str, Any] = {
    'task': st.one_of(JSON, st.just('add')),
    'args': st.one_of(JSON, st.just([{'__type__': 'datetime', '__value__': 'x'}])),
    'kwargs': JSON,
    'options': st.one_of(JSON, st.dictionaries(st.sampled_from(OPTIONS), JSON, max_size=3)),
    'enabled': st.one_of(JSON, st.just(True)),
    'removed': JSON,
    'missed': st.one_of(JSON, st.sampled_from(['once', 'skip', 'all'])),
    'grace': st.one_of(JSON, NUMBER),
    'start': st.one_of(JSON, NUMBER, st.sampled_from(['', [], {}, False])),
    'source': st.one_of(JSON, st.sampled_from(['app', 'database'])),
    'digest': JSON,
    'code': st.one_of(JSON, st.just(['args', 'options'])),
    'type': JSON,
    'other': JSON,
}
ENTRY = st.builds(
    lambda plan, members: {'type': 'Schedule', 'task': 'add', 'schedule': plan, **members},
    SCHEDULE,
    st.fixed_dictionaries({}, optional=MEMBERS).flatmap(lambda members: st.just(dict(list(members.items())[:3]))),
)
STATE = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(JSON, NUMBER)
        for name in ('key', 'plan', 'anchor', 'due', 'last', 'sent', 'task_id', 'count', 'skipped', 'error')
    },
)


class Own(BaseSchedule):
    """A class whose answers are arbitrary."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def is_due(self, last_run_at: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


ANY = st.one_of(
    JSON,
    st.builds(object),
    st.just(float('nan')),
    st.just('\udc80'),
    st.just({1, 2}),
    st.builds(timedelta, st.integers(-5, 5)),
)
CODE_SCHEDULE = st.one_of(
    ANY,
    st.builds(Own, st.one_of(ANY, st.tuples(ANY, ANY), st.just(LookupError('no table')), st.just(RecursionError()))),
    st.builds(schedule, st.builds(timedelta, seconds=st.integers(-5, 5))),
    st.just(crontab()),
)
CODE = st.dictionaries(
    st.one_of(TEXT, st.integers(0, 5), st.none(), st.just('\udc80'), st.text(min_size=201, max_size=400)),
    st.one_of(
        ANY,
        st.builds(
            lambda plan, members: {'task': 'add', 'schedule': plan, **members},
            CODE_SCHEDULE,
            st.fixed_dictionaries({}, optional=dict.fromkeys(('task', 'args', 'kwargs', 'options', 'relative'), ANY)),
        ),
    ),
    max_size=5,
)


@pytest.fixture
def fuzzed(app: Celery, client: Client, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """A function that runs beat with these documents and this code, until everything was read."""
    app.conf.result_expires = None
    app.conf.task_always_eager = False

    def fuzzed(entries: list[Any], states: list[Any], code: dict[Any, Any]) -> None:
        client.delete()
        client.create()
        caplog.clear()
        docs: list[Any] = [{'_id': f'beat:entry:e{number}', **doc} for number, doc in enumerate(entries)]
        docs += [
            {**new_state(f'beat:state:e{number}', None), **doc, '_id': f'beat:state:e{number}', 'type': 'ScheduleState'}
            for number, doc in enumerate(states)
        ]
        client.bulk(docs)
        app.conf.beat_schedule = {**code, 'good': {'task': 'add', 'schedule': 0.05, 'args': (1, 1)}}
        scheduler = CouchDBScheduler(app)
        scheduler.max_interval = 0.0

        def good() -> bool:
            scheduler.tick()
            assert 'just now' not in caplog.text, caplog.text
            found = client.get_or_none('beat:state:good')
            return bool(found and found['count'] >= 3)

        try:
            wait_for(good, 'the good entry')
        finally:
            scheduler.close()
        schedules = Schedules(app)
        for item in schedules.list():
            item.upcoming(client.clock.now(), 3)
            assert item.name != 'good' or item.error is None
        schedules.client.close()
        for words in (['list'], ['list', '--json'], ['show', 'e0'], ['show', 'e0', '--json']):
            done = command_of(app)('schedule', *words)
            assert done.exit_code == 0 or 'there is no schedule entry' in done.stderr, (done.output, done.exception)
        assert items(client)

    yield fuzzed
    logging.getLogger().setLevel(logging.WARNING)


@given(entries=st.lists(ENTRY, min_size=5, max_size=30), states=st.lists(STATE, max_size=10))
def test_any_document_stops_nobody(fuzzed: Any, entries: list[Any], states: list[Any]) -> None:
    fuzzed(entries, states, {})


@given(code=CODE)
def test_any_entry_of_the_code_stops_nobody(fuzzed: Any, code: dict[Any, Any]) -> None:
    fuzzed([], [], code)
