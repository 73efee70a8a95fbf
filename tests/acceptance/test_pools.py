"""Every pool of Celery."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import PATIENCE

from .conftest import Site


@pytest.mark.parametrize('pool', ['prefork', 'threads', 'solo', 'gevent', 'eventlet'])
def test_pool(site: Site, pool: str) -> None:
    if pool in ('gevent', 'eventlet') and importlib.util.find_spec(pool) is None:
        pytest.skip(f'{pool} is not installed')
    worker = site.worker(pool=pool)
    results = [site.send('add', number, 1) for number in range(30)]
    assert [result.get(timeout=PATIENCE) for result in results] == list(range(1, 31))
    assert site.send('add', 20, 22, countdown=1).get(timeout=PATIENCE) == 42
    assert site.app.control.ping([worker.name], timeout=PATIENCE, limit=1) == [{worker.name: {'ok': 'pong'}}]
    assert worker.terminate() == 0
    assert 'Traceback' not in worker.log
    consumers = [row['doc']['pid'] for row in site.client.id_range('broker:consumer:', docs=True)]
    assert worker.process.pid not in consumers
