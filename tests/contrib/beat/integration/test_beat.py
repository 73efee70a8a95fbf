"""The scheduler in one process: crashes, outages, clocks, much that is due, edits, the API and the commands."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, schedule
from click.testing import Result

from celery_couchdb.contrib.beat import Schedules
from celery_couchdb.contrib.beat.entries import Entry, new_state, task_id_of
from celery_couchdb.contrib.beat.scheduler import Messages
from kombu_couchdb.admin import queues
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import Shared
from kombu_couchdb.errors import (
    AccessDenied,
    ConfigurationError,
    Conflict,
    DatabaseMissing,
    NotFound,
    ServerUnavailable,
)
from kombu_couchdb.leases.leader import LEASE_SECONDS
from tests.conftest import wait_for
from tests.integration.conftest import Beat, Machine, entry_of, until, until_idle
from tests.support import Request, command_of, items, replace_in_clients


@pytest.fixture
def run(app: Celery) -> Callable[..., Result]:
    """A function that runs `celery -A app couchdb schedule …`."""
    return partial(command_of(app), 'schedule')


def due_now(client: Client, *names: str, ago: float = 1.0) -> None:
    """Change the states of entries as if they were due since `ago` seconds."""
    for name in names:
        state, due = client.get(f'beat:state:{name}'), round(client.clock.now() - ago, 3)
        client.put({**state, 'due': due, 'anchor': due - 3600})


def states(client: Client) -> list[dict[str, Any]]:
    return [row['doc'] for row in client.id_range('beat:state:', docs=True)]


@pytest.mark.parametrize('protocol', [1, 2])
def test_crash_between_sending_and_noting(
    beat: Beat, app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """A task that was sent is not sent again, neither while it waits nor after it was completed and deleted."""
    app.conf.task_protocol = protocol
    code = {name: entry_of() for name in 'abc'}
    first = beat(**code)
    until(first, lambda: len(states(client)) == 3)
    first.close()
    due_now(client, *'abc')
    wanted = {task_id_of(state, state['due']) for state in states(client)}  # type: ignore[arg-type]

    send = Messages.send

    def crash(self: Messages, calls: Any, seconds: float) -> None:
        send(self, calls, seconds)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Messages, 'send', crash)

        def crash_sends_all() -> bool:
            crashing = beat(**code)
            with pytest.raises(KeyboardInterrupt):
                until(crashing, lambda: False)
            crashing.close()
            return {doc['message']['properties']['correlation_id'] for doc in items(client)} == wanted

        for _ in range(2):  # a slow machine may send some only
            wait_for(crash_sends_all, 'all to be sent')
    client.bulk([{'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True} for doc in items(client)])
    last = beat(**code)
    until(last, lambda: [state['count'] for state in states(client)] == [1, 1, 1])
    assert items(client) == []
    assert {state['task_id'] for state in states(client)} == wanted


def test_idle_leader_makes_no_requests(beat: Beat, client: Client, machine: Machine, sent: list[Request]) -> None:
    """In a minute in which nothing is due, but for the renewals of its lease."""
    entry = {'type': 'Schedule', 'task': 'add', 'schedule': {'every': 3600}}
    client.bulk([{'_id': f'beat:entry:{number}', **entry} for number in range(300)])
    scheduler = beat()
    until_idle(scheduler, 60)
    wait_for(lambda: [request for request in sent if request.path == '/_changes'], 'the feed')
    sent.clear()
    for _ in range(60):
        machine.ahead += 1.0
        scheduler.tick()
    assert len(sent) >= 60 / (LEASE_SECONDS / 3) - 1
    assert all(request.docs and request.docs[0].get('type') == 'Leader' for request in sent)
    assert len(states(client)) == 300


def test_due_date_that_cannot_be_sent(beat: Beat, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """It is noted, and the others are sent."""
    code = {
        'good': entry_of(),
        'set': entry_of(args=({1, 2},)),
        'queue': entry_of(options={'queue': 'x' * 600}),
        'paused': entry_of(options={'queue': 'refusing'}),
        'huge': entry_of(args=(BeatLazyFunc(lambda: 'x' * 20_000_000),), options={'headers': {'x': 'x' * 7_000_000}}),
    }
    queues.pause(client, 'refusing', refuse=True)
    until(beat(**code), lambda: len(states(client)) == 5)
    client.put({**client.get('broker:leader:beat'), 'holder': None})
    due_now(client, *code)
    second = beat(**code)
    until(second, lambda: all(state['count'] + state['skipped'] for state in states(client)))
    found = {state['_id'].rpartition(':')[2]: (state['count'], state['error']) for state in states(client)}
    assert found['good'] == (1, None)
    assert 'not JSON serializable' in found['set'][1]
    assert 'must be text of at most 500 bytes' in found['queue'][1]
    assert "queue 'refusing' is paused and takes no new messages" in found['paused'][1]
    assert 'a due date of schedule entry set was not sent' in caplog.text
    good = [doc for doc in items(client) if len(str(doc['message'])) < 5000]
    assert len(good) == 1


def test_outage(
    beat: Beat, client: Client, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The beat says so once, goes on, and sends afterwards what was due meanwhile."""
    caplog.set_level(logging.INFO)
    scheduler = beat(a=entry_of(0.5))
    scheduler.max_interval = 1.0

    def away(self: Client, *args: Any, **kwargs: Any) -> None:
        raise ServerUnavailable('the server is away')

    with monkeypatch.context() as patched:
        replace_in_clients(patched, database, 'request', away)
        for _ in range(3):
            scheduler.tick()
    until(scheduler, lambda: states(client) and states(client)[0]['count'] >= 1)
    before = states(client)[0]
    with monkeypatch.context() as patched:
        replace_in_clients(patched, database, 'request', away)
        for _ in range(4):
            scheduler.tick()
    until(scheduler, lambda: states(client)[0]['count'] >= before['count'] + 4)
    after = states(client)[0]
    assert after['skipped'] == 0
    assert len(items(client)) == after['count']
    assert caplog.text.count('no tasks are scheduled just now') == 2


