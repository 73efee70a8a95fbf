"""The command `show`: where a task is, and all that is known of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from celery import Celery, chord
from celery.app.task import Context

from celery_couchdb.jobs import Jobs
from kombu_couchdb.admin import jobs
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases import lease
from tests.support import Inbox, items

from .conftest import Connect, Run, kill_all


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker answers."""
    monkeypatch.setattr(Jobs, 'workers', lambda known, task_id: {})


def shown(run: Run, name: str) -> dict[str, Any]:
    done = run('show', name, '--json')
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def details(run: Run, name: str) -> dict[str, str]:
    """Return the lines of the details, by their names; lines of longer texts are joined."""
    found, name_of = dict[str, str](), ''
    for line in run('show', name).stdout.splitlines():
        if line.startswith('  '):
            found[name_of] += line
        else:
            name_of, _, text = line.partition(' ')
            found[name_of] = text.strip()
    return found


def test_place_of_a_task_in_words(
    app: Celery, connect: Connect, client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease._Process, 'worker', 'w1@host')
    app.send_task('add', (1, 2), {'a': 3}, task_id='held', queue='held')
    limit = {'concurrency_key': 'k', 'concurrency_limit': 1}
    for name in ('first', 'parked'):
        app.send_task('add', task_id=name, queue='held', headers=limit)
    inbox = Inbox(connect(), 'held', ack=False)
    inbox.drain_until(lambda: jobs.state(client, 'parked') == 'parked' and len(inbox.messages) == 2)
    app.send_task('add', task_id='waits')
    app.send_task('add', task_id='later', countdown=3600)
    held = details(run, 'held')
    assert (held['state'], held['queue'], held['args'], held['kwargs']) == ('prefetched', 'held', '[1, 2]', '{"a": 3}')
    assert held['where'].startswith('prefetched by w1@host since 20')
    assert 'published to queue held' in held['timeline']
    assert 'claimed by w1@host' in held['timeline']
    assert details(run, 'parked')['where'].startswith(
        'in queue held, waits for a slot of the concurrency key k since 20'
    )
    assert details(run, 'waits')['where'].startswith('in queue celery, can be claimed since 20')
    later = details(run, 'later')
    assert (later['state'], later['where'].startswith('in queue celery, due 20')) == ('scheduled', True)
    kill_all(inbox, client, 2)
    assert details(run, 'held')['where'].startswith('a dead letter of queue held since 20')
    assert details(run, 'held')['error'] == 'rejected'
    assert "nothing is known of a task 'nobody'" in run('show', 'nobody').stderr


def test_task_that_was_acknowledged_early_is_with_a_worker(
    app: Celery, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Jobs, 'workers', lambda known, task_id: {'w1@host': 'active'} if task_id == 'early' else {})
    found = details(run, 'early')
    assert (found['state'], found['where']) == ('running', 'acknowledged early, and with w1@host (active)')
    app.backend.store_result('lost', None, 'STARTED')
    lost = details(run, 'lost')
    assert lost['where'] == 'in no queue and with no worker that answers; its result is STARTED'
    app.backend.store_result('early', 5, 'SUCCESS')
    monkeypatch.setattr(Jobs, 'workers', lambda known, task_id: pytest.fail('the workers were asked'))
    assert details(run, 'early')['where'] == 'it has ended: SUCCESS'


def test_failed_task_has_its_traceback_family_and_dates(app: Celery, run: Run, client: Client) -> None:
    app.conf.result_extended = True
    family = {'group': 'g', 'parent_id': 'mother', 'root_id': 'root'}
    request = Context(id='failed', task='pay', args=[7], kwargs={}, hostname='w1@host', retries=2, **family)
    before = time.time()
    app.backend.store_result('failed', ValueError('no', 'money'), 'FAILURE', 'one\ntwo\x1b[2J\n', request=request)
    done = run('show', 'fail')
    assert 'traceback\n  one\n  two\\x1b[2J\n' in done.stdout
    found = shown(run, 'failed')
    assert [found[name] for name in ('id', 'task', 'args', 'worker', 'retries', 'group', 'parent')] == [
        *('failed', 'pay', [7], 'w1@host', 2, 'g', 'mother')
    ]
    assert (found['error'], found['result']['state']) == ('ValueError: no, money', 'FAILURE')
    events = {event['event']: event['date'] for event in found['timeline']}
    assert before - 5 < events['result stored: FAILURE'] < events['the result expires']


