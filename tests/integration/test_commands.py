"""`celery couchdb` with documents of other programs: escaped output, and jobs selected by a prefix of their ids."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from click.testing import Result

from kombu_couchdb.couchdb.client import Client
from tests.support import command_of, items

from .conftest import Run

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
        ['show', EVIL],
        ['failures', 'list'],
        ['failures', 'list', '--group'],
        ['failures', 'show', 'dying' + EVIL],
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
    assert shown == 10  # of 12: groups have kinds of reasons only
    for given in (['failures', 'retry', 'dying' + EVIL], ['jobs', 'remove', EVIL], ['show', 'no' + EVIL]):
        done = run(*given, answer='n\n')
        assert all(line.isprintable() for line in lines(done)), lines(done)
        assert not any(line.startswith('forged') for line in lines(done))
    # A dead letter that cannot be replayed is reported on stderr.
    queue('flawed', **dead('malformed'), attempts='many', _id='flawed' + EVIL)
    done = run('failures', 'retry', 'flawed', '--yes')
    assert done.exit_code == 1
    assert [line for line in lines(done) if 'it cannot be delivered' in line] == [
        'flawed: it cannot be delivered: malformed: attempts must be a whole number from 0 to 1000000000'
    ]
    assert all(line.isprintable() for line in lines(done))


def test_prefix_of_an_id_selects_a_job(run: Run, queue: Callable[..., None], client: Client, app: Celery) -> None:
    queue('3f2a-waits')
    app.backend.store_result('4f2a-ended', 1, 'SUCCESS')
    queue('3f2b-died', **dead('rejected'))
    queue('3f2b-waits')
    assert 'id         3f2a-waits' in run('show', '3f2a').stdout
    assert 'id         3f2a-waits' in run('show', 'doc of 3f2a').stdout
    assert 'id         4f2a-ended' in run('show', '4f2a').stdout
    assert run('show', '3f2b').stderr == "Error: several ids begin with '3f2b': 3f2b-died, 3f2b-waits\n"
    assert 'id         3f2b-died' in run('failures', 'show', '3f2b').stdout
    short = "Error: '3f2' is too short: give at least 4 characters of an id\n"
    assert run('show', '3f2').stderr == run('jobs', 'remove', '3f2', '--yes').stderr == short
    assert "nothing is known of a task 'unknown'" in run('show', 'unknown').stderr
    assert "there is no failure '3f2a'" in run('failures', 'show', '3f2a').stderr

    assert 'Retry the failure add(1, 2)? [y/N]' in run('failures', 'retry', '3f2b', answer='n\n').stdout
    assert (
        run('jobs', 'remove', '3f2b', '--yes').stderr == "Error: several ids begin with '3f2b': 3f2b-died, 3f2b-waits\n"
    )
    done = run('jobs', 'remove', '3f2a', answer='y\n')
    assert done.stdout == 'Remove the job add(1, 2)? [y/N]: y\n1 job removed.\n'
    assert run('failures', 'drop', '3f2b', '-y').stdout == '1 failure dropped.\n'
    assert sorted(item['_id'] for item in items(client) if item['_id'].startswith('doc')) == ['doc of 3f2b-waits']


def test_complete_id_selects_its_job_even_if_it_is_a_prefix_of_others(run: Run, queue: Callable[..., None]) -> None:
    for name in ('order', 'order-1', 'order-2'):
        queue(name)
    assert 'id         order\n' in run('show', 'order').stdout
    assert run('jobs', 'remove', 'order', '-y').stdout == '1 job removed.\n'


# -- brokers and result backends that cannot be used


@pytest.fixture
def no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package redis is not installed."""
    for name in [name for name in sys.modules if name in ('kombu.transport.redis', 'celery.backends.redis')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'redis', None)
    monkeypatch.setattr('kombu.transport._transport_cache', {})


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'broker_url': 'redis://127.0.0.1/0'}, 'the transport of broker_url cannot be loaded ('),
        ({'result_backend': 'redis://127.0.0.1/0'}, 'the result backend of this app cannot be loaded ('),
        ({'result_backend': 'nix://'}, 'the result backend of this app cannot be loaded ('),
        ({'broker_url': 'nix://'}, 'No such transport: nix; broker_url must be couchdb://'),
        ({'broker_url': 'couchdb+http://me:tell-nobody@a/db'}, 'the host is not valid; write couchdb://'),
        ({'broker_url': 'couchdb://me:tell-nobody@a.invalid/db'}, 'the host name cannot be resolved; correct it'),
        ({'broker_url': 'couchdb://me:tell-nobody@127.0.0.1:1/db'}, 'no server listens at this port; start it'),
    ],
    ids=lambda value: ''.join(value.values()).partition(':')[0] if isinstance(value, dict) else '',
)
def test_broker_or_result_backend_that_cannot_be_used_is_one_sentence(
    client: Client, url: str, no_redis: None, settings: dict[str, str], sentence: str
) -> None:
    app = Celery('other', set_as_current=False)
    app.conf.update({'broker_url': url, 'result_backend': url, **settings})
    for command in ('status', 'jobs list' if 'broker_url' in settings else 'show 1234'):
        done = command_of(app)(*command.split())
        [line] = lines(done)
        assert (done.exit_code, sentence in line, 'tell-nobody' in line) == (1, True, False), line
