"""`celery -A app couchdb check` and `… metrics`, as a service manager and Prometheus use them, next to real workers."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import Result

from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import ROOT

from .conftest import Site, couchdb, sentence, succeeded
from .test_command import arguments, environment


def test_worker_passes_unless_it_is_stopped(site: Site) -> None:
    worker = site.worker(broker_transport_options=SHORT_LEASE)
    name = worker.hostname()

    def check() -> Result:
        return couchdb(site, 'check', '--timeout', str(PATIENCE), '--worker', name)

    wait_for(lambda: not check().exit_code, 'the first heartbeat')
    assert f'; worker {name} wrote a heartbeat ' in succeeded(check())
    worker.kill('SIGSTOP')
    wait_for(lambda: check().exit_code, 'the lease to end')
    assert f'Error: worker {name} is overdue' in sentence(check())
    worker.kill('SIGCONT')
    wait_for(lambda: not check().exit_code, 'the next heartbeat')
    assert worker.container.terminate() == 0
    assert sentence(check()).startswith(f'Error: worker {name} has no consumer')


@contextmanager
def serving(site: Site) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `metrics --listen` on a free port, and return the process and the URL."""
    with subprocess.Popen(
        arguments('metrics', '--listen', '127.0.0.1:0', '--keep', '0', '--timeout', str(PATIENCE)),
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


def test_metrics_follow_the_queue_until_a_signal(site: Site) -> None:
    pytest.importorskip('prometheus_client')
    site.worker()
    with serving(site) as (process, url), serving(site) as (other, _):
        assert 'celery_couchdb_queue_consumers{queue="celery"} 1.0' in scrape(url)
        site.send('add', 1, 2, countdown=3600)
        assert 'celery_couchdb_queue_messages{queue="celery",state="scheduled"} 1.0' in scrape(url)
        assert not any('pidbox' in line for line in scrape(url))
        taken = couchdb(site, 'metrics', '--listen', url.split('/')[2])
        assert 'Error: cannot listen on 127.0.0.1:' in sentence(taken)
        for each, number in ((process, signal.SIGTERM), (other, signal.SIGINT)):
            each.send_signal(number)
            assert each.communicate(timeout=PATIENCE) == ('', '')
            assert each.returncode == 0
