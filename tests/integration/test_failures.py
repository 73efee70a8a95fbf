"""Failures: dead letters of failed tasks and of other messages, in a list, in groups, sent again and dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain
from celery.canvas import Signature

from celery_couchdb.failures import FailureFilter, Failures
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.errors import ConfigurationError
from tests.support import Request, command_of, items, record_requests

from .conftest import Run

#: Adds a dead letter; returns its document.
Letter = Callable[..., dict[str, Any]]


@pytest.fixture
def letter(app: Celery, client: Client) -> Letter:
    def letter(task_id: str, failed: Any, reason: str = 'rejected', task: str = 'pay', **fields: Any) -> dict[str, Any]:
        """Add a dead letter; a reason `ValueError: no` is that of a failed task."""
        body = json.dumps([[task_id], {}, {}])
        headers = {'id': task_id, 'task': task, 'argsrepr': repr([task_id]), 'kwargsrepr': '{}'}
        properties = {'body_encoding': 'utf-8', 'delivery_tag': task_id, 'priority': 0}
        message = {'body': body, 'headers': headers, 'properties': properties}
        message |= {'content-type': 'application/json', 'content-encoding': 'utf-8'}
        item = workitem.new(f'doc-{task_id}', 'q', message, 1.0)
        if reason[0].isupper():
            kind, _, text = reason.partition(': ')
            error: Any = {'type': kind, 'text': text, 'traceback': 'lines', 'worker': 'w@1', 'retries': 2}
            doc = {**dead_letter.failed(item, error, 1e10, failed), **fields}
        else:
            doc = {**dead_letter.made_of(item, reason, failed), **fields}
        return {**doc, '_rev': client.put(doc)}

    return letter


@pytest.fixture
def failures(app: Celery) -> Failures:
    app.backend.store.database.set_up()
    with app.connection_for_write() as connection:
        for name in ('q', 'other'):
            connection.default_channel.queue_declare(name)
    return Failures(app)


def ids(failures: Failures, **wanted: Any) -> list[str]:
    return [failure.id for failure in failures.listing(FailureFilter(**wanted))]


def states(app: Celery, client: Client, task_id: str) -> tuple[list[str], str]:
    """Return the states of the messages of a task, and that of its result."""
    return [workitem.state(doc, 1e10) for doc in find(client, task_id)], app.AsyncResult(task_id).state


def test_failures_are_listed_newest_first_and_selected(failures: Failures, letter: Letter) -> None:
    letter('dead1', 100.0)
    letter('failed1', 200.0, 'ValueError: no money')
    letter('dead2', 300.0, 'delivery limit: delivered 20 times', 'mail', queue='other')
    letter('failed2', 400.0, 'KeyError: 5', 'mail')
    letter('dead3', 500.0, 'rejected: ValueError: no card')
    assert ids(failures) == ['dead3', 'failed2', 'dead2', 'failed1', 'dead1']
    failed = next(failure for failure in failures.listing() if failure.id == 'failed1')
    assert (failed.reason, failed.error, failed.error_type) == ('failed', 'ValueError: no money', 'ValueError')
    assert failed.traceback == 'lines'
    assert [failure.arguments for failure in failures.listing(FailureFilter(until=200.0))] == [
        "['failed1']",
        "['dead1']",
    ]
    selections: list[tuple[dict[str, Any], list[str]]] = [
        ({'queue': 'q'}, ['dead3', 'failed2', 'failed1', 'dead1']),
        ({'queue': 'other'}, ['dead2']),
        ({'task': 'mail'}, ['failed2', 'dead2']),
        ({'error': 'ValueError'}, ['failed1']),
        ({'error': 'rejected'}, ['dead3', 'dead1']),
        ({'error': 'rejected', 'task': 'pay'}, ['dead3', 'dead1']),
        ({'error': 'rejected: ValueError'}, ['dead3']),
        ({'error': 'ValueError: no m'}, ['failed1']),
        ({'error': 'ValueError: m'}, []),
        ({'since': 300.0}, ['dead3', 'failed2', 'dead2']),
        ({'since': 250.0, 'task': 'pay', 'error': 'rejected'}, ['dead3']),
        ({'args': 'dead'}, ['dead3', 'dead2', 'dead1']),
        ({'until': 300.0, 'since': 200.0}, ['dead2', 'failed1']),
        ({'until': 400.0, 'task': 'mail', 'error': 'KeyError'}, ['failed2']),
        ({'until': 250.0, 'queue': 'q'}, ['failed1', 'dead1']),
        ({'since': 250.0, 'error': 'rejected'}, ['dead3']),
        ({'until': 250.0, 'error': 'rejected'}, ['dead1']),
    ]
    for wanted, expected in selections:
        assert ids(failures, **wanted) == expected, wanted
        assert failures.count(FailureFilter(**wanted)) == len(expected), wanted
        is_read = 'args' in wanted or ':' in wanted.get('error', '')
        assert failures.count(FailureFilter(**wanted), 0) == (None if is_read and expected else len(expected)), wanted


def test_groups_count_failures_by_task_and_error_in_one_request(
    failures: Failures, letter: Letter, sent: list[Request]
) -> None:
    for number in range(3):
        letter(f'f{number}', 100.0 + number, f'ValueError: {number}')
        letter(f'l{number}', 200.0 + number, 'rejected' if number else 'rejected: KeyError: 5')
    letter('other', 150.0, 'KeyError: 5')
    sent.clear()
    shown = [(group.task, group.error, group.count, group.first, group.last) for group in failures.groups()]
    assert shown == [
        ('pay', 'rejected', 3, 200.0, 202.0),
        ('pay', 'ValueError', 3, 100.0, 102.0),
        ('pay', 'KeyError', 1, 150.0, 150.0),
    ]
    assert len(sent) == 1
    selections: list[tuple[dict[str, Any], int, dict[tuple[str, str], int]]] = [
        ({'task': 'pay', 'error': 'KeyError'}, 1, {('pay', 'KeyError'): 1}),
        (
            {'since': 101.0, 'until': 200.0},
            2,
            {('pay', 'ValueError'): 2, ('pay', 'KeyError'): 1, ('pay', 'rejected'): 1},
        ),
        ({'until': 99.0}, 2, {}),
        ({'since': 102.0, 'error': 'ValueError'}, 2, {('pay', 'ValueError'): 1}),
        ({'queue': 'q', 'until': 150.0}, 2, {('pay', 'ValueError'): 3, ('pay', 'KeyError'): 1}),
        ({'args': 'l1'}, 2, {('pay', 'rejected'): 1}),
        ({'error': 'ValueError: 2'}, 2, {('pay', 'ValueError'): 1}),
    ]
    for wanted, requests, expected in selections:
        sent.clear()
        found = failures.groups(FailureFilter(**wanted))
        assert {(group.task, group.error): group.count for group in found} == expected, wanted
        assert len(sent) == requests, wanted
        listed = [failure.date for failure in failures.listing(FailureFilter(**wanted))]
        bounds = [*(group.first for group in found), *(group.last for group in found)]
        assert not listed or (min(listed), max(listed)) == (min(bounds), max(bounds)), wanted


def test_hostile_documents_neither_break_the_views_nor_hide_failures(
    failures: Failures, letter: Letter, client: Client, app: Celery, run: Run
) -> None:
    letter('sound', 100.0)
    anything: list[Any] = [None, True, 1e308, -1e308, 'x' * 3000, '\x1b[2J<b>', [[]], {'toString': 1, 'length': 5}, {}]
    message = client.get('doc-sound')['message']
    for number, value in enumerate(anything):
        letter(f'a{number}', value)
        letter(f'b{number}', 1.0, message=value)
        letter(f'c{number}', 1.0, message={**message, 'headers': value})
        letter(f'd{number}', 1.0, message={**message, 'headers': {'id': value, 'task': value}})
        letter(f'e{number}', 1.0, queue=value, status=None)
        client.put({'_id': f'f{number}', 'type': 'WorkItem', 'status': value or 'x', 'next': value})
        letter(f'g{number}', 1.0, error=value, expires=value)
        letter(f'h{number}', 1.0, error=dict.fromkeys(('type', 'text', 'traceback', 'worker', 'retries'), value))
    found = {failure.letter['_id'] for failure in failures.listing()}
    strings = [number for number, value in enumerate(anything) if isinstance(value, str)]  # queues with these names
    assert found >= {'doc-sound', *(f'doc-{kind}{n}' for kind in 'abcdgh' for n in range(len(anything)))}
    assert {name for name in found if name.startswith('doc-e')} == {
        f'doc-e{number}' for number in range(len(anything)) if number not in strings
    }
    groups = failures.groups()
    assert sum(group.count for group in groups) >= len(found)
    assert all(abs(date) <= 1e12 for group in groups for date in (group.first, group.last))
    for words in (
        'failures list -n 500',
        'failures list --group',
        'failures list --json',
        'show doc-d5',
        'show doc-h5',
    ):
        done = run(*words.split())
        assert (done.exit_code, done.exception) == (0, None), done.output
        assert all(line.isprintable() for line in done.stdout.splitlines())
    done = run('failures', 'retry', '--all', '--yes')
    assert 'sound' not in done.stderr
    assert 'it cannot be delivered: malformed' in done.stderr
    assert states(app, client, 'sound') == (['ready'], 'PENDING')
    assert run('failures', 'drop', '--all', '--yes').exit_code == 0
    assert ids(failures) == []


def test_failures_are_read_in_pages_with_few_requests(
    failures: Failures, letter: Letter, client: Client, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = letter('000', 1000.0)
    del first['_rev']
    letters = []
    for number in range(1, 250):
        headers = {**first['message']['headers'], 'id': f'{number:03}'}
        letters.append({**first, '_id': f'doc-{number:03}', 'failed': 1000.0 + number})
        letters[-1]['message'] = {**first['message'], 'headers': headers}
    client.bulk(letters)
    failures.groups()
    requests = record_requests(monkeypatch, client.address.database)
    listing = failures.listing()
    assert [next(listing).id for _ in range(4)] == ['249', '248', '247', '246']
    assert len(requests) <= 2
    assert len({failure.id for failure in listing}) == 246
    assert len(requests) <= 4
    requests.clear()
    assert len(failures.find([f'{number:03}' for number in range(50)])) == 50
    assert len(requests) <= 2


# -- changes


def test_failures_are_retried_with_other_arguments_and_in_another_queue(
    failures: Failures, letter: Letter, app: Celery, client: Client
) -> None:
    letter('dead', 100.0)
    failed = letter('failed', 200.0, 'ValueError: no')
    headers = {**failed['message']['headers'], 'retries': 3}
    client.put({**failed, 'message': {**failed['message'], 'headers': headers}})
    for name in ('dead', 'failed'):
        app.backend.store_result(name, ValueError('no'), 'FAILURE')
    letter('lost', 300.0, queue=None, status=None)
    found = failures.find(['dead', 'failed', 'lost'])
    with pytest.raises(ConfigurationError, match="there is no queue 'none'"):
        failures.retry(found[:1], queue='none')
    retried, refused = failures.retry(found, queue='other', args=[1, 2], kwargs={'a': 3})
    assert ({failure.id for failure in retried}, refused) == ({'dead', 'failed', 'lost'}, {})
    for doc in items(client):
        assert json.loads(doc['message']['body'])[:2] == [[1, 2], {'a': 3}]
        assert (doc['queue'], doc['message']['properties']['delivery_info']['routing_key']) == ('other', 'other')
    again = client.get('doc-failed')
    assert not again.keys() & {'status', 'reason', 'failed', 'error', 'expires'}
    assert again['message']['headers']['retries'] == 0, 'it may be retried as often as when it was first sent'
    assert all(states(app, client, name) == (['ready'], 'PENDING') for name in ('dead', 'failed', 'lost'))
    assert ids(failures) == []
    done, refused = failures.retry(found)
    assert (done, {*refused}) == ([], {'dead', 'failed', 'lost'})


def test_what_follows_a_task_is_forgotten_with_its_failure(failures: Failures, letter: Letter, app: Celery) -> None:
    app.backend.store.database.set_up()
    steps = chain(*(Signature('pay', task_id=name) for name in ('first', 'second', 'third')))
    later = [dict(step) for step in reversed(steps.tasks[1:])]
    for name in ('first', 'second', 'third', 'other'):
        app.backend.store_result(name, ValueError('no'), 'FAILURE')
    doc = letter('first', 100.0, 'ValueError: no')
    body = json.dumps([[], {}, {'chain': later}])
    failures.jobs.client.put({**doc, 'message': {**doc['message'], 'body': body}})
    failures.retry([*failures.listing()])
    assert [app.AsyncResult(name).state for name in ('first', 'second', 'third', 'other')] == [
        *('PENDING', 'PENDING', 'PENDING', 'FAILURE'),
    ]


def test_what_cannot_be_retried_or_dropped_is_refused_with_a_sentence(
    failures: Failures, letter: Letter, report: Any, client: Client
) -> None:
    letter('unique', 100.0, key='k')
    letter('wrong', 150.0, 'ValueError: no', task='report')
    found = failures.find(['unique', 'wrong'])
    refused = failures.retry(found, queue='other', args=['too', 'many'])[1]
    assert refused['unique'] == 'it is a unique job, which cannot be moved to another queue'
    assert refused['wrong'].startswith('the task report does not take these arguments: ')
    for doc in (client.get('doc-unique'), client.get('doc-wrong')):
        client.put({**doc, 'attempts': 5})
    for act in (failures.retry, failures.drop):
        done, refused = act(found)
        assert (done, {*refused}) == ([], {'unique', 'wrong'})
        assert all('changed' in reason for reason in refused.values())
    assert set(ids(failures)) == {'unique', 'wrong'}


def test_drop_deletes_messages_and_no_results(failures: Failures, letter: Letter, app: Celery, client: Client) -> None:
    letter('failed', 100.0, 'ValueError: no')
    letter('dead', 50.0)
    app.backend.store_result('failed', ValueError('no'), 'FAILURE')
    found = failures.find(['failed', 'dead'])
    assert failures.drop(found) == (found, {})
    assert states(app, client, 'failed') == ([], 'FAILURE')
    assert ids(failures) == []


def test_what_fails_again_meanwhile_is_not_retried_again(
    failures: Failures, letter: Letter, client: Client, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        letter(f'd{number}', 100.0 + number)
        letter(f'f{number}', 100.0 + number, 'ValueError: no')
    monkeypatch.setattr('celery_couchdb.resources.change.BATCH_DOCS', 2)
    retried: list[str] = []

    def retry(failures: Failures, part: Any, **options: Any) -> Any:
        for failure in part:
            retried.append(failure.id)
            client.put({**failure.letter, 'failed': 1e9})
        return part, {}

    monkeypatch.setattr(Failures, 'retry', retry)
    done = command_of(app)('failures', 'retry', '--all', '--yes')
    assert (done.exit_code, done.stdout) == (0, '10 failures retried.\n')
    assert len(retried) == len(set(retried)) == 10


# -- commands


def test_commands_select_by_id_or_by_options(failures: Failures, letter: Letter, run: Run, client: Client) -> None:
    letter('3f2a-dead', 100.0)
    letter('3f2b-failed', 200.0, 'ValueError: no money')
    letter('4f2b-failed', 300.0, 'KeyError: 5', 'mail')
    table = run('failures', 'list').stdout.splitlines()
    assert table[0].split() == ['ID', 'TASK', 'QUEUE', 'REASON', 'WHEN', 'ERROR']
    assert [line.split()[:4] for line in table[1:]] == [
        ['4f2b-failed', 'mail', 'q', 'failed'],
        ['3f2b-failed', 'pay', 'q', 'failed'],
        ['3f2a-dead', 'pay', 'q', 'rejected'],
    ]
    assert run('failures', 'list', '-n', '1').stderr == 'These are the first 1; there are more (--limit).\n'
    [line] = run('failures', 'list', '--args', '3f2b', '--json').stdout.splitlines()
    shown = json.loads(line)
    assert [shown[name] for name in ('error', 'worker', 'retries', 'traceback', 'args')] == [
        *('ValueError: no money', 'w@1', 2, 'lines', ['3f2b-failed']),
    ]
    assert run('failures', 'list', '--task', 'none').stdout == 'No failure matches these filters (task: none).\n'
    assert run('failures', 'list', '--group', '--error', 'rejected').stdout.splitlines()[1].split()[:3] == [
        *('pay', 'rejected', '1')
    ]
    grouped = run('failures', 'list', '--group', '--before', '1h', '--queue', 'q').stdout.splitlines()
    assert grouped[0].split() == ['TASK', 'ERROR', 'COUNT', 'FIRST', 'LAST']
    assert len(grouped) == 4
    for verb in ('retry', 'drop'):
        for words in ('', '3f2a --all', '3f2a --task pay'):
            done = run('failures', verb, *words.split())
            assert (done.exit_code, 'Name failures by id, or select them' in done.stderr) == (2, True)
    short, several = "'3f2' is too short: give at least 4 characters", "several ids begin with '4f2b'"
    letter('4f2b-other', 400.0, 'KeyError: 5', task='mail')
    for name, sentence in (('3f2', short), ('4f2b', several), ('4f2c', "there is no failure '4f2c'")):
        for verb in ('show', 'drop', 'retry'):
            assert sentence in run('failures', verb, name).stderr
    assert 'Retry the failure ' in run('failures', 'retry', '3f2a', answer='n\n').stdout
    assert run('failures', 'retry', '3f2a', '3f2b', '--yes').stdout == '2 failures retried.\n'
    assert len([doc for doc in items(client) if not doc.get('status')]) == 2
    assert 'Drop 2 failures? [y/N]' in run('failures', 'drop', '--task', 'mail', answer='n\n').stdout
    assert run('failures', 'drop', '4f2b-failed', '--yes').stdout == '1 failure dropped.\n'
    assert ids(failures) == ['4f2b-other']
    assert run('failures', 'drop', '--all', '--yes').stdout == '1 failure dropped.\n'
    assert run('failures', 'drop', '--all').stdout == 'There are no failures.\n'


def test_broker_must_be_couchdb_and_results_may_be_elsewhere(failures: Failures, letter: Letter, app: Celery) -> None:
    letter('failed', 200.0, 'ValueError: no')
    urls = {'broker_url': app.conf.broker_url, 'result_backend': app.conf.result_backend}
    with Celery('other', set_as_current=False, **{**urls, 'result_backend': 'cache+memory://'}) as half:
        half.conf.update({**urls, 'result_backend': 'cache+memory://'})
        run = command_of(half)
        assert [line.split()[0] for line in run('failures', 'list').stdout.splitlines()] == ['ID', 'failed']
        shown = run('show', 'failed').stdout
        assert 'ValueError: no' in shown
        assert '  lines\n' in shown
        assert run('failures', 'retry', 'failed', '--yes').stdout == '1 failure retried.\n'
    with Celery('none', set_as_current=False, broker='memory://', backend='cache+memory://') as none:
        assert command_of(none)('failures', 'list').exit_code == 1
        assert 'neither the broker nor the result backend' in command_of(none)('show', 'failed').stderr
