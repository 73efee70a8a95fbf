"""Failures: failed results and dead letters in one list, in groups, sent again and dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Reject

from celery_couchdb.failures import FailureFilter, Failures
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.errors import ConfigurationError
from tests.support import Request, command_of, items, record_requests

from .conftest import Run

#: Adds a dead letter; returns its document.
Letter = Callable[..., dict[str, Any]]

#: Adds a failed result.
Fail = Callable[..., None]


@pytest.fixture
def letter(app: Celery, client: Client) -> Letter:
    def letter(task_id: str, failed: Any, reason: str = 'rejected', task: str = 'pay', **fields: Any) -> dict[str, Any]:
        body = json.dumps([[task_id], {}, {}])
        headers = {'id': task_id, 'task': task, 'argsrepr': repr([task_id]), 'kwargsrepr': '{}'}
        properties = {'body_encoding': 'utf-8', 'delivery_tag': task_id, 'priority': 0}
        message = {'body': body, 'headers': headers, 'properties': properties}
        message |= {'content-type': 'application/json', 'content-encoding': 'utf-8'}
        doc = {**dead_letter.made_of(workitem.new(f'doc-{task_id}', 'q', message, 1.0), reason, failed), **fields}
        return {**doc, '_rev': client.put(doc)}

    return letter


@pytest.fixture
def fail(app: Celery) -> Fail:
    app.conf.result_extended = True

    def fail(task_id: str, date: Any, error: Exception | None = None, task: str = 'pay', **fields: Any) -> None:
        request = Context(id=task_id, task=task, args=[task_id], kwargs={}, delivery_info={'routing_key': 'q'})
        app.backend.store_result(task_id, error or ValueError('no', 'money'), 'FAILURE', 'lines', request=request)
        client = app.backend.client
        client.put({**client.get(f'celery-task-meta-{task_id}'), 'date': date, **fields})

    return fail


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


def test_failures_are_listed_newest_first_and_selected(failures: Failures, letter: Letter, fail: Fail) -> None:
    letter('dead1', 100.0)
    fail('failed1', 200.0)
    letter('dead2', 300.0, 'delivery limit: delivered 20 times', 'mail', queue='other')
    fail('failed2', 400.0, KeyError('k'), 'mail')
    letter('both', 500.0, 'rejected: ValueError: no card')
    fail('both', 600.0)
    assert ids(failures) == ['both', 'failed2', 'dead2', 'failed1', 'dead1']
    both = next(failures.listing())
    assert (both.kind, both.reason, both.error) == ('dead', 'rejected: ValueError: no card', 'ValueError: no, money')
    assert both.result is not None
    assert both.result.traceback == 'lines'
    assert [failure.arguments for failure in failures.listing(FailureFilter(until=200.0))] == [
        "['failed1']",
        "['dead1']",
    ]
    selections: list[tuple[dict[str, Any], list[str]]] = [
        ({'kind': 'failed'}, ['failed2', 'failed1']),
        ({'kind': 'dead'}, ['both', 'dead2', 'dead1']),
        ({'queue': 'q'}, ['both', 'failed2', 'failed1', 'dead1']),
        ({'queue': 'other', 'kind': 'dead'}, ['dead2']),
        ({'task': 'mail'}, ['failed2', 'dead2']),
        ({'error': 'ValueError'}, ['failed1']),
        ({'error': 'rejected'}, ['both', 'dead1']),
        ({'error': 'rejected', 'task': 'pay'}, ['both', 'dead1']),
        ({'error': 'rejected: ValueError'}, ['both']),
        ({'error': 'ValueError: no, m'}, ['failed1']),
        ({'error': 'ValueError: m'}, []),
        ({'since': 300.0}, ['both', 'failed2', 'dead2']),
        ({'since': 250.0, 'task': 'pay', 'error': 'rejected'}, ['both']),
        ({'args': 'dead'}, ['dead2', 'dead1']),
        ({'until': 300.0, 'since': 200.0}, ['dead2', 'failed1']),
        ({'until': 400.0, 'task': 'mail', 'kind': 'failed'}, ['failed2']),
    ]
    for wanted, expected in selections:
        assert ids(failures, **wanted) == expected, wanted
        assert failures.count(FailureFilter(**wanted)) == len(expected), wanted


def test_groups_count_failures_by_task_and_error_in_one_request_each(
    failures: Failures, letter: Letter, fail: Fail, app: Celery, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        fail(f'f{number}', 100.0 + number)
        letter(f'l{number}', 200.0 + number, 'rejected' if number else 'rejected: KeyError: 5')
    fail('l0', 200.0, Reject('no card'))  # as Celery stores it for a rejected message
    fail('other', 150.0, KeyError('k'))
    to_results = record_requests(monkeypatch, f'{app.backend.client.address.database}')
    sent.clear()
    found = [(group.kind, group.task, group.error, group.count, group.first, group.last) for group in failures.groups()]
    assert found == [
        ('dead', 'pay', 'rejected', 3, 200.0, 202.0),
        ('failed', 'pay', 'ValueError', 3, 100.0, 102.0),
        ('failed', 'pay', 'KeyError', 1, 150.0, 150.0),
    ]
    assert (len(sent), len(to_results)) == (1, 1)


def test_hostile_documents_neither_break_the_views_nor_hide_failures(
    failures: Failures, letter: Letter, fail: Fail, client: Client, app: Celery, run: Run
) -> None:
    letter('sound', 100.0)
    fail('fine', 50.0)
    anything: list[Any] = [None, True, 1e308, -1e308, 'x' * 3000, '\x1b[2J<b>', [[]], {'toString': 1, 'length': 5}, {}]
    message = client.get('doc-sound')['message']
    for number, value in enumerate(anything):
        letter(f'a{number}', value, value)
        letter(f'b{number}', 1.0, message=value)
        letter(f'c{number}', 1.0, message={**message, 'headers': value})
        letter(f'd{number}', 1.0, message={**message, 'headers': {'id': value, 'task': value}})
        letter(f'e{number}', 1.0, queue=value, status=None)
        client.put({'_id': f'f{number}', 'type': 'WorkItem', 'status': value or 'x', 'next': value})
        fail(f'a{number}!', value, task=value, error=value)
        fail(f'b{number}!', value, value=value, content_type=value)
    found = {failure.letter['_id'] if failure.letter else failure.id for failure in failures.listing()}
    strings = [number for number, value in enumerate(anything) if isinstance(value, str)]  # queues with these names
    assert found >= {'doc-sound', 'fine', *(f'{kind}{n}!' for kind in 'ab' for n in range(len(anything)))}
    assert found >= {f'doc-{kind}{n}' for kind in 'abcd' for n in range(len(anything))}
    assert {name for name in found if name.startswith('doc-e')} == {
        f'doc-e{number}' for number in range(len(anything)) if number not in strings
    }
    groups = failures.groups()
    assert sum(group.count for group in groups) >= len(found)
    assert all(abs(date) <= 1e12 for group in groups for date in (group.first, group.last))
    for words in ('failures list -n 500', 'failures list --group', 'failures list --json', 'show doc-d5', 'show b5!'):
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
    failures: Failures, letter: Letter, fail: Fail, client: Client, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = letter('000', 1000.0)
    fail('x000', 1000.5)
    result = app.backend.client.get('celery-task-meta-x000')
    del first['_rev'], result['_rev']
    letters, results = [], []
    for number in range(1, 250):
        headers = {**first['message']['headers'], 'id': f'{number:03}'}
        letters.append({**first, '_id': f'doc-{number:03}', 'failed': 1000.0 + number})
        letters[-1]['message'] = {**first['message'], 'headers': headers}
        results.append({**result, '_id': f'celery-task-meta-x{number:03}', 'date': 1000.5 + number})
    client.bulk(letters)
    app.backend.client.bulk(results)
    failures.groups()
    requests = [record_requests(monkeypatch, each.address.database) for each in (client, app.backend.client)]
    listing = failures.listing()
    assert [next(listing).id for _ in range(4)] == ['x249', '249', 'x248', '248']
    assert sum(map(len, requests)) <= 7
    assert len({failure.id for failure in listing}) == 496
    assert sum(map(len, requests)) <= 13


# -- changes


def test_failures_are_retried_with_other_arguments_and_in_another_queue(
    failures: Failures, letter: Letter, fail: Fail, app: Celery, client: Client
) -> None:
    letter('dead', 100.0)
    fail('dead', 100.0)
    fail('failed', 200.0)
    letter('lost', 300.0, queue=None, status=None)
    found = failures.find(['dead', 'failed', 'lost'])
    with pytest.raises(ConfigurationError, match="there is no queue 'none'"):
        failures.retry(found[:1], queue='none')
    retried, refused = failures.retry(found, queue='other', args=[1, 2], kwargs={'a': 3})
    assert ({failure.id for failure in retried}, refused) == ({'dead', 'failed', 'lost'}, {})
    for doc in items(client):
        assert json.loads(doc['message']['body'])[:2] == [[1, 2], {'a': 3}]
        assert (doc['queue'], doc['message']['properties']['delivery_info']['routing_key']) == ('other', 'other')
    assert [states(app, client, name) for name in ('dead', 'failed', 'lost')] == [
        (['ready'], 'PENDING'),
        (['ready'], 'RETRY'),
        (['ready'], 'PENDING'),
    ]
    assert ids(failures) == []
    again, refused = failures.retry(found)
    assert (again, {*refused}) == ([], {'dead', 'failed', 'lost'})


def test_what_cannot_be_retried_or_dropped_is_refused_with_a_sentence(
    failures: Failures, letter: Letter, fail: Fail, app: Celery, report: Any, client: Client
) -> None:
    letter('unique', 100.0, key='k')
    letter('wrong', 150.0, task='report')
    fail('failed', 200.0)
    found = failures.find(['unique', 'wrong', 'failed'])
    refused = failures.retry(found[:2], queue='other', args=['too', 'many'])[1]
    assert refused['unique'] == 'it is a unique job, which cannot be moved to another queue'
    assert refused['wrong'].startswith('the task report does not take these arguments: ')
    for doc in (client.get('doc-unique'), client.get('doc-wrong')):
        client.put({**doc, 'attempts': 5})
    app.backend.client.put({**app.backend.client.get('celery-task-meta-failed'), 'date': 5.0})
    for act in (failures.retry, failures.drop):
        done, refused = act(found)
        assert (done, {*refused}) == ([], {'unique', 'wrong', 'failed'})
        assert all('changed' in reason for reason in refused.values())
    assert set(ids(failures)) == {'unique', 'wrong', 'failed'}


def test_drop_deletes_both_kinds_of_a_task(
    failures: Failures, letter: Letter, fail: Fail, app: Celery, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ('killed', 'gone'):
        letter(name, 100.0)
        fail(name, 100.0)
    letter('dead', 50.0)
    app.backend.store_result('dead', 5, 'SUCCESS')
    with monkeypatch.context() as patch:
        patch.setattr(failures.results, 'drop', lambda results: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failures.drop(failures.find(['killed']))
    assert ids(failures) == ['gone', 'killed', 'dead']
    assert states(app, client, 'killed') == ([], 'FAILURE')
    found = failures.find(['gone', 'killed', 'dead'])
    assert failures.drop(found) == (found, {})
    assert states(app, client, 'gone') == ([], 'PENDING')
    assert states(app, client, 'dead') == ([], 'SUCCESS')
    assert ids(failures) == []


def test_what_fails_again_meanwhile_is_not_retried_again(
    failures: Failures, letter: Letter, fail: Fail, client: Client, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        letter(f'd{number}', 100.0 + number)
        fail(f'f{number}', 100.0 + number)
    monkeypatch.setattr('celery_couchdb.resources.change.BATCH', 2)
    retried: list[str] = []

    def retry(failures: Failures, part: Any, **options: Any) -> Any:
        for failure in part:
            retried.append(failure.id)
            if failure.letter:
                client.put({**failure.letter, 'failed': 1e9})
            else:
                app.backend.client.put({**failure.result.document, 'date': 1e9})
        return part, {}

    monkeypatch.setattr(Failures, 'retry', retry)
    done = command_of(app)('failures', 'retry', '--all', '--yes')
    assert (done.exit_code, done.stdout) == (0, '10 failures retried.\n')
    assert len(retried) == len(set(retried)) == 10


# -- commands


def test_commands_select_by_id_or_by_options(
    failures: Failures, letter: Letter, fail: Fail, run: Run, app: Celery, client: Client
) -> None:
    letter('3f2a-dead', 100.0)
    fail('3f2b-failed', 200.0)
    fail('4f2b-failed', 300.0, KeyError('k'), 'mail')
    app.backend.store_result('4f2c-good', 1, 'SUCCESS')
    table = run('failures', 'list').stdout.splitlines()
    assert table[0].split() == ['ID', 'TASK', 'QUEUE', 'KIND', 'WHEN', 'ERROR']
    assert [line.split()[:4] for line in table[1:]] == [
        ['4f2b-failed', 'mail', 'q', 'failed'],
        ['3f2b-failed', 'pay', 'q', 'failed'],
        ['3f2a-dead', 'pay', 'q', 'dead'],
    ]
    assert run('failures', 'list', '-n', '1').stderr == 'These are the first 1; there are more (--limit).\n'
    [line] = run('failures', 'list', '--args', '3f2b', '--json').stdout.splitlines()
    assert json.loads(line)['error'] == 'ValueError: no, money'
    assert run('failures', 'list', '--task', 'none').stdout == 'There are no failures.\n'
    assert run('failures', 'list', '--group', '--kind', 'dead').stdout.splitlines()[1].split()[:4] == [
        *('pay', 'dead', 'rejected', '1')
    ]
    for verb in ('retry', 'drop'):
        for words in ('', '3f2a --all', '3f2a --task pay'):
            done = run('failures', verb, *words.split())
            assert (done.exit_code, 'Name failures by id, or select them' in done.stderr) == (2, True)
    assert '--group goes with' in run('failures', 'list', '--group', '--since', '1h').stderr
    short, several = "'3f2' is too short: give at least 4 characters", "several ids begin with '4f2b'"
    fail('4f2b-other', 400.0, task='mail')
    for name, sentence in (('3f2', short), ('4f2b', several), ('4f2c', "there is no failure '4f2c'")):
        for verb in ('show', 'drop', 'retry'):
            assert sentence in run('failures', verb, name).stderr
    assert 'Retry the failure ' in run('failures', 'retry', '3f2a', answer='n\n').stdout
    assert run('failures', 'retry', '3f2a', '3f2b', '--yes').stdout == '2 failures retried.\n'
    assert len(items(client)) == 2
    assert 'Drop 2 failures? [y/N]' in run('failures', 'drop', '--task', 'mail', answer='n\n').stdout
    assert run('failures', 'drop', '--task', 'mail', '--error', 'KeyError', '--yes').stdout == '1 failure dropped.\n'
    assert ids(failures) == ['4f2b-other']
    assert run('failures', 'drop', '--all', '--yes').stdout == '1 failure dropped.\n'
    assert run('failures', 'drop', '--all').stdout == 'no failure was changed.\n'


def test_one_of_broker_and_results_may_be_something_else(
    failures: Failures, letter: Letter, fail: Fail, app: Celery
) -> None:
    letter('dead', 100.0)
    fail('failed', 200.0)
    urls = {'broker_url': app.conf.broker_url, 'result_backend': app.conf.result_backend}
    for name, other, expected in (
        ('result_backend', 'cache+memory://', 'dead'),
        ('broker_url', 'memory://', 'failed'),
    ):
        with Celery('other', set_as_current=False, **{**urls, name: other}) as half:
            half.conf.update({**urls, name: other})
            run = command_of(half)
            assert [line.split()[0] for line in run('failures', 'list').stdout.splitlines()] == ['ID', expected]
            assert len(run('failures', 'list', '--group').stdout.splitlines()) == 2
            assert f'id         {expected}' in run('show', expected).stdout
            assert run('failures', 'retry', expected, '--yes').stdout == '1 failure retried.\n'
    with Celery('none', set_as_current=False, broker='memory://', backend='cache+memory://') as none:
        assert 'neither the broker nor the result backend' in command_of(none)('failures', 'list').stderr
