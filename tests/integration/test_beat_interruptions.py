"""Beat while clocks step, the lead lapses, classes are slow, much is due at once, and people edit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from celery import Celery
from celery.schedules import schedule

from celery_couchdb.beat import Schedules
from celery_couchdb.beat.entries import Entry, new_state
from kombu_couchdb.couchdb.client import Client, chunks
from kombu_couchdb.couchdb.fork_safety import Shared
from kombu_couchdb.errors import AccessDenied
from tests.support import Request, items, replace_in_clients

from .conftest import Beat, Machine, entry_of, until, until_idle

DAY = 86400.0


def states(client: Client) -> dict[str, Any]:
    return {row['id'].removeprefix('beat:state:'): row['doc'] for row in client.id_range('beat:state:', docs=True)}


def add(client: Client, count: int, schedule: Any, due_ago: float, **members: Any) -> list[str]:
    """Store entries whose states are due since `due_ago` seconds, as a beat that was stopped then has left them."""
    now = client.clock.now()
    names = [f'e{number}' for number in range(count)]
    docs: list[Any] = [
        {'_id': f'beat:entry:{name}', 'type': 'Schedule', 'task': 'add', 'schedule': schedule, 'args': [1, 1]}
        | {'start': round(now - due_ago - 60), **members}
        for name in names
    ]
    plan = Entry.of('e', docs[0], Celery('shop', set_as_current=False)).plan
    docs += [
        {**new_state(f'beat:state:{name}', None), 'plan': plan, 'anchor': docs[0]['start'], 'due': round(now - due_ago)}
        for name in names
    ]
    for part in chunks(docs, 1000):
        client.bulk(part)
    return names


# -- clocks


@pytest.mark.parametrize('step', [-DAY, 3600.0])
def test_step_of_the_machine_s_clock_changes_no_due_date(
    beat: Beat, client: Client, schedules: Schedules, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    schedules.add('later', 'add', {'at': client.clock.now() + 1800})
    schedules.add('often', 'add', 0.2, missed='all')
    scheduler = beat()
    until(scheduler, lambda: states(client).get('often', {'count': 0})['count'] >= 2)
    true = time.time
    monkeypatch.setattr(time, 'time', lambda: true() + step)
    before = states(client)['often']['count']
    until(scheduler, lambda: states(client)['often']['count'] >= before + 10)
    found = states(client)
    assert (found['later']['count'], found['often']['skipped']) == (0, 0)
    counted = Counter(doc['message']['headers']['id'] for doc in items(client))
    assert set(counted.values()) == {1}
    assert len(counted) == round((found['often']['last'] - found['often']['anchor']) / 0.2)


def test_added_entry_begins_now_by_the_server_s_clock(
    app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process whose machine has a wrong clock, and that has not sent a request yet."""
    now = client.clock.now()
    true = time.time
    monkeypatch.setattr('kombu_couchdb.couchdb.clock._shared', Shared({}))
    monkeypatch.setattr(time, 'time', lambda: true() + DAY)
    schedules = Schedules(app)
    assert abs(schedules.add('a', 'add', 60).entry.doc['start'] - now) < 60
    schedules.client.close()


# -- the lead


class Slow(schedule):
    """A class that takes 22 seconds to answer."""

    machine: Machine
    asked = 0

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        self.machine.ahead += 22.0
        self.asked += 1
        return True, 3600


def test_class_that_takes_longer_than_the_lease_stops_nobody(beat: Beat, client: Client, machine: Machine) -> None:
    slow = Slow(3600)
    slow.machine = machine
    scheduler = beat({'slow': entry_of(slow), 'other': entry_of(0.2)})
    until(scheduler, lambda: len(states(client)) == 2 and states(client)['other']['count'] >= 2, 'the other')
    for count in (1, 2):
        until(scheduler, lambda: states(client)['slow']['count'] == count, 'the slow one')  # noqa: B023
        assert slow.asked == count
        scheduler.close()
        due_now(client, 'slow')


def due_now(client: Client, name: str) -> bool:
    state = client.get(f'beat:state:{name}')
    return client.try_put({**state, 'due': round(client.clock.now() - 1, 3)}) is not None


