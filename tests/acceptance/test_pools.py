"""All pools of Celery."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.chaos.proxy import Proxy
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
    assert site.app.control.ping([worker.hostname()], timeout=PATIENCE, limit=1) == [
        {worker.hostname(): {'ok': 'pong'}}
    ]
    assert worker.container.terminate() == 0
    assert 'Traceback' not in worker.logs()
    consumers = [row['doc']['pid'] for row in site.client.id_range('broker:consumer:', docs=True)]
    assert worker.container.pid not in consumers


def test_children_of_a_pool_store_results_through_the_main_process(
    site: Site, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They use sockets without files, so that a killed worker leaves none."""
    folder = tmp_path / 'temporary'
    folder.mkdir()
    monkeypatch.setenv('TMPDIR', str(folder))
    site.reroute(proxy, 'RESULT_URL')  # only results: otherwise each of the children would open a connection
    worker = site.worker(pool='prefork', concurrency=4)
    results = [site.send('nap', str(tmp_path / 'naps'), str(number), 0.1) for number in range(20)]
    assert [result.get(timeout=PATIENCE) for result in results] == [str(number) for number in range(20)]
    assert proxy.accepted < 4
    worker.kill()
    assert [path.name for path in folder.iterdir() if 'couchdb' in path.name] == []
    assert 'Traceback' not in worker.logs()