def test_two_apps_in_one_database(beat: Beat, app: Celery, client: Client) -> None:
    first = beat(a=entry_of())
    until(first, lambda: states(client))
    app.conf.broker_transport_options = {**app.conf.broker_transport_options, 'schedule_name': 'blog'}
    second = beat(b=entry_of())
    until(second, lambda: client.get_or_none('beat-blog:state:b'))
    assert [item.name for item in Schedules(app).list()] == ['b']
    assert client.get('beat:entry:a').get('removed') is None


def test_edited_entry_is_not_sent_before_its_edit_is_taken_over(
    beat: Beat, schedules: Schedules, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If thousands are edited at once, that takes several rounds."""
    schedules.add('a', 'add', 1)
    scheduler = beat()
    until(scheduler, lambda: items(client))
    assert scheduler._led is not None
    duty: Any = scheduler._led.duty
    with monkeypatch.context() as patched:
        patched.setattr(duty, '_plan', lambda: None)
        schedules.disable('a')
        until(scheduler, lambda: 'a' in duty._unread, 'the edit to be reported')
        [state], count = states(client), len(items(client))
        until(scheduler, lambda: client.clock.now() > state['due'] + 1, 'the due date')
        assert len(items(client)) == count
    until(scheduler, lambda: states(client)[0]['due'] is None)
    assert len(items(client)) == count


def test_entry_that_another_process_adds_at_the_same_time(
    schedules: Schedules, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is refused, so that nobody believes that an entry is stored that is not."""
    write = schedules.client.write_anew

    def write_late(doc: Any, tombstone: Any) -> str:
        rev = write(doc, tombstone)
        other = {**doc, 'task': 'other', '_rev': '1-' + 32 * 'f', '_revisions': {'start': 1, 'ids': [32 * 'f']}}
        client.request('POST', '/_bulk_docs', body={'docs': [other], 'new_edits': False})
        return rev

    monkeypatch.setattr(schedules.client, 'write_anew', write_late)
    with pytest.raises(Conflict, match="there is a schedule entry 'a' already"):
        schedules.add('a', 'add', 5)
    assert [item.entry.task for item in schedules.list()] == ['other']
    assert '_conflicts' not in client.request('GET', '/beat:entry:a', {'conflicts': True})


def test_functions(schedules: Schedules, app: Celery, client: Client) -> None:
    schedules.add('a', 'add', crontab(minute='5', app=app), args=(1,), options={'queue': 'q'})
    with pytest.raises(Conflict, match="there is a schedule entry 'a' already"):
        schedules.add('a', 'add', 5)
    with pytest.raises(ConfigurationError, match='every must be a number'):
        schedules.add('b', 'add', -5)
    with pytest.raises(ConfigurationError, match="'argz' is not a member"):
        schedules.edit('a', argz=5)
    with pytest.raises(ConfigurationError, match='can hold'):
        schedules.edit('a', args=[{1, 2}])
    with pytest.raises(NotFound, match="no schedule entry 'b'"):
        schedules.get('b')
    edited = schedules.edit('a', schedule=90)
    assert edited.entry.doc['schedule'] == {'every': 90}
    assert edited.upcoming(0)[0] == pytest.approx(client.clock.now() + 90, abs=60)
    result = schedules.run('a')
    [sent] = items(client)
    assert (sent['queue'], sent['message']['headers']['id']) == ('q', result.id)
    assert sent['message']['headers']['celery_beat_task'] is True
    schedules.disable('a')
    assert schedules.get('a').upcoming(0) == []
    schedules.enable('a')
    schedules.delete('a')
    assert schedules.list() == []


def test_entries_of_the_code(schedules: Schedules, beat: Beat, client: Client) -> None:
    beat_with = beat(a=entry_of())
    until(beat_with, lambda: states(client))
    with pytest.raises(ConfigurationError, match='is in the code of the app'):
        schedules.delete('a')
    beat_with.close()
    until(beat(), lambda: client.get('beat:entry:a').get('removed'))
    assert not schedules.get('a').entry.enabled
    assert schedules.enable('a').entry.enabled
    schedules.delete('a')


def test_deleted_entry_of_the_code_is_written_again(
    beat: Beat, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = beat(a=entry_of(), b=entry_of())
    until(scheduler, lambda: len(states(client)) == 2)
    client.bulk([deletion(client.get('beat:entry:a'))])
    until(scheduler, lambda: client.get_or_none('beat:entry:a') and client.get_or_none('beat:state:a'))
    assert 'schedule entry a was deleted and is written again' in caplog.text


def test_edited_entry_of_the_code_is_marked_and_reset(beat: Beat, run: Callable[..., Result], client: Client) -> None:
    scheduler = beat(a=entry_of(), b=entry_of())
    until(scheduler, lambda: len(states(client)) == 2)
    before = client.get('beat:entry:a')
    run('edit', 'a', '--args', '[7]')
    assert ['active, not as in the code' in line for line in run('list').stdout.splitlines()[1:]] == [
        True,
        False,
    ]
    assert json.loads(run('show', 'a', '--json').stdout)['edited'] is True
    assert run('reset', 'a').stdout == 'a: as in the code\n'
    after = client.get('beat:entry:a')
    assert {**after, '_rev': ''} == {**before, '_rev': ''}
    assert "the schedule entry 'c' of beat_schedule does not exist" in run('reset', 'c').stderr
    run('add', 'c', 'add', '--every', '60')
    assert 'does not exist' in run('reset', 'c').stderr


def test_commands(run: Callable[..., Result], client: Client) -> None:
    def fails(words: str, *given: str) -> None:
        done = run(*given)
        assert done.exit_code in (1, 2), done.output
        assert words in done.stderr

    assert 'There is no schedule' in run('list').stdout
    done = run(
        'add', 'books', 'shop.close', '--crontab', '30 3 * * *', '--timezone', 'Europe/Berlin', '--args', '["x"]'
    )
    assert done.exit_code == 0, done.output
    assert '{"crontab": "30 3 * * *", "timezone": "Europe/Berlin"}' in done.stdout
    assert 'at 03:30 every day, Europe/Berlin' in done.stdout
    assert '{"crontab": "0 4 * * *", "timezone"' in run('edit', 'books', '--crontab', '0 4 * * *').stdout
    run('add', 'often', 'shop.look', '--every', '15m', '--missed', 'skip', '--disabled')
    run('add', 'once', 'shop.look', '--at', '2099-01-01T00:00:00Z')
    listed = run('list').stdout.splitlines()
    assert [line.split()[0] for line in listed] == ['NAME', 'books', 'often', 'once']
    assert listed[2].endswith('disabled')
    assert '2099' in listed[3] or '2098' in listed[3]
    shown = json.loads(run('show', 'books', '--json').stdout)
    assert (len(shown['next']), shown['args'], shown['state']) == (5, ['x'], 'active')
    entries = [json.loads(line) for line in run('list', '--json').stdout.splitlines()]
    assert [(entry['name'], entry['rule'], len(entry['next'])) for entry in entries] == [
        ('books', 'at 04:00 every day, Europe/Berlin', 3),
        ('often', 'every 15 minutes', 0),
        ('once', 'once at 2099-01-01 00:00 UTC', 1),
    ]
    assert run('edit', 'often', '--every', '1h', '--options', '{"queue": "slow"}').exit_code == 0
    assert client.get('beat:entry:often')['schedule'] == {'every': 3600.0}
    assert run('enable', 'often').stdout == 'often: enabled\n'
    assert run('disable', 'often', 'once').stdout == 'often: disabled\nonce: disabled\n'
    assert run('run', 'often').stdout.startswith('often: sent ')
    assert [doc['queue'] for doc in items(client)] == ['slow']
    assert run('delete', 'once', answer='n\n').exit_code == 1
    assert run('delete', 'once', 'often', '--yes').stdout == 'once: deleted\noften: deleted\n'
    fails("there is no schedule entry 'once'", 'delete', 'books', 'once', '--yes')
    assert client.get_or_none('beat:entry:books')
    fails('give one of --every, --crontab, --at and --solar', 'add', 'x', 'y')
    fails('give a number and a unit, such as 90s', 'add', 'x', 'y', '--every', 'soon')
    fails('it must be a list in JSON', 'add', 'x', 'y', '--every', '5', '--args', '{}')
    assert '"crontab": "0 4 * * *", "timezone": "UTC"' in run('edit', 'books', '--timezone', 'UTC').stdout
    ends = ('--start', '2026-01-01T00:30Z', '--until', '2099-01-01', '--times', '3')
    run('add', 'hourly', 'shop.look', '--every', '1h', *ends)
    fails('a time zone needs a crontab or a date', 'edit', 'hourly', '--timezone', 'UTC')
    assert {'start': 1_767_227_400, 'times': 3}.items() <= client.get('beat:entry:hourly').items()
    fails('until must be a date', 'edit', 'hourly', '--until', 'never')
    fails('nothing would be sent: its schedule has no date from now on', 'edit', 'hourly', '--until', '2026-01-01')
    fails('nothing would be sent', 'add', 'x', 'y', '--at', '2020-01-01T00:00')
    fails("is it 'queue'", 'add', 'x', 'y', '--every', '5', '--options', '{"queu": "q"}')
    fails('options.expires must be', 'add', 'x', 'y', '--every', '5', '--options', '{"expires": "soon"}')
    assert client.get_or_none('beat:entry:x') is None
    fails('nothing to change', 'edit', 'books')
    fails('solar must be an event', 'add', 'x', 'y', '--solar', 'sunset')


def test_run_is_the_last_task_of_an_entry(beat: Beat, schedules: Schedules, client: Client) -> None:
    """The leader goes on with the state that it did not write: it sends the next due date once."""
    schedules.add('a', 'add', 1, grace=3600)
    scheduler = beat()
    until(scheduler, lambda: by_name(client).get('a', {}).get('count'))
    for _ in range(2):
        result = schedules.run('a')
        assert by_name(client)['a']['task_id'] == result.id
        before = by_name(client)['a']['count']
        until(scheduler, lambda: by_name(client)['a']['count'] >= before + 2)  # noqa: B023
    state = by_name(client)['a']
    assert state['count'] == round((state['last'] - state['anchor']) / 1) == len(items(client)) - 2


def test_entries_that_are_done_are_deleted_after_a_week(
    beat: Beat, schedules: Schedules, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = client.clock.now()
    for name, ago in (('old', 8 * DAY), ('new', 6 * DAY)):
        schedules.add(name, 'add', {'at': now + 3600}, start=now - 9 * DAY, missed='skip')
        client.put({**client.get(f'beat:entry:{name}'), 'schedule': {'at': now - ago}})
    schedules.add('going on', 'add', 3600, start=now - 9 * DAY)
    scheduler = beat(code=entry_of(options={'queue': 'q'}))
    until(scheduler, lambda: client.get_or_none('beat:entry:old') is None and 'old' not in by_name(client))
    assert by_name(client).keys() == {'new', 'going on', 'code'}
    true = client.clock.now
    monkeypatch.setattr(client.clock, 'now', lambda: true() + 2 * DAY)
    until(scheduler, lambda: 'new' not in by_name(client))
    assert by_name(client).keys() == {'going on', 'code'}


def test_list_tells_whether_a_beat_runs(run: Callable[..., Result], beat: Beat, client: Client) -> None:
    run('add', 'a', 'add', '--every', '60')
    none = 'No beat runs: start "celery -A your_app beat -S couchdb".'
    assert (run('list').stderr, run('show', 'a').stderr) == (f'{none}\n', f'{none}\n')
    assert not run('list', '--json').stderr
    scheduler = beat()
    until(scheduler, lambda: states(client))
    assert not run('list').stderr
    scheduler.close()
    assert re.fullmatch(rf'{none} One ran \d+ s ago\.\n', run('list').stderr)
    client.put({**client.get('broker:leader:beat'), 'holder': 'killed:1:x', 'date': client.clock.now() - 3700})
    assert run('list').stderr == f'{none} One ran 1 h 1 m ago.\n'


@pytest.fixture
def shop(app: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules that the app includes, and nobody has imported: the second one fails."""
    task = "from celery import shared_task\n@shared_task(name='shop.close', queue='slow')\ndef close(): pass\n"
    (tmp_path / 'shop_tasks.py').write_text(task)
    (tmp_path / 'shop_broken.py').write_text("raise LookupError('no rates')")
    monkeypatch.syspath_prepend(tmp_path)
    app.conf.include = ['shop_tasks', 'shop_broken']
    yield
    sys.modules.pop('shop_tasks', None)


@pytest.mark.usefixtures('shop')
def test_tasks_that_the_app_does_not_know(
    run: Callable[..., Result], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    run('add', 'good', 'shop.close', '--every', '60')
    run('add', 'misspelt', 'shop.clsoe', '--every', '60')
    run('add', 'off', 'shop.clsoe', '--every', '60', '--disabled')
    assert [json.loads(line)['known'] for line in run('list', '--json').stdout.splitlines()] == [True, False, False]
    warning = 'active, but the app does not know this task: it is not imported here, or the name is wrong'
    listed = run('list').stdout.splitlines()[1:]
    assert listed[0].endswith('  active')
    assert listed[1].endswith(f'  {warning}')
    assert listed[2].endswith('  disabled')
    assert warning in run('show', 'misspelt').stdout
    assert "not all modules of the app can be imported: LookupError('no rates')" in caplog.text
    run('run', 'good', 'misspelt')
    assert sorted(doc['queue'] for doc in items(client)) == ['celery', 'slow']


# -- interruptions


DAY = 86400.0


def by_name(client: Client) -> dict[str, Any]:
    return {row['id'].removeprefix('beat:state:'): row['doc'] for row in client.id_range('beat:state:', docs=True)}


def add(client: Client, count: int, schedule: Any, due_ago: float, prefix: str = 'e', **members: Any) -> None:
    """Store entries whose states are due since `due_ago` seconds, as a beat that was stopped then has left them."""
    due = round(client.clock.now() - due_ago)
    entry: Any = {'type': 'Schedule', 'task': 'add', 'schedule': schedule, 'args': [1, 1], 'start': due - 60, **members}
    plan = Entry.of('e', entry, Celery('shop', set_as_current=False)).plan
    names = [f'{prefix}{number}' for number in range(count)]
    client.bulk([{'_id': f'beat:entry:{name}', **entry} for name in names])
    changes = {'plan': plan, 'anchor': due - 60, 'due': due}
    client.bulk([{**new_state(f'beat:state:{name}'), **changes} for name in names])


def delete(client: Client, schedules: Schedules, how: str) -> None:
    """Delete the entry `e0` or its state, and write the entry again with the same `start`."""
    docs = {kind: client.get(f'beat:{kind}:e0') for kind in ('entry', 'state')}
    if how == 'damaged':
        client.put({**docs['state'], 'count': 'x'})
    elif how == 'functions':
        schedules.delete('e0')
    else:
        client.bulk([deletion(docs[kind]) for kind in how.split(' and ')])
    if client.get_or_none('beat:entry:e0') is None:
        client.put({name: value for name, value in docs['entry'].items() if name != '_rev'})


@pytest.mark.parametrize('how', ['state', 'damaged', 'entry', 'entry and state', 'functions'])
def test_entry_that_is_written_anew_sends_nothing_again(
    beat: Beat, client: Client, schedules: Schedules, how: str
) -> None:
    """The leader was told of it, or another one begins to lead."""
    add(client, 1, {'every': 3600}, due_ago=2)
    scheduler = beat()
    until(scheduler, lambda: by_name(client)['e0']['count'] == 1)
    for _ in range(2):
        delete(client, schedules, how)
        until_idle(scheduler, 10)
        scheduler.close()
        scheduler = beat()
        until(scheduler, lambda: by_name(client).get('e0', {}).get('plan'))
        until_idle(scheduler, 10)
        assert len(items(client)) == 1
        assert by_name(client)['e0']['due'] > client.clock.now()


@pytest.mark.parametrize('how', ['state', 'damaged'])
def test_leader_goes_on_without_the_state(beat: Beat, client: Client, schedules: Schedules, how: str) -> None:
    schedules.add('e0', 'add', 0.5, grace=3600)
    scheduler = beat()
    for _ in range(2):
        before = len(items(client))
        until(scheduler, lambda: len(items(client)) >= before + 3)  # noqa: B023
        until(scheduler, lambda: by_name(client).get('e0', {}).get('count') != 'x')
        delete(client, schedules, how)
    until(scheduler, lambda: by_name(client).get('e0', {}).get('count') not in ('x', None))
    scheduler.close()
    state = by_name(client)['e0']
    assert len(items(client)) == round((state['last'] - state['anchor']) / 0.5)


@pytest.mark.parametrize('step', [-DAY, 3600.0])
def test_step_of_the_machine_s_clock_changes_no_due_date(
    beat: Beat, client: Client, schedules: Schedules, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    schedules.add('later', 'add', {'at': client.clock.now() + 1800})
    schedules.add('often', 'add', 0.2, grace=1e9)
    scheduler = beat()
    until(scheduler, lambda: by_name(client).get('often', {'count': 0})['count'] >= 2)
    true = time.time
    monkeypatch.setattr(time, 'time', lambda: true() + step)
    before = by_name(client)['often']['count']
    until(scheduler, lambda: by_name(client)['often']['count'] >= before + 5)
    found = by_name(client)
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
    monkeypatch.setattr('kombu_couchdb.couchdb.server._servers', Shared({}))
    monkeypatch.setattr(time, 'time', lambda: true() + DAY)
    schedules = Schedules(app)
    assert abs(schedules.add('a', 'add', 60).entry.doc['start'] - now) < 60
    schedules.client.close()


def test_first_entry_creates_the_database_as_publishing_does(url: str) -> None:
    app = Celery('first', set_as_current=False, broker=url)
    app.conf.broker_transport_options = {'create_database': False}
    with pytest.raises(DatabaseMissing, match='the transport option create_database is off'):
        Schedules(app).add('a', 'add', 60)
    app.conf.broker_transport_options = {}
    Schedules(app).add('a', 'add', 60)
    app.send_task('add', [1, 2], ignore_result=True)
    assert [item.name for item in Schedules(app).list()] == ['a']


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
    until(scheduler, lambda: len(by_name(client)) == 2 and by_name(client)['other']['count'] >= 2, 'the other')
    for count in (1, 2):
        until(scheduler, lambda: by_name(client)['slow']['count'] == count, 'the slow one')  # noqa: B023
        assert slow.asked == count
        scheduler.close()
        due_now(client, 'slow')


def test_slow_arguments_keep_the_lead(
    beat: Beat, client: Client, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    add(client, 1, {'every': 1}, due_ago=40, grace=1e9)
    app_send = Celery.send_task

    def slow(*args: Any, **kwargs: Any) -> Any:
        machine.ahead += 2.0
        return app_send(*args, **kwargs)

    monkeypatch.setattr(Celery, 'send_task', slow)
    monkeypatch.setattr('celery_couchdb.contrib.beat.scheduler.time', machine)
    until(beat(), lambda: by_name(client)['e0']['count'] >= 40)
    assert 'does not lead any more' not in caplog.text
    assert set(Counter(doc['message']['headers']['id'] for doc in items(client)).values()) == {1}


def test_entries_that_are_due_together_are_sent_together(beat: Beat, client: Client, sent: list[Request]) -> None:
    add(client, 300, {'every': 3600}, due_ago=0)
    scheduler = beat()
    sent.clear()
    until(scheduler, lambda: sum(state['count'] for state in by_name(client).values()) == 300)
    assert len([request for request in sent if request.path == '/_bulk_docs']) < 15
    assert len(items(client)) == 300


@pytest.mark.parametrize('grace', [60, 1e9])
def test_what_is_due_now_does_not_wait_for_what_was_missed(beat: Beat, client: Client, grace: float) -> None:
    add(client, 50, {'crontab': '* * * * *', 'timezone': 'Europe/Berlin'}, due_ago=7 * DAY, grace=grace)
    add(client, 1, {'every': 3600}, due_ago=0, prefix='new')
    scheduler = beat()
    until(scheduler, lambda: client.get('beat:state:new0')['count'] == 1)
    assert sum(state['count'] for state in by_name(client).values()) < 10_000, 'of 504,000 dates'
    if grace == 60:
        until(scheduler, lambda: sum(state['count'] for state in by_name(client).values()) == 51)
        assert {state['skipped'] for name, state in by_name(client).items() if name != 'new0'} <= {10079, 10080, 10081}


def test_entry_that_is_disabled_while_its_missed_dates_are_sent(
    beat: Beat, client: Client, schedules: Schedules
) -> None:
    add(client, 1, {'every': 1}, due_ago=6000, grace=1e9)
    scheduler = beat()
    until(scheduler, lambda: by_name(client)['e0']['count'] >= 1)
    schedules.disable('e0')
    until(scheduler, lambda: by_name(client)['e0']['plan'] == 'disabled')
    assert by_name(client)['e0']['count'] == len(items(client)) < 6000


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
