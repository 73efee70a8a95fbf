"""Results with real workers: waiting in tasks and under gevent, chords of killed workers, and expiry without beat."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import celery
import pytest
from celery import chain, chord

from tests.conftest import PATIENCE, SHORT_LEASE, wait_for
from tests.support import ROOT, run_python

from .conftest import Site


@pytest.mark.parametrize('pool', ['prefork', 'gevent'])
def test_task_waits_for_another(site: Site, pool: str) -> None:
    if pool == 'gevent' and importlib.util.find_spec(pool) is None:
        pytest.skip(f'{pool} is not installed')
    site.worker(pool=pool, concurrency=4)
    results = [site.send('ask', number, 1) for number in range(3)]
    assert [result.get(timeout=PATIENCE) for result in results] == [1, 2, 3]


#: What a program does first, by the library that switches between its threads.
PATCHES = {
    'threading': '',
    'gevent': 'import gevent.monkey\ngevent.monkey.patch_all()',
    'eventlet': 'import eventlet\neventlet.monkey_patch()',
}

PROGRAM = """
import os, threading
from celery import Celery, group
app = Celery(broker=os.environ['BROKER_URL'], backend=os.environ['RESULT_URL'])
values = {}
def wait(number):
    values[number] = app.send_task('add', (number, 1)).get(timeout=180)
threads = [threading.Thread(target=wait, args=(number,)) for number in range(20)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert values == {number: number + 1 for number in range(20)}, values
done = threading.Event()
app.send_task('add', (1, 1)).then(lambda result: done.set())
assert done.wait(180)
many = group([app.signature('add', (number, 0)) for number in range(150)], app=app)
assert many().get(timeout=180) == list(range(150))
print('fine')
"""


def test_programs_wait_in_many_threads(site: Site) -> None:
    site.worker()
    for library in filter(importlib.util.find_spec, PATCHES):
        path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
        done = run_python(f'{PATCHES[library]}\n{PROGRAM}', check=False, PYTHONPATH=path, **site.environment)
        assert done.stdout.strip() == 'fine', (library, done.stderr)


@pytest.mark.skipif(celery.VERSION[:2] < (5, 5), reason='Celery 5.4 rejects the message: it becomes a dead letter')
def test_task_succeeds_after_its_time_limit_killed_it(site: Site) -> None:
    """The task is acknowledged late and redelivered.

    The success replaces its failure and that of the chain's next task.
    """
    settings: dict[str, Any] = {
        'pool': 'prefork',
        'task_acks_on_failure_or_timeout': False,
        'broker_transport_options': SHORT_LEASE,
    }
    worker = site.worker(**settings)
    nap = site.app.signature('late_nap', (str(site.journal), 'a', None), time_limit=3)
    result = chain(nap, site.app.signature('add', ('!',), app=site.app), app=site.app)()

    def states() -> list[str]:
        return [site.app.AsyncResult(task_id).state for task_id in (result.parent.id, result.id)]

    wait_for(lambda: states() == ['FAILURE', 'FAILURE'], 'the time limit')
    site.go_on()
    worker.kill()  # whether or not it has requeued the message
    site.worker(**settings)
    wait_for(lambda: states() == ['SUCCESS', 'SUCCESS'], 'the second run')
    assert site.app.AsyncResult(result.id).get(timeout=PATIENCE) == 'a!'


@pytest.mark.slow
def test_chords_complete_although_workers_are_killed(site: Site) -> None:
    """Workers are killed repeatedly while chords end. Each body runs exactly once."""
    settings: dict[str, Any] = {
        'broker_transport_options': SHORT_LEASE,
        'result_backend_transport_options': {'sweep_interval': 2.0},
    }
    site.worker('-Q', 'bodies', **settings)  # not killed, because bodies are not acknowledged late
    task, names = site.app.signature, [f'chord{number}' for number in range(8)]
    header = [task('late_part', (number,)) for number in range(5)]
    bodies = [task('collect', kwargs={'journal': str(site.journal), 'name': name}, queue='bodies') for name in names]
    results = [chord(header, app=site.app)(body) for body in bodies]

    def kill_after_a_chord() -> None:
        worker, ran = site.worker(pool='prefork', **settings), {*site.journalled()}
        wait_for(lambda: {*site.journalled()} > ran or ran == {*names}, 'the next chord')
        worker.kill()

    for _ in range(4):
        kill_after_a_chord()
    site.worker(**settings)
    assert [result.get(timeout=3 * PATIENCE) for result in results] == [10] * 8
    client = site.server.client(site.results)
    wait_for(lambda: not client.id_range('chord-unlock-'), 'the deletion of all chords', timeout=2 * PATIENCE)
    assert sorted(site.journalled()) == names


def test_results_expire_without_beat(site: Site) -> None:
    site.worker(pool='prefork', result_expires=2, result_backend_transport_options={'sweep_interval': 1.0})
    assert site.app.AsyncResult('unknown').state == 'PENDING'  # creates the database
    results = {f'celery-task-meta-{site.send("add", number, 1).id}' for number in range(20)}
    client = site.server.client(site.results)

    def gone() -> set[str]:
        return {row['id'] for row in client.request('GET', '/_changes')['results'] if row.get('deleted')}

    wait_for(lambda: client.id_range('_design/') and gone() >= results, 'the results to be stored and deleted')
    assert not client.id_range('celery-task-meta-')
    assert client.id_range('_design/')