def test_slow_arguments_keep_the_lead(
    beat: Beat, client: Client, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    add(client, 1, {'every': 1}, due_ago=40, missed='all')
    app_send = Celery.send_task

    def slow(*args: Any, **kwargs: Any) -> Any:
        machine.ahead += 2.0
        return app_send(*args, **kwargs)

    monkeypatch.setattr(Celery, 'send_task', slow)
    monkeypatch.setattr('celery_couchdb.beat.scheduler.time', machine)
    until(beat(), lambda: states(client)['e0']['count'] >= 40)
    assert 'does not lead any more' not in caplog.text
    assert set(Counter(doc['message']['headers']['id'] for doc in items(client)).values()) == {1}


# -- much is due


def test_two_thousand_entries_in_one_second(
    beat: Beat, client: Client, sent: list[Request], caplog: pytest.LogCaptureFixture
) -> None:
    """Few requests, whatever the speed of the machine."""
    caplog.set_level(logging.INFO)
    add(client, 2000, {'every': 3600}, due_ago=0)
    scheduler = beat()
    sent.clear()
    began = time.monotonic()
    until(scheduler, lambda: sum(state['count'] for state in states(client).values()) == 2000)
    print(f'2,000 entries were sent in {time.monotonic() - began:.1f} s')
    writes = [request for request in sent if request.path == '/_bulk_docs']
    assert len(writes) < 30
    assert caplog.text.count('leads from now on') == 1
    assert len(items(client)) == 2000


@pytest.mark.parametrize('missed', ['once', 'all'])
def test_week_of_missed_dates_for_500_entries(beat: Beat, client: Client, sent: list[Request], missed: str) -> None:
    """What is due now does not wait for what was missed."""
    add(client, 500, {'crontab': '* * * * *', 'timezone': 'Europe/Berlin'}, due_ago=7 * DAY, missed=missed)
    client.put({'_id': 'beat:entry:new', 'type': 'Schedule', 'task': 'new', 'schedule': {'every': 3600}})
    state: Any = new_state('beat:state:new', None)
    doc = client.get('beat:entry:new')
    plan = Entry.of('new', doc, Celery('shop', set_as_current=False)).plan
    client.put({**state, 'plan': plan, 'anchor': 1.0, 'due': round(client.clock.now())})
    scheduler = beat()
    sent.clear()
    began = time.monotonic()
    until(scheduler, lambda: client.get('beat:state:new')['count'] == 1)
    print(f'{missed}: the new entry was sent {time.monotonic() - began:.1f} s after the start')
    assert sum(state['count'] for state in states(client).values()) < 10_000, 'of 5,040,000 dates'
    if missed == 'once':
        until(scheduler, lambda: sum(state['count'] for state in states(client).values()) == 501)
        assert {state['skipped'] for name, state in states(client).items() if name != 'new'} <= {10079, 10080, 10081}


def test_entry_that_is_disabled_while_its_missed_dates_are_sent(
    beat: Beat, client: Client, schedules: Schedules
) -> None:
    add(client, 1, {'every': 1}, due_ago=15_000, missed='all')
    scheduler = beat()
    until(scheduler, lambda: states(client)['e0']['count'] >= 500)
    schedules.disable('e0')
    until(scheduler, lambda: states(client)['e0']['plan'] == 'disabled')
    assert states(client)['e0']['count'] == len(items(client)) < 10_000


# -- edits


def test_names_of_any_kind_in_the_code(beat: Beat, client: Client, app: Celery, schedules: Schedules) -> None:
    """Celery allows any object. Without a name, that of a periodic task is the text of its signature."""
    app.add_periodic_task(3600, app.signature('add', args=['x' * 5000]))
    app.add_periodic_task(3600, app.signature('add', args=['x' * 5001]))
    scheduler = beat({1: entry_of(), '\udc80': entry_of(), **app.conf.beat_schedule})
    until(scheduler, lambda: len(states(client)) == 3)
    found = schedules.list()
    assert [item.error for item in found] == [None] * 3
    assert {len(item.name) for item in found} == {1, 178}
    scheduler.close()
    again = beat(app.conf.beat_schedule)
    until_idle(again, 60)
    assert len(states(client)) == 3
    assert not any(item.entry.doc.get('removed') for item in schedules.list())


def test_error_of_an_entry_in_the_code_is_that_of_this_entry(
    beat: Beat, client: Client, schedules: Schedules, app: Celery
) -> None:
    first = beat({'a': entry_of(), 'b': entry_of()})
    until(first, lambda: len(states(client)) == 2)
    first.close()
    second = beat({'a': {'task': 'add', 'schedule': object(), 'args': 5}, 'b': entry_of(0.2)})
    until(second, lambda: states(client)['b']['count'] > 1)
    assert 'in the code of the app' in str(schedules.get('a').error)
    assert not client.get('beat:entry:a').get('removed')
    assert [item.error is None for item in schedules.list()] == [False, True]


def test_error_that_counts_seconds_is_logged_once(
    beat: Beat, client: Client, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, seconds = beat({'a': entry_of()}), iter(range(60, 0, -1))

    def locked(self: Client, *args: Any, **kwargs: Any) -> None:
        raise AccessDenied(f'the password is wrong; the next attempt is in {next(seconds)} s')

    replace_in_clients(monkeypatch, database, 'request', locked)
    for _ in range(5):
        scheduler.tick()
    assert caplog.text.count('no tasks are scheduled just now') == 1
