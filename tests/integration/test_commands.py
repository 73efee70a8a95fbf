"""`celery couchdb` with documents of other programs: escaped output, and jobs selected by a prefix of their ids."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from click.testing import Result

from celery_couchdb.cli import resource
from kombu_couchdb.couchdb.client import Client
from tests.support import Inbox, items, publish, record_requests

from .conftest import Connect, Run, command_of

#: Characters that clear the screen or start a new line.
EVIL = 'x\x1b[2J\x9b2J\r\nforged: removed\u202e'


@pytest.fixture
def queue(app: Celery, client: Client) -> Callable[..., None]:
    """A function that adds a job with a given id to the app's queue."""

    def queue(task_id: str, **fields: Any) -> None:
        if not (known := items(client)):
            app.send_task('add', (1, 2), task_id='first')
            known = items(client)
        [first, *_] = known
        message = {**first['message'], 'headers': {**first['message']['headers'], 'id': task_id}}
        client.put(
            {
                **{k: v for k, v in first.items() if k != '_rev'},
                '_id': f'doc of {task_id}',
                'message': message,
                **fields,
            }
        )

    return queue


def lines(done: Result) -> list[str]:
    return (done.stdout + done.stderr).splitlines()


def dead(reason: str) -> dict[str, Any]:
    return {'status': 'fail', 'reason': reason, 'failed': 1763709000.0}


def test_control_characters_of_documents_are_escaped(run: Run, queue: Callable[..., None], client: Client) -> None:
    queue(EVIL)
    queue('dying' + EVIL, **dead(EVIL), consumer=EVIL)
    client.put(
        {'_id': 'broker:consumer:a', 'type': 'Consumer', 'host': EVIL, 'pid': 5, 'queues': [EVIL], 'expires': 1e12}
    )
    client.put({'_id': 'broker:queue:evil', 'type': 'Queue', 'name': EVIL})
    shown = 0
    for given in (
        ['jobs', 'list'],
        ['jobs', 'show', EVIL],
        ['dead', 'list'],
        ['dead', 'show', 'dying' + EVIL],
        ['status'],
    ):
        for json_wanted in ([], ['--json']):
            done = run(*given, *json_wanted)
            assert done.exit_code == 0, done.output
            assert all(line.isprintable() for line in lines(done))
            assert not any(line.startswith('forged') for line in lines(done))
            shown += r'\x1b[2J' in done.stdout or r'\u001b[2J' in done.stdout
            for line in lines(done) if json_wanted else ():
                json.loads(line)
    assert shown == 10
    for given in (
        ['dead', 'replay', 'dying' + EVIL],
        ['dead', 'drop', 'dying' + EVIL],
        ['remove', EVIL],
        ['remove', 'no' + EVIL],
        ['jobs', 'show', 'no' + EVIL],
        ['dead', 'show', 'no' + EVIL],
    ):
        done = run(*given, answer='n\n')
        assert all(line.isprintable() for line in lines(done)), lines(done)
        assert not any(line.startswith('forged') for line in lines(done))
    # A dead letter that cannot be replayed is reported on stderr.
    queue('flawed', **dead('malformed'), attempts='many', _id='flawed' + EVIL)
    done = run('dead', 'replay', 'flawed', '--yes')
    assert done.exit_code == 1
    assert [line for line in lines(done) if 'it cannot be delivered' in line] == [
        r'flawedx\x1b[2J\x9b2J\r\nforged: removed\u202e: it cannot be delivered: '
        'malformed: attempts is not a whole number, or too large'
    ]
    assert all(line.isprintable() for line in lines(done))


