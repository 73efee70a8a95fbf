"""A job that is removed while its worker is cut off does not run when the worker returns."""

from __future__ import annotations

import pytest

from celery_couchdb.jobs import Jobs
from kombu_couchdb.queues.databases import broadcasts_of
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site


def delete_broadcasts(site: Site) -> None:
    """Delete the broadcasts, as later ones overwrite them, so that a worker that is cut off never gets them."""
    client = broadcasts_of(site.client)
    rows = client.id_range('broker:broadcast:')
    assert rows
    client.bulk([{'_id': row['id'], '_rev': row['value']['rev'], '_deleted': True} for row in rows])
    client.close()


@pytest.mark.parametrize('lease_ends', [False, True], ids=['lease continues', 'lease ends'])
def test_claimed_job_that_is_removed_meanwhile_is_not_started(site: Site, proxy: Proxy, lease_ends: bool) -> None:
    lease = {'broker_transport_options': SHORT_LEASE} if lease_ends else {}
    direct = site.environment['BROKER_URL']
    site.environment['BROKER_URL'] = site.through(proxy, direct)
    worker = site.worker(pool='prefork', concurrency=1, worker_prefetch_multiplier=4, **lease)
    site.environment['BROKER_URL'] = direct
    jobs = Jobs(site.app)
    site.send('nap', str(site.journal), 'first', None)
    wait_for(lambda: site.journalled() == ['start first'], 'the first task to start')
    second = site.send('late_nap', str(site.journal), 'second', 0)
    assert jobs.wait(second.id, 'prefetched', timeout=PATIENCE) == 'prefetched'
    # From here on it knows of its claim. What it does not know that it claimed is released, and this is another way.
    wait_for(lambda: f'late_nap[{second.id}] received' in worker.logs(), 'the worker to receive the job')
    proxy.refuse()
    proxy.cut()
    if lease_ends:
        site.worker(**lease)
    jobs.remove(second.id)
    delete_broadcasts(site)
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
