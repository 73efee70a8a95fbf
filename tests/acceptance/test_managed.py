"""Workers and publishers behind a service that limits requests: `examples.managed.service`, with the smallest plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import group

from examples.managed.service import PLANS, Service
from tests.conftest import PATIENCE
from tests.support import items

from .conftest import Site

LITE = PLANS['lite']

#: The writes of a task with a result: the message, its claim, the result, the acknowledgement.
_WRITES = 4


@pytest.fixture
def service(site: Site) -> Iterator[Service]:
    """The service, in front of the site's databases, which are set up."""
    site.set_up()
    with Service(site.server.url, LITE) as service:
        url = service.url.replace('http', 'couchdb', 1)
        site.use(f'{url}/{site.database}', f'{url}/{site.results}')
        yield service


@pytest.mark.slow
@pytest.mark.parametrize('is_killed', [False, True], ids=['', 'killed'])
def test_two_workers_use_what_the_limits_allow(site: Site, service: Service, is_killed: bool) -> None:
    tasks, journal = 150, str(site.journal)
    options = {'broker_transport_options': {'visibility_timeout': 20.0}}
    first, _ = (site.worker(pool='prefork', **options) for _ in range(2))
    service.restart_counts()
    began = time.monotonic()
    results = [site.send('late_nap', journal, str(number), 0) for number in range(tasks)]
    if is_killed:
        first.kill('SIGKILL')
    names = [result.get(timeout=PATIENCE * 2) for result in results]
    seconds = time.monotonic() - began
    assert names == [str(number) for number in range(tasks)]
    ended = [line for line in site.journalled() if line.startswith('end')]
    assert len(ended) == tasks or is_killed
    counts = service.snapshot()
    # How long it takes depends on the machine, too: what the limits allow is 60 s.
    assert counts['units']['write'] < 1.25 * _WRITES * tasks, (seconds, counts)
    assert len(counts['refused_again']) <= 0.1 * sum(counts['refused'].values()) + 1, (seconds, counts)


@pytest.mark.slow
@pytest.mark.parametrize('way', ['loop', 'group', 'threads'])
def test_burst_is_stored_without_an_error(site: Site, service: Service, way: str) -> None:
    tasks = 300
    if way == 'loop':
        for number in range(tasks):
            site.send('add', number, 1)
    elif way == 'group':
        group(site.app.signature('add', (number, 1)) for number in range(tasks)).apply_async()
    else:
        with ThreadPoolExecutor(20) as threads:
            for result in threads.map(lambda number: site.send('add', number, 1), range(tasks)):
                assert result.id
    assert len({item['_id'] for item in items(site.client)}) == tasks


@pytest.mark.slow
def test_idle_workers_need_little(site: Site, service: Service) -> None:
    for _ in range(2):
        site.worker(pool='prefork')
    units = 99
    while units > 5:  # what they do when they start is not measured
        service.restart_counts()
        time.sleep(5.0)
        units = sum(service.snapshot()['units'].get(kind.value, 0) for kind in LITE)
    service.restart_counts()
    time.sleep(30.0)
    counts = service.snapshot()
    for kind, limit in LITE.items():
        assert counts['units'].get(kind.value, 0) / counts['seconds'] < limit / 4, counts
    assert sum(counts['refused'].values()) <= 2, counts