def test_waiting_retry_is_shown_with_the_result_of_its_last_try(app: Celery, run: Run, client: Client) -> None:
    app.send_task('pay', (1,), task_id='again', countdown=60, retries=2)
    app.backend.store_result('again', ValueError('busy'), 'RETRY', 'lines')
    found = shown(run, 'again')
    assert (found['state'], found['retries'], found['error']) == ('scheduled', 2, 'ValueError: busy')
    assert 'published to queue celery (retry 2)' in [event['event'] for event in found['timeline']]
    assert [doc['_id'] for doc in found['documents']['messages']] == [items(client)[0]['_id']]


def test_each_try_has_a_line(app: Celery, run: Run) -> None:
    tries = [{'date': 5.0 + number, 'worker': 'w1@host', 'type': 'ValueError', 'text': 'busy'} for number in range(2)]
    app.send_task('pay', (1,), task_id='again', countdown=60, retries=3, headers={'tries': [*tries, 7]})
    lines = details(run, 'again')['timeline']
    assert 'try 2 failed at w1@host: ValueError: busy' in lines
    assert 'try 3 failed at w1@host: ValueError: busy' in lines


def test_part_of_a_chord_shows_the_progress(app: Celery, connect: Connect, client: Client, run: Run) -> None:
    app.backend.store.database.set_up()
    result = chord([app.signature('part', task_id=name) for name in 'abc'], app=app)(app.signature('body'))
    chords = app.backend.chords
    chords.store_part(chords.new_part(result.parent.id, 0, 'a', 'SUCCESS', None))
    found = shown(run, 'b')
    assert (found['group'], found['chord']) == (result.parent.id, {'ended': 1, 'tasks': 3})
    assert details(run, 'b')['chord'] == '1 of 3 tasks have ended'


def test_hostile_documents_are_shown(app: Celery, run: Run, client: Client) -> None:
    anything: list[Any] = [None, True, 1e308, '\x1b[2J\n<b>', [[]], {'toString': 1}, {}]
    app.send_task('add', task_id='sound')
    [sound] = items(client)
    app.backend.store_result('sound', 1, 'SUCCESS')
    result = app.backend.client.get('celery-task-meta-sound')
    names = ('published', 'date', 'expires', 'attempts', 'claimed', 'parked', 'status', 'reason', 'failed', 'priority')
    for number, value in enumerate(anything):
        headers = dict.fromkeys(('group', 'root_id', 'parent_id', 'retries', 'origin', 'stamps', 'tries'), value)
        message = {**sound['message'], 'headers': {**sound['message']['headers'], **headers}}
        for name in names:
            changed = {**sound, '_id': f'{name}-{number}', name: value, 'message': message}
            del changed['_rev']
            client.put(changed)
        meta = dict.fromkeys(('children', 'group_id', 'parent_id', 'traceback', 'args', 'worker', 'result'), value)
        app.backend.client.put(
            {
                **{name: member for name, member in result.items() if name != '_rev'},
                '_id': f'celery-task-meta-r{number}',
                'date': value,
                'status': value,
                'value': meta,
            }
        )
    for name in ('sound', *(f'{name}-0' for name in names), *(f'r{number}' for number in range(len(anything)))):
        for words in ([], ['--json']):
            done = run('show', name, *words)
            assert (done.exit_code, done.exception) == (0, None), (name, done.output)
            assert all(line.isprintable() for line in done.stdout.splitlines())
