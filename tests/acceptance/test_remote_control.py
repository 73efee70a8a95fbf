"""`celery inspect` and `celery control`."""

from __future__ import annotations

from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError

from tests.conftest import PATIENCE, wait_for
from tests.worker_process import WorkerProcess

from .conftest import Site

#: The app of a worker whose feed of broadcasts never says anything.
DEAF = b"""
import threading

from kombu_couchdb.couchdb import changes

open_feed = changes.open_feed

def silent(client, *args, **options):
    if client.address.database.endswith('-broadcasts'):
        threading.Event().wait()
    return open_feed(client, *args, **options)

changes.open_feed = silent
from tests.acceptance.app import app
"""


def test_inspect_and_control(site: Site) -> None:
    workers = [site.start(concurrency=1, worker_prefetch_multiplier=1) for _ in range(2)]
    names = [worker.hostname() for worker in workers]
    for worker in workers:
        worker.ready()
    inspect, control = site.app.control.inspect(names, timeout=PATIENCE, limit=2), site.app.control
    assert inspect.ping() == {name: {'ok': 'pong'} for name in names}
    stats = inspect.stats()
    assert set(stats) == set(names)
    for name in names:
        assert stats[name]['broker']['transport'] == 'couchdb'
        assert 'password' not in stats[name]['broker']
        requests = stats[name]['couchdb']['requests']
        assert requests['count'] == requests['buckets']['+Inf'] > 0 == requests['failed']
    assert site.server.password not in str(stats)
    assert {task for tasks in inspect.registered().values() for task in tasks} >= {'add', 'nap'}
    assert {queue['name'] for queues in inspect.active_queues().values() for queue in queues} == {'celery'}

    to = {'destination': names[:1], 'reply': True, 'timeout': PATIENCE, 'limit': 1}
    assert 'ok' in control.rate_limit('add', '10/m', **to)[0][names[0]]
    assert 'ok' in control.add_consumer('second', **to)[0][names[0]]
    assert site.send('add', 1, 2, queue='second').get(timeout=PATIENCE) == 3
    assert 'ok' in control.cancel_consumer('second', **to)[0][names[0]]
    control.shutdown(names[:1])
    assert workers[0].container.wait(PATIENCE) == 0

    running = site.send('late_nap', str(site.journal), 'a', None)
    wait_for(site.journalled, 'the task to start')
    [active] = site.app.control.inspect(names[1:], timeout=PATIENCE, limit=1).active()[names[1]]
    assert (active['id'], active['name']) == (running.id, 'late_nap')
    revoked = site.send('late_nap', str(site.journal), 'b', 0)
    control.revoke(revoked.id, reply=True, timeout=PATIENCE, limit=1)
    site.go_on()
    assert running.get(timeout=PATIENCE) == 'a'
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=PATIENCE)
    assert site.journalled() == ['start a', 'end a']


@pytest.mark.parametrize('pool', ['solo', 'prefork'])
def test_task_that_is_sent_after_revoke_does_not_run(site: Site, pool: str) -> None:
    command = WorkerProcess.command('--pool', pool, '--concurrency', '1')
    site.run(command, {**site.environment, 'SETTINGS': '{}'}, {'app.py': DEAF}).ready()
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    for _ in range(3):
        task_id = uuid4().hex
        site.app.control.revoke(task_id)
        with pytest.raises(TaskRevokedError):
            site.send('nap', str(site.journal), 'a', 0, task_id=task_id).get(timeout=PATIENCE)
    assert not site.journalled()
