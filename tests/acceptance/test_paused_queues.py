"""Real workers and paused queues, and the commands `celery couchdb queues`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import chord
from pytest_celery import CeleryTestWorker

from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site
from .test_command import couchdb, sentence, succeeded


def pause(site: Site, *arguments: str) -> None:
    """Pause the queue `celery`, and wait until the workers know of it."""
    assert succeeded(couchdb(site, 'queues', 'pause', 'celery', *arguments)) == 'celery: paused\n'
    wait_for(
        lambda: all("queue 'celery' is paused" in worker.logs() for worker in site.workers),
        'the workers to learn of it',
    )


def resume(site: Site) -> None:
    assert succeeded(couchdb(site, 'queues', 'resume', 'celery')) == 'celery: resumed\n'


def end_worker(worker: CeleryTestWorker) -> None:
    """Let a worker shut down, and wait until it has."""
    worker.kill('SIGTERM')
    assert worker.container.wait(PATIENCE) == 0


def listed(site: Site) -> dict[str, dict[str, Any]]:
    lines = succeeded(couchdb(site, 'queues', 'list', '--json')).splitlines()
    return {queue['name']: queue for queue in map(json.loads, lines)}


def started(site: Site) -> list[str]:
    return [line.removeprefix('start ') for line in site.journalled() if line.startswith('start ')]


@pytest.mark.parametrize('pool', ['threads', 'prefork'])
def test_running_tasks_finish_and_others_wait(site: Site, pool: str) -> None:
    site.worker(pool=pool, concurrency=2, worker_prefetch_multiplier=1)
    running = [site.send('late_nap', str(site.journal), name, None) for name in 'ab']
    wait_for(lambda: len(started(site)) == 2, 'the tasks to start')
    before = [site.send('add', number, 1) for number in range(3)]
    pause(site, '--reason', 'database upgrade')
    after = chord([site.app.signature('add', (number, 2)) for number in range(3)], site.app.signature('total'))()
    site.go_on()
    assert [result.get(timeout=PATIENCE) for result in running] == ['a', 'b']
    assert site.app.control.ping(timeout=PATIENCE, limit=1), 'remote control works'
    wait_for(lambda: all(item['claimed'] is None for item in items(site.client)), 'the acknowledgements')
    assert len(items(site.client)) == 6
    queue = listed(site)['celery']
    assert (queue['ready'], queue['held'], queue['paused']['reason']) == (6, 0, 'database upgrade')
    assert 'database upgrade' in succeeded(couchdb(site, 'status'))
    assert json.loads(succeeded(couchdb(site, 'status', '--json')))['queues']['celery']['paused'] == queue['paused']
    resume(site)
    assert [result.get(timeout=PATIENCE) for result in before] == [1, 2, 3]
    assert after.get(timeout=PATIENCE) == 9
    assert listed(site)['celery']['paused'] is None


def test_patterns_and_all(site: Site) -> None:
    for queue in ('celery', 'mail.fast', 'mail.slow'):
        site.send('add', 1, 2, queue=queue)
    assert succeeded(couchdb(site, 'queues', 'pause', 'mail.*', 'celery')) == (
        'mail.fast: paused\nmail.slow: paused\ncelery: paused\n'
    )
    assert succeeded(couchdb(site, 'queues', 'resume', 'mail.s*')) == 'mail.slow: resumed\n'
    assert succeeded(couchdb(site, 'queues', 'pause', '--all')) == (
        'celery: was paused already\nmail.fast: was paused already\nmail.slow: paused\n'
    )
    assert len(succeeded(couchdb(site, 'queues', 'resume', '--all')).splitlines()) == 3
    assert succeeded(couchdb(site, 'queues', 'resume', '--all')) == 'No queue is paused.\n'
    assert succeeded(couchdb(site, 'queues', 'resume', 'celery')) == 'celery: was not paused\n'
    assert succeeded(couchdb(site, 'queues', 'pause', 'later', '--new')) == 'later: paused\n'


def test_purge_and_delete(site: Site) -> None:
    for number in range(3):
        site.send('add', number, 2)
    assert couchdb(site, 'queues', 'purge', 'celery').returncode == 1, 'it was not confirmed'
    assert succeeded(couchdb(site, 'queues', 'purge', 'celery', '--yes')) == 'celery: 3 messages deleted\n'
    worker = site.worker()
    wait_for(lambda: site.client.id_range('broker:consumer:'), 'the lease of the worker')
    refused = sentence(couchdb(site, 'queues', 'delete', 'celery', '--yes'))
    assert refused.startswith("Error: queue 'celery' is in use by ")
    end_worker(worker)
    assert succeeded(couchdb(site, 'queues', 'delete', 'celery', '--yes')) == 'celery: deleted, with 0 messages\n'
    assert 'celery' not in listed(site)
