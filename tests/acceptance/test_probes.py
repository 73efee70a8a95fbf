"""`celery -A app couchdb check` and `… metrics`, as a service manager and Prometheus use them, next to real workers."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import ROOT

from .conftest import Site
from .test_command import arguments, couchdb, environment, sentence, succeeded


def check(site: Site, worker: str, settings: str = '{}') -> subprocess.CompletedProcess[str]:
    return couchdb(site, 'check', '--timeout', str(PATIENCE), '--worker', worker, SETTINGS=settings)


@pytest.mark.parametrize('pool', ['threads', 'gevent'])
def test_running_worker_passes(site: Site, pool: str) -> None:
    if pool == 'gevent' and importlib.util.find_spec(pool) is None:
        pytest.skip(f'{pool} is not installed')
    worker = site.worker(pool=pool)
    name = worker.hostname()
    assert f'; worker {name} wrote a heartbeat ' in succeeded(check(site, name))
    assert worker.container.terminate() == 0
    assert sentence(check(site, name)).startswith(f'Error: worker {name} has no consumer')


@pytest.mark.parametrize('remote_control', [True, False])
def test_stopped_process_fails_until_it_continues(site: Site, remote_control: bool) -> None:
    worker = site.worker(broker_transport_options=SHORT_LEASE, worker_enable_remote_control=remote_control)
    name, settings = worker.hostname(), json.dumps({'worker_enable_remote_control': remote_control})
    succeeded(check(site, name, settings))
    worker.kill('SIGSTOP')
    wait_for(lambda: check(site, name, settings).returncode, 'the lease to end')
    assert f'Error: worker {name} is overdue' in sentence(check(site, name, settings))
    worker.kill('SIGCONT')
    wait_for(lambda: not check(site, name, settings).returncode, 'the next heartbeat')


@contextmanager
def serving(site: Site, *given: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `metrics --listen` on a free port, and return the process and the URL."""
    with subprocess.Popen(
        arguments('metrics', '--listen', '127.0.0.1:0', '--keep', '0', *given),
        cwd=ROOT,
        env=environment(site),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stderr is not None
            found = re.fullmatch(r'Serving metrics on (\S+)\n', process.stderr.readline())
            assert found is not None
            yield process, found[1]
        finally:
            process.kill()


def scrape(url: str) -> list[str]:
    with urllib.request.urlopen(url, timeout=PATIENCE) as response:
        return list(response.read().decode().splitlines())


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_metrics_follow_the_queue_until_a_signal(site: Site, number: signal.Signals) -> None:
    pytest.importorskip('prometheus_client')
    site.worker()
    with serving(site, '--timeout', str(PATIENCE)) as (process, url):
        assert 'celery_couchdb_queue_consumers{queue="celery"} 1.0' in scrape(url)
        site.send('add', 1, 2, countdown=3600)
        assert 'celery_couchdb_queue_messages{queue="celery",state="scheduled"} 1.0' in scrape(url)
        assert not any('pidbox' in line for line in scrape(url))
        taken = couchdb(site, 'metrics', '--listen', url.split('/')[2])
        assert 'Error: cannot listen on 127.0.0.1:' in sentence(taken)
        process.send_signal(number)
        assert process.communicate(timeout=PATIENCE) == ('', '')
        assert process.returncode == 0
