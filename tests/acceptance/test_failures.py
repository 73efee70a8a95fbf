"""Failed tasks and dead letters of real workers, and the commands that list, show, retry and drop them."""

from __future__ import annotations

import pytest

from kombu_couchdb.admin import dead
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site, couchdb, listed, sentence, succeeded


def failed(site: Site, *names: str, task: str = 'fragile', **options: object) -> list[str]:
    """Let one task after the other fail; return their ids."""
    ids = []
    for name in names:
        result = site.send(task, str(site.journal), name, **options)
        with pytest.raises(ValueError, match=name):
            result.get(timeout=PATIENCE)
        ids.append(result.id)
    return ids


def test_failed_tasks_are_listed_and_retried(site: Site) -> None:
    site.worker('-Q', 'celery,mail', result_extended=True)
    first, second = failed(site, 'first', 'second')
    [third] = failed(site, 'third', queue='mail', kwargs={'prefix': 'the '})
    found = listed(site, 'failures', 'list')
    assert [(each['id'], each['queue'], each['error']) for each in found] == [
        (third, 'mail', 'ValueError: third may not pass'),
        (second, 'celery', 'ValueError: second may not pass'),
        (first, 'celery', 'ValueError: first may not pass'),
    ]
    assert (found[1]['task'], found[1]['args'], found[1]['kind']) == (
        'fragile',
        [str(site.journal), 'second'],
        'failed',
    )
    [group] = listed(site, 'failures', 'list', '--group')
    assert (group['task'], group['error'], group['count']) == ('fragile', 'ValueError', 3)
    assert '  ValueError: second may not pass\n' in succeeded(couchdb(site, 'failures', 'show', second[:13]))
    selected = listed(site, 'failures', 'list', '--task', 'fragile', '--limit', '1', '--since', '1h')
    assert [each['id'] for each in selected] == [third]
    assert succeeded(couchdb(site, 'failures', 'list', '--since', '2100-01-01T12:30')) == 'There are no failures.\n'

    assert couchdb(site, 'failures', 'retry', first).exit_code == 1, 'it was not confirmed'
    site.journal.with_name('may pass').touch()
    edited = couchdb(site, 'failures', 'retry', first, '--new-args', f'["{site.journal}", "1st"]', '--yes')
    assert succeeded(edited) == '1 failure retried.\n'
    assert site.app.AsyncResult(first).get(timeout=PATIENCE) == '1st'
    assert succeeded(couchdb(site, 'failures', 'retry', '--error', 'ValueError', '--yes')) == '2 failures retried.\n'
    for task_id, name in ((second, 'second'), (third, 'third')):
        assert site.app.AsyncResult(task_id).get(timeout=PATIENCE) == name
    assert sorted(site.journalled()) == ['1st', 'second', 'the third']
    assert succeeded(couchdb(site, 'failures', 'retry', '--all', '--yes')) == 'no failure was changed.\n'
    assert sentence(couchdb(site, 'failures', 'retry', first, '--yes')) == f"Error: there is no failure '{first}'"


def test_refused_tasks_are_listed_shown_retried_and_dropped(site: Site) -> None:
    site.app.backend.store_result('known', ValueError('before'), 'FAILURE')  # a final result, which goes
    site.worker()
    first = site.send('refused', str(site.journal), 'a', task_id='known')
    others = [site.send('refused', str(site.journal), name) for name in 'bc']
    results = [first, *others]
    wait_for(lambda: dead.count(site.client) == 3, 'three dead letters')
    found = listed(site, 'failures', 'list')
    assert {(each['id'], each['kind'], each['error_type']) for each in found} == {
        (result.id, 'dead', 'rejected') for result in results
    }
    assert f'"{site.journal}", "b"' in succeeded(couchdb(site, 'failures', 'show', others[0].id))
    # Without confirmation, the commands change nothing.
    assert couchdb(site, 'failures', 'drop', others[1].id).exit_code == 1
    assert succeeded(couchdb(site, 'failures', 'drop', others[1].id, '--yes')) == '1 failure dropped.\n'
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'failures', 'retry', first.id, '--yes')) == '1 failure retried.\n'
    wait_for(lambda: first.state == 'SUCCESS', 'the new result')
    assert succeeded(couchdb(site, 'failures', 'retry', '--queue', 'celery', '--yes')) == '1 failure retried.\n'
    assert [result.get(timeout=PATIENCE) for result in results[:2]] == ['a', 'b']
    assert site.journalled() == ['a', 'b']
    assert succeeded(couchdb(site, 'failures', 'list')) == 'There are no failures.\n'


def test_arguments_must_be_stored_or_given(site: Site) -> None:
    site.app.backend.store_result('failed', ValueError('once'), 'FAILURE')
    succeeded(couchdb(site, 'setup'))
    done = couchdb(site, 'failures', 'retry', '--all', '--yes')
    assert (done.exit_code, done.stdout) == (1, '0 failures retried.\n')
    assert done.stderr.startswith('failed: the name of its task is not stored')
    assert listed(site, 'failures', 'list')[0]['args'] is None
    done = couchdb(site, 'failures', 'list', '--since', 'yesterday')
    assert done.exit_code == 2
    assert "'yesterday' is neither a duration (90s, 30m, 2h, 1d) nor a date (2026-11-22)." in done.stderr


def test_task_that_kills_its_process_becomes_a_dead_letter(site: Site) -> None:
    site.worker(
        pool='prefork',
        concurrency=1,
        broker_transport_options={'delivery_limit': 3},
        worker_enable_remote_control=False,
    )
    task_id = site.send('deadly', str(site.journal)).id
    [letter] = wait_for(lambda: listed(site, 'failures', 'list', '--kind', 'dead'), 'the dead letter')
    assert (letter['id'], letter['task']) == (task_id, 'deadly')
    assert 1 <= len(site.journalled()) <= 3
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3


def test_task_that_kills_its_worker_becomes_a_dead_letter(site: Site) -> None:
    """The solo pool runs tasks in the process of the worker, so that each run ends a worker."""
    options = {'delivery_limit': 2, **SHORT_LEASE}
    site.send('deadly', str(site.journal))
    for _ in range(2):
        site.start(pool='solo', broker_transport_options=options).container.wait(PATIENCE)
    site.worker(pool='solo', broker_transport_options=options)
    [letter] = wait_for(lambda: listed(site, 'failures', 'list', '--kind', 'dead'), 'the dead letter')
    assert letter['reason'] == 'delivery limit: delivered 2 times and never acknowledged'
    assert letter['attempts'] == 2
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    assert site.journalled() == ['deadly', 'deadly']


def test_messages_that_no_worker_can_run_become_dead_letters(site: Site) -> None:
    site.worker()
    site.send('unknown.task', 1)
    with site.app.producer_pool.acquire() as producer:
        producer.publish({'hello': 'world'}, routing_key='celery', serializer='json')
    site.send('add', 1, 2, serializer='pickle')
    wait_for(lambda: dead.count(site.client) == 3, 'the dead letters')
    unknown, no_task, pickled = (item['reason'] for item in items(site.client))
    assert unknown == 'rejected: the worker that received it does not know the task unknown.task'
    assert no_task == 'rejected: the message names no task'
    assert 'Refusing to deserialize untrusted content of type pickle' in pickled
