"""Real workers and paused queues, and the commands `celery couchdb queues`."""

from __future__ import annotations

import pytest
from celery import chord

from kombu_couchdb.admin import queues
from kombu_couchdb.errors import QueuePaused
from kombu_couchdb.queues.declarations import declarations_of
from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site, couchdb, listed, sentence, succeeded


def test_running_tasks_finish_and_others_wait(site: Site) -> None:
    worker = site.worker(pool='prefork', concurrency=2, worker_prefetch_multiplier=1)
    running = [site.send('late_nap', str(site.journal), name, None) for name in 'ab']
    wait_for(lambda: len(site.journalled()) == 2, 'the tasks to start')
    before = [site.send('add', number, 1) for number in range(3)]
    paused = couchdb(site, 'queues', 'pause', 'celery', '--reason', 'database upgrade')
    assert succeeded(paused) == '1 queue paused.\n'
    wait_for(lambda: "queue 'celery' is paused" in worker.logs(), 'the worker to learn of it')
    after = chord([site.app.signature('add', (number, 2)) for number in range(3)], site.app.signature('total'))()
    site.go_on()
    assert [result.get(timeout=PATIENCE) for result in running] == ['a', 'b']
    assert site.app.control.ping(timeout=PATIENCE, limit=1), 'remote control works'
    wait_for(lambda: all(item['claimed'] is None for item in items(site.client)), 'the acknowledgements')
    assert len(items(site.client)) == 6
    [queue] = [each for each in listed(site, 'queues', 'list') if each['name'] == 'celery']
    assert (queue['ready'], queue['prefetched'], queue['paused']['reason']) == (6, 0, 'database upgrade')
    assert 'database upgrade' in succeeded(couchdb(site, 'status'))
    assert listed(site, 'status')[0]['queues']['celery']['paused'] == queue['paused']
    assert succeeded(couchdb(site, 'queues', 'resume', 'celery')) == '1 queue resumed.\n'
    assert [result.get(timeout=PATIENCE) for result in before] == [1, 2, 3]
    assert after.get(timeout=PATIENCE) == 9


def test_patterns_and_all(site: Site) -> None:
    for queue in ('celery', 'mail.fast', 'mail.slow'):
        site.send('add', 1, 2, queue=queue)
    assert succeeded(couchdb(site, 'queues', 'pause', 'mail.*', 'celery')) == '3 queues paused.\n'
    assert succeeded(couchdb(site, 'queues', 'resume', 'mail.s*')) == '1 queue resumed.\n'
    assert queues.paused(site.client).keys() == {'celery', 'mail.fast'}
    said = succeeded(couchdb(site, 'queues', 'pause', '--all'))
    assert ('1 queue paused' in said, '2 queues were paused already' in said) == (True, True)
    assert succeeded(couchdb(site, 'queues', 'resume', '--all')) == '3 queues resumed.\n'
    assert succeeded(couchdb(site, 'queues', 'resume', '--all')) == 'No queue is paused.\n'
    assert succeeded(couchdb(site, 'queues', 'resume', 'celery')) == '1 queue was not paused.\n'
    assert succeeded(couchdb(site, 'queues', 'pause', 'later', '--new')) == '1 queue paused.\n'


def test_purge_and_delete(site: Site) -> None:
    for number in range(3):
        site.send('add', number, 2)
    assert couchdb(site, 'queues', 'purge', 'celery').exit_code == 1, 'it was not confirmed'
    assert succeeded(couchdb(site, 'queues', 'purge', 'celery', '--yes')) == '3 messages deleted.\n'
    worker = site.worker()
    wait_for(
        lambda: any('celery' in consumer['queues'] for consumer in listed(site, 'status')[0]['consumers']),
        'the heartbeat of the worker',
    )
    refused = sentence(couchdb(site, 'queues', 'delete', 'celery', '--yes'))
    assert refused.startswith("queue 'celery' is in use by ")
    assert worker.container.terminate() == 0
    assert succeeded(couchdb(site, 'queues', 'delete', 'celery', '--yes')) == '0 messages deleted.\n'
    assert 'celery' not in [queue['name'] for queue in listed(site, 'queues', 'list')]


def test_worker_goes_on_to_publish_to_a_queue_that_refuses_programs(site: Site) -> None:
    """The next step of a chain and the body of a chord wait; a program gets a sentence, and so does beat."""
    site.worker(pool='prefork', concurrency=2)
    signature = site.app.signature
    nap, add = signature('late_nap', (str(site.journal), 'a', None)), signature('add', (1, 2), immutable=True)
    results = [(nap | add).apply_async(), chord([nap, add], signature('length'))()]
    wait_for(lambda: len(site.journalled()) == 2, 'the tasks to start')
    succeeded(couchdb(site, 'queues', 'pause', 'celery', '--refuse', '--reason', 'an upgrade'))
    known = declarations_of(site.client.address.url)
    wait_for(lambda: known.pause('celery') != {}, 'what the program knew to be too old')
    with pytest.raises(QueuePaused, match=r"^queue 'celery' is paused by .* and takes no new messages \(an upgrade\);"):
        site.send('add', 1, 2)
    assert 'takes no new messages: an upgrade' in succeeded(couchdb(site, 'queues', 'list'))
    site.go_on()
    wait_for(lambda: [item['claimed'] for item in items(site.client)] == [None, None], 'the follow-ups to wait')
    succeeded(couchdb(site, 'queues', 'resume', 'celery'))
    assert [result.get(timeout=PATIENCE) for result in results] == [3, 2]
