"""Failed tasks and dead letters of real workers, and the commands that list, show, retry and drop them."""

from __future__ import annotations

import pytest
from celery import chain, chord
from celery.canvas import Signature
from celery.exceptions import ChordError

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
    site.worker('-Q', 'celery,mail')
    first, second = failed(site, 'first', 'second')
    [third] = failed(site, 'third', queue='mail', kwargs={'prefix': 'the '})
    wait_for(lambda: len(listed(site, 'failures', 'list')) == 3, 'the failures to be kept')
    found = listed(site, 'failures', 'list')
    assert [(each['id'], each['queue'], each['error']) for each in found] == [
        (third, 'mail', 'ValueError: third may not pass'),
        (second, 'celery', 'ValueError: second may not pass'),
        (first, 'celery', 'ValueError: first may not pass'),
    ]
    assert (found[1]['task'], found[1]['args'], found[1]['reason']) == (
        'fragile',
        [str(site.journal), 'second'],
        'failed',
    )
    assert "ValueError(f'{name} may not pass')" in found[1]['traceback']
    [group] = listed(site, 'failures', 'list', '--group')
    assert (group['task'], group['error'], group['count']) == ('fragile', 'ValueError', 3)
    assert '  ValueError: second may not pass\n' in succeeded(couchdb(site, 'failures', 'show', second[:13]))
    selected = listed(site, 'failures', 'list', '--task', 'fragile', '--limit', '1', '--since', '1h')
    assert [each['id'] for each in selected] == [third]
    assert succeeded(couchdb(site, 'failures', 'list', '--since', '2100-01-01T12:30')) == (
        'No failure matches these filters (since: 2100-01-01T12:30).\n'
    )

    assert couchdb(site, 'failures', 'retry', first).exit_code == 1, 'it was not confirmed'
    site.journal.with_name('may pass').touch()
    edited = couchdb(site, 'failures', 'retry', first, '--new-args', f'["{site.journal}", "1st"]', '--yes')
    assert succeeded(edited) == '1 failure retried.\n'
    assert site.app.AsyncResult(first).get(timeout=PATIENCE) == '1st'
    assert succeeded(couchdb(site, 'failures', 'retry', '--error', 'ValueError', '--yes')) == '2 failures retried.\n'
    for task_id, name in ((second, 'second'), (third, 'third')):
        assert site.app.AsyncResult(task_id).get(timeout=PATIENCE) == name
    assert sorted(site.journalled()) == ['1st', 'second', 'the third']
    assert succeeded(couchdb(site, 'failures', 'retry', '--all', '--yes')) == 'There are no failures.\n'
    assert sentence(couchdb(site, 'failures', 'retry', first, '--yes')) == f"Error: there is no failure '{first}'"


def test_refused_tasks_are_listed_shown_retried_and_dropped(site: Site) -> None:
    site.app.backend.store_result('known', ValueError('before'), 'FAILURE')  # a final result, which goes
    site.worker()
    first = site.send('refused', str(site.journal), 'a', task_id='known')
    others = [site.send('refused', str(site.journal), name) for name in 'bc']
    results = [first, *others]
    wait_for(lambda: dead.count(site.client) == 3, 'three dead letters')
    found = listed(site, 'failures', 'list')
    assert {(each['id'], each['reason'], each['error_type']) for each in found} == {
        (result.id, 'rejected', 'rejected') for result in results
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


def test_dates_of_options_are_durations_or_dates(site: Site) -> None:
    succeeded(couchdb(site, 'setup'))
    done = couchdb(site, 'failures', 'list', '--since', 'yesterday')
    assert done.exit_code == 2
    assert "'yesterday' is neither a duration (90s, 30m, 2h, 1d) nor a date (2026-11-22)." in done.stderr


@pytest.mark.parametrize('late', [False, True])
@pytest.mark.parametrize('backend', ['couchdb', 'redis', 'disabled'])
def test_retried_step_of_a_chain_runs_the_rest(results: str, site: Site, backend: str, late: bool) -> None:
    site.use_results(results)
    site.worker(task_acks_late=late)
    last = chain(*(part(site, name) for name in ('first', 'second', 'third'))).apply_async()
    [failure] = wait_for(lambda: listed(site, 'failures', 'list'), 'the failure')
    if backend != 'disabled':
        with pytest.raises(ValueError, match='first may not pass'):
            last.get(timeout=PATIENCE)
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'failures', 'retry', failure['id'], '--yes')) == '1 failure retried.\n'
    if backend != 'disabled':
        assert site.app.AsyncResult(last.id).get(timeout=PATIENCE) == 'third'
    wait_for(lambda: site.journalled() == ['first', 'second', 'third'], 'the rest of the chain')
    assert succeeded(couchdb(site, 'failures', 'list')) == 'There are no failures.\n'


