"""The scheduler and its documents in one process: crashes, conflicts, outages, requests, the API and the commands."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab
from click.testing import Result

from celery_couchdb.beat import Schedules
from celery_couchdb.beat.entries import task_id_of
from celery_couchdb.beat.scheduler import Messages
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError, Conflict, NotFound, ServerUnavailable
from kombu_couchdb.leases.leader import RENEWAL_SECONDS
from kombu_couchdb.queues.store import Store
from tests.conftest import wait_for
from tests.support import Request, items, replace_in_clients

from .conftest import Beat, Machine, command_of, entry_of, until, until_idle


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
        for _ in range(5):
            crashing = beat(**code)
            with pytest.raises(KeyboardInterrupt):
                until(crashing, lambda: False)
            assert {doc['message']['properties']['correlation_id'] for doc in items(client)} == wanted
            crashing.close()
    client.bulk([{'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True} for doc in items(client)])
    last = beat(**code)
    until(last, lambda: [state['count'] for state in states(client)] == [1, 1, 1])
    assert items(client) == []
    assert {state['task_id'] for state in states(client)} == wanted


def test_leader_that_was_paused_sends_nothing(beat: Beat, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused after it has checked its lease; meanwhile another one sends and notes, and the task is done."""
    first = beat(a=entry_of())
    until(first, lambda: states(client))
    publish = Store.publish_once

    def pause(self: Store, docs: Any) -> Any:
        monkeypatch.setattr(Store, 'publish_once', publish)
        client.put({**client.get('broker:leader:beat'), 'holder': None})
        second = beat(a=entry_of())
        until(second, lambda: states(client)[0]['count'] == 1)
        [sent] = items(client)
        client.bulk([{'_id': sent['_id'], '_rev': sent['_rev'], '_deleted': True}])
        return publish(self, docs)

    first.close()
    due_now(client, 'a')
    first = beat(a=entry_of())
    monkeypatch.setattr(Store, 'publish_once', pause)
    until(first, lambda: Store.publish_once is publish)
    assert items(client) == []
    assert states(client)[0]['count'] == 1


def test_entries_that_are_due_together_are_sent_together(beat: Beat, client: Client, sent: list[Request]) -> None:
    code = {f'e{n}': entry_of(args=(n,)) for n in range(40)}
    until(beat(**code), lambda: len(states(client)) == 40)
    client.put({**client.get('broker:leader:beat'), 'holder': None})
    due_now(client, *code)
    second = beat(**code)
    sent.clear()
    until(second, lambda: len(items(client)) == 40)
    publishing = [request for request in sent if any(doc.get('type') == 'WorkItem' for doc in request.docs)]
    noting = [request for request in sent if any(doc.get('type') == 'ScheduleState' for doc in request.docs)]
    # A slow machine may need a second round.
    assert max(len(publishing), len(noting)) <= 3


def test_idle_leader_makes_no_requests(beat: Beat, client: Client, machine: Machine, sent: list[Request]) -> None:
    """In a minute in which nothing is due, but for the renewals of its lease."""
    count = 2500
    docs = [
        {'_id': f'beat:entry:{n}', 'type': 'Schedule', 'task': 'add', 'schedule': {'every': 3600}} for n in range(count)
    ]
    client.bulk(docs)
    scheduler = beat()
    until_idle(scheduler, 60)
    wait_for(lambda: [request for request in sent if request.path == '/_changes'], 'the feed')
    sent.clear()
    for _ in range(60):
        machine.ahead += 1.0
        scheduler.tick()
    assert len(sent) >= 60 / RENEWAL_SECONDS - 1
    assert all(request.docs and request.docs[0].get('type') == 'Leader' for request in sent)
    assert len(states(client)) == count


def test_state_that_somebody_else_writes(beat: Beat, client: Client) -> None:
    """The leader's note is in conflict; then it goes on from what is stored."""
    scheduler = beat(a=entry_of(0.2))
    until(scheduler, lambda: states(client) and states(client)[0]['count'] >= 1)
    state = client.get('beat:state:a')
    while (rev := client.try_put({**state, 'count': 1000, 'due': state['due'] + 3600})) is None:
        state = client.get('beat:state:a')
    assert rev
    until_idle(scheduler, 3000)
    client.put({'_id': 'beat:state:a', '_rev': rev, '_deleted': True})
    client.put({**client.get('beat:entry:a'), 'schedule': {'every': 0.3}})
    until(scheduler, lambda: states(client) and states(client)[0]['count'] >= 1, 'a state that begins anew')


