"""The entries in the code of the app, and operators' edits of their documents."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab

from celery_couchdb.contrib.beat.entries import CodeEntry, Entry, description_of, to_write

Docs = dict[str, dict[str, Any]]


def in_code(app: Celery, name: str = 'x', **members: Any) -> ScheduleEntry:
    return ScheduleEntry(**{'name': name, 'task': 't', 'schedule': 10, 'app': app, **members})


class Database:
    """What the leader of a process with this code has written."""

    def __init__(self) -> None:
        self.docs: Docs = {}
        self.now = 1000.0

    def start(self, *code: ScheduleEntry) -> list[str]:
        """Let a leader with this code start, and return the names of the written entries."""
        self.now += 100
        entries = [CodeEntry(entry.name, entry, description_of(entry)) for entry in code]
        written, self.replaced = to_write(entries, self.docs, 'beat:entry:', self.now)
        for doc in written:
            self.docs[doc['_id'].removeprefix('beat:entry:')] = {**doc, '_rev': f'{self.now}-a'}
        return [doc['_id'].removeprefix('beat:entry:') for doc in written]


@pytest.fixture
def database() -> Database:
    return Database()


def test_entry_is_written_once(app: Celery, database: Database) -> None:
    assert database.start(in_code(app, args=(1, 2), options={'queue': 'q'})) == ['x']
    doc = database.docs['x']
    assert doc['args'] == [1, 2]
    assert (doc['enabled'], doc['start'], doc['source']) == (True, 1100.0, 'app')
    assert Entry.of('x', doc, app).error is None
    assert database.start(in_code(app, args=(1, 2), options={'queue': 'q'})) == []
    database.start(in_code(app, args=(8,)))
    assert database.docs['x']['start'] == 1100.0  # it changes only with the schedule
    database.start(in_code(app, args=(8,), schedule=20))
    assert database.docs['x']['start'] == 1400.0


def test_operator_s_entry_of_the_same_name_stays(app: Celery, database: Database) -> None:
    database.docs['x'] = {'_id': 'beat:entry:x', 'type': 'Schedule', 'task': 'mine', 'schedule': {'every': 5}}
    assert database.start(in_code(app)) == []
    assert database.replaced == ['x']


def test_operator_s_edit_stays_until_the_code_changes(app: Celery, database: Database) -> None:
    database.start(in_code(app))
    database.docs['x'].update(args=[7], enabled=False)
    assert database.start(in_code(app)) == []
    assert database.start(in_code(app, args=(8,))) == ['x']
    doc = database.docs['x']
    assert (doc['args'], doc['enabled']) == ([8], False)


def test_edited_entry_is_marked_until_it_is_as_in_the_code(app: Celery, database: Database) -> None:
    database.start(in_code(app, options={'missed': 'skip', 'queue': 'q'}))
    doc = database.docs['x']
    for edit, edited in (({'enabled': False}, False), ({'args': [7]}, True), ({'schedule': {'every': 5}}, True)):
        assert Entry.of('x', {**doc, **edit}, app).edited == edited
        assert not Entry.of('x', {**doc, **edit, 'source': 'database'}, app).edited
    entry = in_code(app)
    anew = CodeEntry('x', entry, description_of(entry)).document(
        {**doc, 'args': [7], 'enabled': False}, 'beat:entry:', 5
    )
    assert (anew['args'], anew['enabled'], anew['start'], anew['_rev']) == ([], False, 1100.0, doc['_rev'])
    assert not Entry.of('x', anew, app).edited


def test_removed_entry_is_kept_and_comes_back(app: Celery, database: Database) -> None:
    database.start(in_code(app), in_code(app, 'y'))
    database.docs['y']['enabled'] = False
    assert sorted(database.start()) == ['x', 'y']
    assert not Entry.of('x', database.docs['x'], app).enabled
    assert database.start() == []
    assert sorted(database.start(in_code(app), in_code(app, 'y'))) == ['x', 'y']
    assert Entry.of('x', database.docs['x'], app).enabled
    assert database.docs['x']['start'] == 1400.0  # nothing is sent for the time without it
    assert not Entry.of('y', database.docs['y'], app).enabled  # an operator has disabled it


def test_values_that_json_cannot_hold_stay_in_the_code(app: Celery) -> None:
    lazy = BeatLazyFunc(lambda: 5)
    entry = in_code(app, args=(lazy,), kwargs={'x': {1, 2}}, options={'queue': object()})
    doc = description_of(entry)
    assert doc == {'task': 't', 'schedule': {'every': 10.0}, 'code': ['args', 'kwargs', 'options']}
    found = Entry.of('x', {**doc, 'type': 'Schedule'}, app, CodeEntry('x', entry, doc))
    assert found.args == (lazy,)
    assert found.kwargs == {'x': {1, 2}}
    assert 'options' not in description_of(in_code(app, options={'queue': object()}))


def test_starting_deadline_of_crontabs(app: Celery) -> None:
    app.conf.beat_cron_starting_deadline = 300
    doc = description_of(in_code(app, schedule=crontab(app=app)))
    assert (doc['missed'], doc['grace']) == ('skip', 300)
    assert 'missed' not in description_of(in_code(app))
