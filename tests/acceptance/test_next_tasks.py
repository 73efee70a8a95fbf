"""The next step of a chain: the worker stores it while the next task runs, and before the ended task's message goes."""

from __future__ import annotations

import pytest
from celery import chain, chord
from celery.app.amqp import AMQP
from celery.result import AsyncResult

from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import items

from .conftest import Site

pytestmark = pytest.mark.skipif(not hasattr(AMQP, '_retry_publish'), reason='Celery before 5.7 publishes them itself')

LEASE = {'broker_transport_options': SHORT_LEASE}

#: CouchDB calls this function for each write. It refuses the messages of one task.
NO_TOTALS = {
    '_id': '_design/no-totals',
    'validate_doc_update': """function (newDoc, oldDoc, userCtx) {
    if (newDoc.type === 'WorkItem' && newDoc.message.headers.task === 'total') {
        throw({forbidden: 'totals are not allowed'});
    }
}""",
}


def worker_behind(site: Site, proxy: Proxy, pool: str) -> None:
    """Start a worker of which only what it publishes passes the proxy, and let it publish once."""
    url = site.through(proxy, site.environment['BROKER_URL'])
    site.worker(pool=pool, concurrency=1, broker_write_url=url, task_acks_late=True, **LEASE)
    assert steps(site).apply_async().get(timeout=PATIENCE) == 6
    wait_for(lambda: not items(site.client), 'the messages to be deleted')


def steps(site: Site) -> chain:
    """Return a chain of three steps."""
    step = site.app.signature
    return chain(step('add', (1, 2)), step('add', (2,)), step('add', (1,)), app=site.app)


def run_first_step(site: Site) -> list[AsyncResult]:
    """Send the chain and another task, and wait until that has run; return both results."""
    results = [steps(site).apply_async(), site.send('late_nap', str(site.journal), 'other', 0)]
    wait_for(lambda: 'end other' in site.journalled(), 'the next task to run, although the step is not stored')
    return results


def run_to_the_end(site: Site, results: list[AsyncResult]) -> None:
    """Wait until both have run and nothing is left."""
    assert [result.get(timeout=PATIENCE) for result in results] == [6, 'other']
    wait_for(lambda: not items(site.client), 'the messages to be deleted')


@pytest.mark.parametrize('pool', ['prefork', 'solo'])
def test_message_stays_until_the_next_step_is_stored(site: Site, proxy: Proxy, pool: str) -> None:
    worker_behind(site, proxy, pool)
    proxy.refuse()
    results = run_first_step(site)
    first = results[0].parent.parent
    assert first.id in {item['message']['headers']['id'] for item in items(site.client)}
    proxy.restore()
    run_to_the_end(site, results)


def test_killed_worker_loses_no_step_of_a_late_acknowledged_task(site: Site, proxy: Proxy) -> None:
    worker_behind(site, proxy, 'prefork')
    proxy.hang()
    results = run_first_step(site)
    site.workers[0].kill()
    proxy.go_on()
    site.worker(**LEASE)
    run_to_the_end(site, results)


def test_step_that_is_refused_has_a_failure_and_ends_its_chord(site: Site, apache_couchdb: bool) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server does not call validate_doc_update')
    site.set_up()
    site.client.put(NO_TOTALS)
    worker = site.worker(pool='prefork')
    step = site.app.signature
    result = chain(step('add', (1, 2)), step('total', ()), app=site.app).apply_async()
    with pytest.raises(Exception, match='totals are not allowed'):
        result.get(timeout=PATIENCE)
    assert result.parent.get(timeout=PATIENCE) == 3
    assert f'task total[{result.id}] could not be published' in worker.logs()
    header = [chain(step('add', (1, 2)), step('total', ()), app=site.app), step('add', (1, 1))]
    body = chord(header, app=site.app)(step('lineage', immutable=True))
    with pytest.raises(Exception, match='totals are not allowed'):
        body.get(timeout=PATIENCE)