def test_due_date_that_cannot_be_sent(beat: Beat, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """It is noted, and the others are sent."""
    code = {
        'good': entry_of(),
        'set': entry_of(args=({1, 2},)),
        'queue': entry_of(options={'queue': 'x' * 600}),
        'huge': entry_of(args=(BeatLazyFunc(lambda: 'x' * 20_000_000),), options={'headers': {'x': 'x' * 7_000_000}}),
    }
    until(beat(**code), lambda: len(states(client)) == 4)
    client.put({**client.get('broker:leader:beat'), 'holder': None})
    due_now(client, *code)
    second = beat(**code)
    until(second, lambda: all(state['count'] + state['skipped'] for state in states(client)))
    found = {state['_id'].rpartition(':')[2]: (state['count'], state['error']) for state in states(client)}
    assert found['good'] == (1, None)
    assert 'not JSON serializable' in found['set'][1]
    assert 'must be text of at most 500 bytes' in found['queue'][1]
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


def test_broken_entries_of_the_code_are_left_out(beat: Beat, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    until(beat(a=entry_of(), b={'task': 'add'}, c={'x': 5}), lambda: states(client))
    assert [state['_id'] for state in states(client)] == ['beat:state:a']
    assert caplog.text.count('is malformed and not used') == 2


def test_two_apps_in_one_database(beat: Beat, app: Celery, client: Client) -> None:
    first = beat(a=entry_of())
    until(first, lambda: states(client))
    app.conf.broker_transport_options = {**app.conf.broker_transport_options, 'schedule_name': 'blog'}
    second = beat(b=entry_of())
    until(second, lambda: client.get_or_none('beat-blog:state:b'))
    assert [item.name for item in Schedules(app).list()] == ['b']
    assert client.get('beat:entry:a').get('removed') is None


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


def test_commands(run: Callable[..., Result], client: Client) -> None:
    def fails(words: str, *given: str) -> None:
        done = run(*given)
        assert done.exit_code in (1, 2), done.output
        assert words in done.stderr

    assert 'There are none' in run('list').stdout
    done = run(
        'add', 'books', 'shop.close', '--crontab', '30 3 * * *', '--timezone', 'Europe/Berlin', '--args', '["x"]'
    )
    assert done.exit_code == 0, done.output
    assert '{"crontab": "30 3 * * *", "timezone": "Europe/Berlin"}' in done.stdout
    assert (
        '{"crontab": "0 4 * * *", "timezone": "Europe/Berlin"}' in run('edit', 'books', '--crontab', '0 4 * * *').stdout
    )
    run('add', 'often', 'shop.look', '--every', '15m', '--missed', 'skip', '--disabled')
    run('add', 'once', 'shop.look', '--at', '2099-01-01T00:00:00Z')
    listed = run('list').stdout.splitlines()
    assert [line.split()[0] for line in listed] == ['NAME', 'books', 'often', 'once']
    assert listed[2].endswith('disabled')
    assert '2099' in listed[3] or '2098' in listed[3]
    shown = json.loads(run('show', 'books', '--json').stdout)
    assert (len(shown['next']), shown['args'], shown['state']) == (5, ['x'], 'active')
    assert [json.loads(line)['name'] for line in run('list', '--json').stdout.splitlines()] == [
        'books',
        'often',
        'once',
    ]
    assert run('edit', 'often', '--every', '1h', '--options', '{"queue": "slow"}').exit_code == 0
    assert client.get('beat:entry:often')['schedule'] == {'every': 3600.0}
    assert run('enable', 'often').stdout == 'often: enabled\n'
    assert run('disable', 'often', 'once').stdout == 'often: disabled\nonce: disabled\n'
    assert run('run', 'often').stdout.startswith('often: sent ')
    assert [doc['queue'] for doc in items(client)] == ['slow']
    assert run('delete', 'once', answer='n\n').exit_code == 1
    assert run('delete', 'once', 'often', '--yes').stdout == 'once: deleted\noften: deleted\n'
    fails("there is no schedule entry 'once'\n", 'show', 'once')
    fails("there is no schedule entry 'once'", 'delete', 'books', 'once', '--yes')
    assert client.get_or_none('beat:entry:books')
    fails('give one of --every, --crontab, --at and --solar', 'add', 'x', 'y')
    fails('exactly one of the members', 'add', 'x', 'y', '--every', '5', '--at', '2099-01-01')
    fails('give a number and a unit, such as 90s', 'add', 'x', 'y', '--every', 'soon')
    fails('it must be a list in JSON', 'add', 'x', 'y', '--every', '5', '--args', 'a')
    fails('it must be a list in JSON', 'add', 'x', 'y', '--every', '5', '--args', '{}')
    fails('--timezone needs --crontab or --at', 'edit', 'books', '--timezone', 'UTC')
    fails('nothing to change', 'edit', 'books')
    fails('--solar must be an event', 'add', 'x', 'y', '--solar', 'sunset')


def test_malformed_entries_in_the_list(run: Callable[..., Result], client: Client) -> None:
    malformed: dict[str, dict[str, Any]] = {
        'a\x1b[2J': {'schedule': {'crontab': '* *'}, 'type': 'Schedule', 'task': 'x'},
        'b': {'type': 'Schedule', 'task': ['\n'], 'schedule': 7},
        'c': {},
        **{
            f'd{number}': {'type': 'Schedule', 'task': 'x', 'schedule': {'every': 5}, 'start': start}
            for number, start in enumerate(['', [], {}, False, {'a': 1}, [5], 1e300])
        },
    }
    for name, members in malformed.items():
        client.put({'_id': f'beat:entry:{name}', **members})
    done = run('list')
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert 'malformed: schedule.crontab must be text with five fields' in lines[1]
    assert '\x1b' not in done.stdout
    assert 'malformed: task must be the name of a task' in lines[2]
    assert 'malformed: type must be "Schedule"' in lines[3]
    assert all('malformed: start must be a date' in line for line in lines[4:])
    for name in malformed:
        assert run('show', name).exit_code == 0
    assert 'is malformed' in run('run', 'c').stderr
    assert run('disable', 'b').exit_code == 0
