"""Dead letters of real workers, and the commands that list, replay and drop them."""

from __future__ import annotations

import json

from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site
from .test_command import couchdb, sentence, succeeded


def letters(site: Site, *arguments: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in succeeded(couchdb(site, 'dead', 'list', '--json', *arguments)).splitlines()]


def test_task_that_kills_its_process_becomes_a_dead_letter(site: Site) -> None:
    site.worker(
        pool='prefork',
        concurrency=1,
        broker_transport_options={'delivery_limit': 3},
        worker_enable_remote_control=False,
    )
    task_id = site.send('deadly', str(site.journal)).id
    [letter] = wait_for(lambda: letters(site), 'the dead letter')
    assert letter['id'] == task_id
    assert letter['task'] == 'deadly'
    assert 1 <= len(site.journalled()) <= 3
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3


def test_task_that_kills_its_worker_becomes_a_dead_letter(site: Site) -> None:
    """The solo pool runs tasks in the process of the worker, so that each run ends a worker."""
    options = {'delivery_limit': 2, **SHORT_LEASE}
    site.send('deadly', str(site.journal))
    for _ in range(2):
        site.start(pool='solo', broker_transport_options=options).container.wait(PATIENCE)
    assert site.journalled() == ['deadly', 'deadly']
    site.worker(pool='solo', broker_transport_options=options)
    [letter] = wait_for(lambda: letters(site), 'the dead letter')
    assert letter['reason'] == 'delivery limit: delivered 2 times and never acknowledged'
    assert letter['attempts'] == 2
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    assert site.journalled() == ['deadly', 'deadly']


def test_refused_tasks_are_listed_shown_replayed_and_dropped(site: Site, client: Client) -> None:
    site.worker()
    results = [site.send('refused', str(site.journal), name) for name in 'abc']
    wait_for(lambda: len(letters(site)) == 3, 'three dead letters')
    listed = succeeded(couchdb(site, 'dead', 'list', COLUMNS='100'))
    assert all(result.id in listed for result in results)
    assert 'rejected' in listed
    shown = succeeded(couchdb(site, 'dead', 'show', results[0].id))
    assert f'"{site.journal}", "a"' in shown
    assert sentence(couchdb(site, 'dead', 'show', 'unknown')) == "Error: there is no dead letter 'unknown'"
    # Without confirmation, the commands change nothing.
    assert couchdb(site, 'dead', 'drop', results[2].id).returncode == 1
    assert succeeded(couchdb(site, 'dead', 'drop', results[2].id, '--yes')) == '1 dropped.\n'
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'dead', 'replay', results[0].id, '--yes')) == '1 replayed.\n'
    assert results[0].get(timeout=PATIENCE) == 'a'
    assert succeeded(couchdb(site, 'dead', 'replay', '--queue', 'celery', '--yes')) == '1 replayed.\n'
    assert results[1].get(timeout=PATIENCE) == 'b'
    assert site.journalled() == ['a', 'b']
    assert succeeded(couchdb(site, 'dead', 'list')) == 'There are no dead letters.\n'


def test_unknown_task_becomes_a_dead_letter(site: Site) -> None:
    site.worker()
    task_id = site.send('unknown.task', 1).id
    [letter] = wait_for(lambda: letters(site), 'the dead letter')
    assert (letter['id'], letter['task'], letter['reason'], letter['args']) == (
        task_id,
        'unknown.task',
        'rejected: the worker that received it does not know the task unknown.task',
        [1],
    )


def test_messages_that_are_no_task_or_not_accepted_become_dead_letters(site: Site) -> None:
    site.worker()
    with site.app.producer_pool.acquire() as producer:
        producer.publish({'hello': 'world'}, routing_key='celery', serializer='json')
    site.send('add', 1, 2, serializer='pickle')
    wait_for(lambda: all(doc.get('status') for doc in items(site.client)), 'the dead letters')
    no_task, pickled = items(site.client)
    assert no_task['reason'] == 'rejected: the message names no task'
    assert 'Refusing to deserialize untrusted content of type pickle' in pickled['reason']


def test_replay_forgets_the_failed_result(site: Site) -> None:
    """Final results are not overwritten, so that a replay deletes them first."""
    site.app.backend.store_result('known', ValueError('before'), 'FAILURE')
    site.worker()
    result = site.send('refused', str(site.journal), 'again', task_id='known')
    wait_for(lambda: letters(site), 'the dead letter')
    site.journal.with_name('may pass').touch()
    succeeded(couchdb(site, 'dead', 'replay', '--all', '--yes'))
    wait_for(lambda: result.state == 'SUCCESS', 'the new result')