@pytest.mark.parametrize('late', [False, True])
def test_retried_part_runs_alone_with_another_result_backend(redis: str, site: Site, late: bool) -> None:
    site.use_results(redis)
    site.worker(task_acks_late=late)
    body = site.app.signature('collected', args=(str(site.journal),))
    result = chord([part(site, 'one'), part(site, 'two')], body, app=site.app).apply_async()
    with pytest.raises(ChordError):
        site.app.AsyncResult(result.id).get(timeout=PATIENCE)
    wait_for(lambda: len(listed(site, 'failures', 'list')) == 2, 'both failures')
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'failures', 'retry', '--all', '--yes')) == '2 failures retried.\n'
    wait_for(lambda: sorted(site.journalled()) == ['one', 'two'], 'both parts')
    site.workers[0].container.terminate()
    assert sorted(site.journalled()) == ['one', 'two'], 'the body does not run'


def test_body_of_a_chord_runs_when_its_failed_parts_were_retried(site: Site) -> None:
    """One part is a task, another one a chain whose first step fails; the errbacks have run before the retries."""
    site.worker(task_acks_late=True)
    journal = str(site.journal)
    errback = site.app.signature('noted', args=(journal,), immutable=False)
    header = [
        site.app.signature('add', (1, 2)),
        part(site, 'failed'),
        chain(part(site, 'step'), site.app.signature('add', (3, 4), immutable=True)),
    ]
    body = site.app.signature('collected', args=(journal,)).on_error(errback)
    result = chord(header, body, app=site.app).apply_async()
    with pytest.raises(ChordError):
        site.app.AsyncResult(result.id).get(timeout=PATIENCE)
    wait_for(lambda: len(listed(site, 'failures', 'list')) == 2, 'both failures')
    wait_for(site.journalled, 'the errback')
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'failures', 'retry', '--all', '--yes')) == '2 failures retried.\n'
    assert site.app.AsyncResult(result.id).get(timeout=PATIENCE) == [3, 'failed', 7]
    site.workers[0].container.terminate()
    assert sorted(site.journalled()[1:]) == ['[3, "failed", 7]', 'failed', 'step'], 'the body runs once'


def test_retry_of_one_part_waits_for_the_others(site: Site) -> None:
    site.worker()
    body = site.app.signature('collected', args=(str(site.journal),))
    result = chord([part(site, 'one'), part(site, 'two')], body, app=site.app).apply_async()
    with pytest.raises(ChordError):
        site.app.AsyncResult(result.id).get(timeout=PATIENCE)
    wait_for(lambda: len(listed(site, 'failures', 'list')) == 2, 'both failures')
    found = listed(site, 'failures', 'list')
    site.journal.with_name('may pass').touch()
    first, second = (each['id'] for each in found)
    assert succeeded(couchdb(site, 'failures', 'retry', first, '--yes')) == '1 failure retried.\n'
    assert site.app.AsyncResult(first).get(timeout=PATIENCE) in ('one', 'two')
    with pytest.raises(ChordError):  # the other part has not succeeded
        site.app.AsyncResult(result.id).get(timeout=PATIENCE)
    assert succeeded(couchdb(site, 'failures', 'retry', second, '--yes')) == '1 failure retried.\n'
    assert site.app.AsyncResult(result.id).get(timeout=PATIENCE) == ['one', 'two']


@pytest.mark.parametrize('late', [False, True])
def test_failed_unique_job_releases_its_key(site: Site, late: bool) -> None:
    site.worker(task_acks_late=late)
    send = site.app.signature('fragile', (str(site.journal), 'unique'), headers={'job_key': 'k'}).apply_async
    with pytest.raises(ValueError, match='may not pass'):
        send().get(timeout=PATIENCE)
    [failure] = wait_for(lambda: listed(site, 'failures', 'list'), 'the failure')
    site.journal.with_name('may pass').touch()
    assert send().get(timeout=PATIENCE) == 'unique'
    assert [each['id'] for each in listed(site, 'failures', 'list')] == [failure['id']]
    assert succeeded(couchdb(site, 'failures', 'retry', '--all', '--yes')) == '1 failure retried.\n'
    assert site.app.AsyncResult(failure['id']).get(timeout=PATIENCE) == 'unique'


def test_failed_tasks_are_not_kept_on_wish(site: Site) -> None:
    site.worker(broker_transport_options={'keep_failed': 0})
    site.worker(broker_transport_options={'keep_failed': 0}, task_acks_late=True)
    failed(site, *'abcdef')
    for worker in site.workers:
        worker.container.terminate()
    assert items(site.client) == []


def part(site: Site, name: str) -> Signature:
    """Return a task that fails until it may pass."""
    return site.app.signature('fragile', (str(site.journal), name), immutable=True)


def test_task_that_kills_its_process_becomes_a_dead_letter(site: Site) -> None:
    site.worker(
        pool='prefork',
        concurrency=1,
        broker_transport_options={'delivery_limit': 3},
        worker_enable_remote_control=False,
    )
    task_id = site.send('deadly', str(site.journal)).id
    [letter] = wait_for(lambda: listed(site, 'failures', 'list', '--error', 'delivery limit'), 'the dead letter')
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
    [letter] = wait_for(lambda: listed(site, 'failures', 'list', '--error', 'delivery limit'), 'the dead letter')
    assert letter['error'] == 'delivery limit: delivered 2 times and never acknowledged'
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
