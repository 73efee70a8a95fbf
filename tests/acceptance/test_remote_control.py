"""`celery inspect` and `celery control`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site


def test_inspect(site: Site) -> None:
    names = [worker.hostname() for worker in [site.start(), site.start()]]
    for worker in site.workers:
        worker.ready()
    inspect = site.app.control.inspect(names, timeout=PATIENCE, limit=2)
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
    result = site.send('nap', str(site.journal), 'a', None)
    wait_for(site.journalled, 'the task to start')
    [active] = [task for tasks in inspect.active().values() for task in tasks]
    assert (active['id'], active['name']) == (result.id, 'nap')


def test_ping(site: Site) -> None:
    worker = site.worker()
    wait_for(lambda: site.app.control.ping(timeout=2) == [{worker.hostname(): {'ok': 'pong'}}], 'the reply to a ping')


def test_control(site: Site) -> None:
    worker = site.worker()
    control, to = site.app.control, {'destination': [worker.hostname()], 'reply': True, 'timeout': PATIENCE, 'limit': 1}
    assert 'ok' in control.rate_limit('add', '10/m', **to)[0][worker.hostname()]
    assert 'ok' in control.add_consumer('second', **to)[0][worker.hostname()]
    assert site.send('add', 1, 2, queue='second').get(timeout=PATIENCE) == 3
    assert 'ok' in control.cancel_consumer('second', **to)[0][worker.hostname()]
    control.shutdown([worker.hostname()])
    assert worker.container.wait(PATIENCE) == 0


def test_revoke(site: Site) -> None:
    site.worker(concurrency=1, worker_prefetch_multiplier=1)
    running = site.send('late_nap', str(site.journal), 'a', None)
    wait_for(site.journalled, 'the first task to start')
    revoked = site.send('late_nap', str(site.journal), 'b', 0)
    site.app.control.revoke(revoked.id, reply=True, timeout=PATIENCE, limit=1)
    site.go_on()
    assert running.get(timeout=PATIENCE) == 'a'
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=PATIENCE)
    assert site.journalled() == ['start a', 'end a']


def test_revoke_a_scheduled_task(site: Site) -> None:
    site.worker()
    revoked = site.send('add', 1, 1, countdown=8)
    site.app.control.revoke(revoked.id)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=PATIENCE)


def test_scheduled_tasks_are_shown_soonest_first(site: Site) -> None:
    worker = site.worker('-Q', 'celery,other')
    for seconds, queue in ((7200, 'celery'), (3600, 'other'), (5400, 'celery'), (60, 'not consumed')):
        site.app.send_task('add', (seconds, 1), {'key': queue}, queue=queue, countdown=seconds, task_id=f'in-{seconds}')
    inspect = site.app.control.inspect([worker.hostname()], timeout=PATIENCE, limit=1)

    def ids(shown: list[Any]) -> list[str]:
        return [one['request']['id'] for one in shown]

    shown: Any = wait_for(lambda: next(iter((inspect.scheduled() or {}).values()), None), 'a reply')
    assert ids(shown) == ['in-3600', 'in-5400', 'in-7200']
    first = shown[0]
    assert set(first) == {'eta', 'priority', 'request'}
    request = first['request']
    assert datetime.fromisoformat(first['eta']).timestamp() == pytest.approx(site.client.clock.now() + 3600, abs=1000)
    assert (request['name'], request['args'], request['kwargs']) == ('add', [3600, 1], {'key': 'other'})
    assert request['delivery_info']['routing_key'] == 'other'
    site.client.bulk([{**doc, '_deleted': True} for doc in items(site.client) if doc['queue'] == 'other'])
    assert ids(inspect._request('dump_schedule')[worker.hostname()]) == ['in-5400', 'in-7200']
