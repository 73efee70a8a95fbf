"""An outage of everything, broker and results: workers run what they hold, keep time limits, and obey signals.

A task that would be acknowledged early, when it begins, waits (`test_early_acks`).
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site

#: How long a worker may take to end after a signal, in seconds. On a free machine it needs 3, and with results that are
#: not stored 7 after SIGQUIT.
PROMPT = 25.0

#: The settings of the start pages, with events. The time limits of requests are the defaults: a server that hangs costs
#: 8 seconds.
SETTINGS = {
    'broker_transport_options': {},
    'result_backend_transport_options': {},
    'result_backend_always_retry': True,
    'worker_send_task_events': True,
    'task_acks_late': True,
}


@pytest.fixture
def proxy(site: Site, proxy: Proxy) -> Proxy:
    """A proxy between the workers and the server; the test itself uses none."""
    site.reroute(proxy, *site.environment)
    return proxy


@pytest.mark.parametrize(('pool', 'trouble'), [('prefork', 'hang'), ('gevent', 'refuse')])
@pytest.mark.slow
def test_workers_work_and_end_during_an_outage(site: Site, proxy: Proxy, pool: str, trouble: str) -> None:
    if importlib.util.find_spec(pool) is None and pool == 'gevent':
        pytest.skip('gevent is not installed')
    journal = str(site.journal)
    busy, warm, idle = (
        site.worker('-Q', queue, pool=pool, concurrency=1, **SETTINGS) for queue in ('busy', 'warm', 'idle')
    )
    site.send('nap', journal, 'first', None, queue='busy')
    last = site.send('nap', journal, 'last', None, queue='warm')
    wait_for(lambda: sorted(site.journalled()) == ['start first', 'start last'], 'both tasks to start')

    def claimed() -> int:
        return sum(bool(item['claimed']) for item in items(site.client) if item['queue'] == 'busy')

    # The worker has received the response to each claim but the last.
    for number, options in enumerate([{}, {'time_limit': 2} if pool == 'prefork' else {}, {}], 2):
        site.send('nap', journal, 'limited' if options else 'held', 1000 if options else 0, queue='busy', **options)
        wait_for(lambda number=number: claimed() >= number, 'the message to be claimed')  # type: ignore[misc]

    getattr(proxy, trouble)()
    wait_for(lambda: 'trying again until it responds' in busy.logs() + warm.logs(), 'an outage to be noticed')
    warm.kill('SIGTERM')
    wait_for(lambda: 'Warm shutdown' in warm.logs(), 'the worker to obey the signal')
    site.go_on()
    wait_for(lambda: 'end held' in site.journalled(), 'a message that the worker held to run')
    if pool == 'prefork':
        wait_for(lambda: 'Hard time limit' in busy.logs(), 'the time limit to be enforced')
    idle.kill('SIGTERM')
    assert idle.container.wait(PROMPT) == 0
    busy.kill('SIGQUIT')
    busy.container.wait(PROMPT)
    assert 'responds again' not in idle.logs() + busy.logs()

    proxy.restore() if trouble == 'refuse' else proxy.go_on()
    assert last.get(timeout=PATIENCE) == 'last'
    assert warm.container.wait(PATIENCE) == 0
    assert 'could not be stored' not in warm.logs()
