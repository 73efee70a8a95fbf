"""Results that return to other regions, with real workers: in which databases they are, and acknowledgements wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain

from kombu_couchdb.contrib.regions.region import results_in
from kombu_couchdb.couchdb.client import Client
from tests.acceptance.conftest import Site
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

LEASE = {'broker_transport_options': SHORT_LEASE}


@pytest.fixture
def regions(site: Site) -> Iterator[Client]:
    """The database of regions of this region."""
    with site.server.fresh_database() as name:
        client = site.server.client(name)
        client.create()
        yield client
        client.close()


def headers(regions: Client, task_id: str) -> dict[str, Any]:
    """Return the headers of a task that region `us` gave to this one, as the leader sets them."""
    giver = ['eu', regions.address.database, 'us', task_id, f'p:eu:{task_id}:tag']
    return {'x-giver': giver, 'x-from-region': 'us'}


def returned(regions: Client) -> dict[str, Any]:
    """Return what has returned, by task id; each result has returned once."""
    docs = [doc for row in regions.id_range('r:us:', docs=True) for doc in results_in(row['doc'])]
    found = {doc['_id'].split(':')[2]: doc['result'] for doc in docs}
    assert len(found) == len(docs)
    return found


def is_here(site: Site, task_id: str) -> bool:
    backend = site.app.backend
    return backend.client.get_or_none(backend.get_key_for_task(task_id)) is not None


@pytest.mark.parametrize('pool', ['prefork', 'threads'])
def test_result_returns_before_the_acknowledgement(site: Site, regions: Client, proxy: Proxy, pool: str) -> None:
    """Only what the worker publishes, and the results that return, pass the proxy."""
    url = site.through(proxy, site.environment['BROKER_URL'])
    worker = site.worker(pool=pool, broker_write_url=url, **LEASE)
    proxy.refuse()
    names = [f'task {number}' for number in range(6)]
    for name in names:
        options = {'task_id': name, 'headers': headers(regions, name)}
        site.send('late_nap', str(site.journal), name, 0, **options)
    wait_for(lambda: sum(line.startswith('end') for line in site.journalled()) == 6, 'the tasks to end')
    wait_for(lambda: 'results are not stored' in worker.logs(), 'the log line')
    assert len(items(site.client)) == 6
    assert returned(regions) == {}
    proxy.restore()
    wait_for(lambda: not items(site.client), 'the messages to be deleted')
    assert {name: doc['value']['result'] for name, doc in returned(regions).items()} == {name: name for name in names}
    assert [is_here(site, name) for name in names] == [False] * 6


@pytest.mark.parametrize('pool', ['prefork', 'threads'])
def test_what_a_task_sends_returns_and_is_stored_here(site: Site, regions: Client, pool: str) -> None:
    site.worker(pool=pool)
    step = site.app.signature
    steps = chain(
        step('add', (1, 2), task_id='first').set(headers=headers(regions, 'first')),
        step('add', (3,), task_id='second'),
        step('add', (4,), task_id='third'),
        app=site.app,
    )
    assert steps.apply_async().get(timeout=PATIENCE) == 10
    wait_for(lambda: not items(site.client), 'the messages to be deleted')
    found = returned(regions)
    assert {name: doc['value']['result'] for name, doc in found.items()} == {'first': 3, 'second': 6, 'third': 10}
    assert [is_here(site, name) for name in ('first', 'second', 'third')] == [False, True, True]


def test_failure_ends_the_later_steps_at_home(site: Site, regions: Client) -> None:
    """Also if the main process of the worker stores it: the process of the task has ended."""
    site.worker(pool='prefork', concurrency=1)
    step = site.app.signature
    for name, first in (('a', step('fail', ('no',))), ('b', step('late_process', (str(site.journal),)))):
        first.set(task_id=name, headers=headers(regions, name))
        chain(first, step('add', (3,), task_id=f'next {name}'), app=site.app).apply_async()
    wait_for(site.journalled, 'the second task to start')
    os.kill(int(site.journalled()[0].split()[1]), signal.SIGKILL)
    wait_for(lambda: [doc.get('status') for doc in items(site.client)] == ['fail', 'fail'], 'the end of both messages')
    ended = dict.fromkeys(('a', 'next a', 'b', 'next b'), 'FAILURE')
    assert {name: doc['status'] for name, doc in returned(regions).items()} == ended
