"""Dead letters of real workers, and the commands that list, replay and drop them."""

from __future__ import annotations

from kombu_couchdb.admin import dead
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site, couchdb, listed, succeeded


def test_task_that_kills_its_process_becomes_a_dead_letter(site: Site) -> None:
    site.worker(
        pool='prefork',
        concurrency=1,
        broker_transport_options={'delivery_limit': 3},
        worker_enable_remote_control=False,
    )
    task_id = site.send('deadly', str(site.journal)).id
    [letter] = wait_for(lambda: listed(site, 'dead', 'list'), 'the dead letter')
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
    [letter] = wait_for(lambda: listed(site, 'dead', 'list'), 'the dead letter')
    assert letter['reason'] == 'delivery limit: delivered 2 times and never acknowledged'
    assert letter['attempts'] == 2
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    assert site.journalled() == ['deadly', 'deadly']


def test_refused_tasks_are_listed_shown_replayed_and_dropped(site: Site) -> None:
    site.app.backend.store_result('known', ValueError('before'), 'FAILURE')  # a final result, which a replay deletes
    site.worker()
    first = site.send('refused', str(site.journal), 'a', task_id='known')
    others = [site.send('refused', str(site.journal), name) for name in 'bc']
    results = [first, *others]
    wait_for(lambda: dead.count(site.client) == 3, 'three dead letters')
    table = succeeded(couchdb(site, 'dead', 'list', COLUMNS='100'))
    assert all(result.id in table for result in others)
    assert 'rejected' in table
    assert f'"{site.journal}", "b"' in succeeded(couchdb(site, 'dead', 'show', others[0].id))
    # Without confirmation, the commands change nothing.
    assert couchdb(site, 'dead', 'drop', others[1].id).exit_code == 1
    assert succeeded(couchdb(site, 'dead', 'drop', others[1].id, '--yes')) == '1 dropped.\n'
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'dead', 'replay', first.id, '--yes')) == '1 replayed.\n'
    wait_for(lambda: first.state == 'SUCCESS', 'the new result')
    assert succeeded(couchdb(site, 'dead', 'replay', '--queue', 'celery', '--yes')) == '1 replayed.\n'
    assert [result.get(timeout=PATIENCE) for result in results[:2]] == ['a', 'b']
    assert site.journalled() == ['a', 'b']
    assert succeeded(couchdb(site, 'dead', 'list')) == 'There are no dead letters.\n'


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