def test_id_cannot_forge_a_log_line(connect: Connect, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    publish(connect(), 'hello')
    [item] = items(client)
    good = {name: value for name, value in item.items() if name != '_rev'}
    client.put({**good, '_id': EVIL, 'message': {**good['message'], 'body': None, 'headers': 5}})
    with caplog.at_level(logging.DEBUG, 'kombu_couchdb'):
        inbox = Inbox(connect())
        assert inbox.wait(1) == ['hello']
        inbox.drain_until(lambda: any(r'x\x1b[2J' in line for line in caplog.messages), 'the log line')
    assert [line for line in caplog.messages if not line.isprintable()] == []


def test_prefix_of_an_id_selects_a_job(run: Run, queue: Callable[..., None], client: Client) -> None:
    queue('3f2a-waits')
    queue('3f2b-died', **dead('rejected'))
    queue('3f2b-waits')
    assert 'id         3f2a-waits' in run('jobs', 'show', '3f2a').stdout
    assert 'id         3f2a-waits' in run('jobs', 'show', 'doc of 3f2a').stdout
    assert run('jobs', 'show', '3f2b').stderr == "Error: several ids begin with '3f2b': 3f2b-died, 3f2b-waits\n"
    assert 'id         3f2b-died' in run('dead', 'show', '3f2b').stdout
    short = "Error: '3f2' is too short: give at least 4 characters of an id\n"
    assert run('jobs', 'show', '3f2').stderr == run('remove', '3f2', '--yes').stderr == short
    assert "job 'x' is not in a queue" in run('jobs', 'show', 'x').stderr
    assert "there is no dead letter '3f2a'" in run('dead', 'show', '3f2a').stderr

    assert 'Replay dead letter 3f2b-died? [y/N]' in run('dead', 'replay', '3f2b', answer='n\n').stdout
    assert run('remove', '3f2b', '--yes').stderr == "Error: several ids begin with '3f2b': 3f2b-died, 3f2b-waits\n"
    done = run('remove', '3f2a', answer='y\n')
    assert done.stdout == 'Remove 3f2a-waits? [y/N]: y\n3f2a-waits: removed\n'
    assert run('dead', 'drop', '3f2b', '-y').stdout == '1 dropped.\n'
    assert sorted(item['_id'] for item in items(client) if item['_id'].startswith('doc')) == ['doc of 3f2b-waits']


def test_complete_id_selects_its_job_even_if_it_is_a_prefix_of_others(run: Run, queue: Callable[..., None]) -> None:
    for name in ('order', 'order-1', 'order-2'):
        queue(name)
    assert 'id         order\n' in run('jobs', 'show', 'order').stdout
    assert run('remove', 'order', '-y').stdout == 'order: removed\n'


def test_ambiguous_prefix_lists_at_most_ten_jobs(run: Run, queue: Callable[..., None]) -> None:
    for number in range(12):
        queue(f'same-{number:02}')
    [line] = lines(run('jobs', 'show', 'same'))
    assert line.endswith('same-08, same-09 and 2 more')


def test_malformed_dead_letters_are_shown_and_dropped(run: Run, client: Client, apache_couchdb: bool) -> None:
    """One item has a queue that is not text; the other, a dead letter already, is nested in 1,500 levels."""
    client.bulk([{'_id': 'odd', 'type': 'WorkItem', 'queue': ['celery']}])
    ids = ['odd']
    if apache_couchdb:  # the embedded server does not store such documents
        deep = '{"a":' * 1500 + '1' + '}' * 1500
        text = (
            '{"_id":"deep","type":"WorkItem","queue":"celery","status":"fail","reason":"deep in it","failed":1.0,'
            f'"message":{deep}}}'
        )
        client.put({'_id': 'deep'}, text=text.encode())
        ids.append('deep')
    listed = run('dead', 'list')
    assert listed.exit_code == 0
    assert 'malformed: queue is not text' in listed.output
    assert ('deep in it' in listed.output) is apache_couchdb
    jobs = [json.loads(line) for line in run('jobs', 'list', '--state', 'dead', '--json').output.splitlines()]
    assert {job['document']: job['state'] for job in jobs} == dict.fromkeys(ids, 'dead')
    assert json.loads(run('dead', 'show', '--json', 'odd').output)['reason'] == 'malformed: queue is not text'
    assert 'it cannot be delivered: malformed: queue is not text' in run('dead', 'replay', '--yes', 'odd').output
    assert f'{len(ids)} dropped.' in run('dead', 'drop', '--all', '--yes').output
    assert client.fetch(ids) == [None] * len(ids)


# -- brokers and result backends that cannot be used


@pytest.fixture
def no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package redis is not installed."""
    for name in [name for name in sys.modules if name in ('kombu.transport.redis', 'celery.backends.redis')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'redis', None)
    monkeypatch.setattr('kombu.transport._transport_cache', {})


@pytest.mark.parametrize('command', ['status', 'check', 'setup --dry-run', 'results list', 'jobs list'])
@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'broker_url': 'redis://127.0.0.1/0'}, 'the transport of broker_url cannot be loaded ('),
        ({'result_backend': 'redis://127.0.0.1/0'}, 'the result backend of this app cannot be loaded ('),
        ({'result_backend': 'nix://'}, 'the result backend of this app cannot be loaded ('),
        ({'broker_url': 'nix://'}, 'No such transport: nix; broker_url must be couchdb://'),
        ({'broker_url': 'couchdb+http://me:tell-nobody@a/db'}, 'the host is not valid; write couchdb://'),
        ({'broker_url': 'couchdb://me:tell-nobody@a.invalid/db'}, 'the host name cannot be resolved; correct it'),
        ({'broker_url': 'couchdb://me:tell-nobody@127.0.0.1:1/db'}, 'no server listens at this port; start CouchDB'),
    ],
    ids=lambda value: ''.join(value.values()).partition(':')[0] if isinstance(value, dict) else '',
)
def test_broker_or_result_backend_that_cannot_be_used_is_one_sentence(
    client: Client, url: str, no_redis: None, settings: dict[str, str], sentence: str, command: str
) -> None:
    if command.startswith('results') and 'broker_url' in settings:
        pytest.skip('does not use the broker')
    if command == 'jobs list' and 'broker_url' not in settings:
        pytest.skip('does not use the result backend')
    app = Celery('other', set_as_current=False)
    app.conf.update({'broker_url': url, 'result_backend': url, **settings})
    done = command_of(app)(*command.split())
    [line] = lines(done)
    assert (done.exit_code, sentence in line, 'tell-nobody' in line) == (1, True, False), line


# -- long lists


@pytest.mark.parametrize('command', ['jobs list --json', 'dead list --json', 'results list --json'])
def test_list_is_printed_while_it_is_read(
    app: Celery, client: Client, run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    app.backend.store.database.set_up()
    app.send_task('add', task_id='x')
    app.backend.mark_as_failure('x', ValueError('broken'))
    results = app.backend.store.client
    [job], [result] = items(client), results.fetch(['celery-task-meta-x'])
    assert result is not None
    state = dead('it failed') if command.startswith('dead') else {}
    for stored, like in ((client, {**job, **state}), (results, result)):
        del like['_rev']
        dates = [name for name in ('published', 'failed', 'date') if isinstance(like.get(name), float)]
        stored.bulk(
            [
                {**like, '_id': f'{like["_id"]}-{number:03}', **{name: like[name] + number for name in dates}}
                for number in range(450)
            ]
        )
    sent = [record_requests(monkeypatch, one.address.database) for one in (client, results)]
    printed: list[tuple[int, int]] = []  # lines, and how many documents had been read then

    def echo(text: str) -> None:
        read = sum(len(request.body['docs']) for log in sent for request in log if request.path == '/_bulk_get')
        printed.append((text.count('\n') + 1, read))

    monkeypatch.setattr(resource, 'echo_styled', echo)
    done = run(*command.split(), '--limit', '430')
    assert done.exit_code == 0, done.output
    assert sum(count for count, _ in printed) == 430
    assert printed[0][1] < 250
    assert printed[-1][1] > 400


@pytest.mark.parametrize(
    ('words', 'sentence'),
    [
        *(
            (f'dead {words}', 'Name dead letters by id, or give --queue NAME, or --all.')
            for words in ('replay', 'drop', 'drop --all --queue q', 'replay id --all')
        ),
        *((f'results retry {words}', 'Name tasks by id, or give --all') for words in ('', 'id --all', 'id --task t')),
    ],
)
def test_changes_need_a_selection(run: Run, words: str, sentence: str) -> None:
    done = run(*words.split())
    assert (done.exit_code, sentence in done.output) == (2, True)
