"""A job that is removed while its worker is cut off does not run when the worker returns."""

from __future__ import annotations

import pytest

from celery_couchdb.jobs import Jobs
from chaos.proxy import Proxy
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site


@pytest.mark.parametrize('lease_ends', [False, True], ids=['lease continues', 'lease ends'])
def test_claimed_job_that_is_removed_meanwhile_is_not_started(site: Site, proxy: Proxy, lease_ends: bool) -> None:
    lease = {'broker_transport_options': SHORT_LEASE} if lease_ends else {}
    direct = site.environment['BROKER_URL']
    site.environment['BROKER_URL'] = site.through(proxy, direct)
    worker = site.worker(pool='prefork', concurrency=1, worker_prefetch_multiplier=4, **lease)
    site.environment['BROKER_URL'] = direct
    site.app.conf.broker_transport_options = {**site.app.conf.broker_transport_options, 'fanout_retention': 0.5}
    jobs = Jobs(site.app)
    site.send('nap', str(site.journal), 'first', None)
    wait_for(lambda: site.journalled() == ['start first'], 'the first task to start')
    second = site.send('late_nap', str(site.journal), 'second', 0)
    assert jobs.wait(second.id, 'running', timeout=PATIENCE) == 'running'
    proxy.refuse()
    proxy.cut()
    if lease_ends:
        site.worker(**lease)
    jobs.remove(second.id)  # the worker never gets this broadcast: it expires before the worker returns
    assert jobs.wait(second.id, timeout=PATIENCE) == 'gone' if lease_ends else items(site.client)
    wait_for(lambda: 'trying again until it responds' in worker.logs(), 'the worker to be cut off')
    proxy.restore()
    wait_for(lambda: f'task {second.id} was removed while' in worker.logs(), 'the worker to learn of the removal')
    site.go_on()
    wait_for(lambda: 'end first' in site.journalled(), 'the first task to end')
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    wait_for(lambda: not items(site.client), 'the deletion')
    assert site.journalled() == ['start first', 'end first']
    jobs.client.close()
