"""However a task ends, its message is kept as exactly one failure, or none: for each pool, acknowledgement, backend."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest
from celery import Celery, chain, chord
from celery.canvas import Signature

from celery_couchdb.failures import Failure, Failures
from celery_couchdb.jobs import Jobs
from tests.conftest import wait_for
from tests.support import items
from tests.worker_process import WorkerProcess

from .conftest import Site

#: The app of the workers.
APP = {'app.py': b'from tests.acceptance.endings import app'}


def alone(task: Signature) -> Signature:
    """Return the task as it is."""
    return task


def as_step(task: Signature) -> Signature:
    """Return a chain with the task in its middle."""
    return chain(other(task.app), task, other(task.app))


def as_member(task: Signature) -> Signature:
    """Return a chord with the task in its header."""
    return chord([task, other(task.app)], other(task.app), app=task.app)


def other(app: Celery) -> Signature:
    """Return a task that succeeds."""
    return app.signature('succeed', immutable=True)


class Ending(NamedTuple):
    """A way in which a task ends."""

    task: str
    args: tuple[Any, ...] = ()
    #: The type of the error of its only failure if it is acknowledged late, or early; None: there is no failure.
    late: str | None = None
    early: str | None = None
    options: Mapping[str, Any] = {}
    #: Returns the workflow that the task is a part of.
    within: Callable[[Signature], Signature] = alone

    @classmethod
    def of(cls, task: str, error: str | None, *args: Any, **options: Any) -> Ending:
        """Return an ending that is the same for both."""
        return cls(task, args, error, error, options)

    def send(self, app: Celery, task_id: str) -> None:
        """Send the task."""
        self.within(app.signature(self.task, self.args, immutable=True, task_id=task_id, **self.options)).apply_async()


#: What every pool can do. A broken body is published by `send`.
EVERYWHERE = {
    'success': Ending.of('succeed', None),
    'exception': Ending.of('raise', 'ValueError', 'no'),
    'large message': Ending.of('raise', 'ValueError', 'x' * 50_000),
    'exception without text': Ending.of('unprintable', 'Unprintable'),
    'exception of 1 MB': Ending.of('huge', 'ValueError'),
    'exit': Ending.of('exit', 'WorkerLostError'),
    'error after the failure': Ending.of('raise_twice', 'RuntimeError'),
    'ignored': Ending.of('ignore', None),
    'rejected': Ending('reject', late='rejected', early='Reject'),
    'rejected and requeued': Ending.of('requeue', None),
    'retried': Ending.of('retry', None, 2),
    'no retry left': Ending.of('retry', 'KeyError', 9),
    'expired': Ending.of('succeed', None, expires=-1),
    'replaced': Ending.of('replace', None, 'succeed'),
    'replaced by one that fails': Ending.of('replace', 'ValueError', 'raise'),
    'chain step': Ending.of('raise', 'ValueError')._replace(within=as_step),
    'chain step, rejected': Ending('reject', late='rejected', early='Reject', within=as_step),
    'unregistered': Ending.of('unknown', 'rejected'),
    'unregistered chain step': Ending.of('unknown', 'rejected')._replace(within=as_step),
    'undecodable': Ending.of('succeed', 'malformed', serializer='pickle'),
}
#: What needs a result backend.
CHORDS = {
    'chord member': Ending.of('raise', 'ValueError')._replace(within=as_member),
    'chord member, rejected': Ending('reject', late='rejected', early='Reject', within=as_member),
    'unregistered chord member': Ending.of('unknown', 'rejected')._replace(within=as_member),
}
#: What needs a pool of processes. A message that was acknowledged early is not delivered again.
PROCESSES = {
    'soft time limit': Ending.of('soft_limit', 'SoftTimeLimitExceeded'),
    'soft time limit, handled': Ending.of('handled_limit', None),
    'time limit': Ending.of('hard_limit', 'TimeLimitExceeded'),
    'time limit of a chain step': Ending.of('hard_limit', 'TimeLimitExceeded')._replace(within=as_step),
    'process lost': Ending.of('lost', 'WorkerLostError'),
    'process lost, message requeued': Ending('lost_and_retried', late=None, early='WorkerLostError'),
}
#: Bodies that no worker can use, and the type of their failures.
BROKEN = {
    'broken JSON': (b'{', 'malformed'),
    'no task': (b'[1]', 'rejected'),
    'wrong parts': (b'[1, 2, 3]', 'rejected'),
    'no keyword arguments': (b'[[], null, null]', 'rejected'),
    'wrong chain': (b'[[], {}, {"chain": [5]}]', 'rejected'),
}


def send(app: Celery, endings: Mapping[str, Ending]) -> None:
    """Send the tasks, whose ids are the names of their endings, and messages with broken bodies."""
    for name, ending in endings.items():
        ending.send(app, name)
    with app.producer_pool.acquire() as producer:
        for name, (body, _) in BROKEN.items():
            headers = {'id': name, 'task': 'succeed', 'lang': 'py', 'root_id': name, 'argsrepr': '', 'kwargsrepr': ''}
            kind = {'content_type': 'application/json', 'content_encoding': 'utf-8'}
            producer.publish(body, routing_key='celery', headers=headers, **kind)


def start(site: Site, pool: str, **settings: Any) -> None:
    """Start a worker."""
    command = WorkerProcess.command('--pool', pool, '--concurrency', '2')
    site.run(command, {**site.environment, 'SETTINGS': json.dumps(settings)}, APP)


def revoke(site: Site, pool: str) -> None:
    """Revoke a task before a worker receives it, and one that runs, if the pool can end it."""
    revoked = partial(site.app.control.revoke, reply=True, limit=1)
    wait_for(lambda: revoked('revoked'), 'the worker to know that the task is revoked')
    site.app.send_task('succeed', task_id='revoked')
    if pool in ('prefork', 'gevent'):
        site.app.send_task('sleep', task_id='terminated')
        wait_for(lambda: 'active' in Jobs(site.app).workers('terminated').values(), 'the task to run')
        wait_for(lambda: revoked('terminated', terminate=True), 'the worker to end it')


def end_of(site: Site, expected: Mapping[str, str]) -> list[Failure]:
    """Wait for the expected failures, stop the workers, check that there are no others, and return them."""
    failures = Failures(site.app)

    def found() -> dict[str, Any]:
        return {each.id: each.error_type for each in failures.listing()}

    def is_done() -> bool:
        return found().keys() >= expected.keys() and all(doc.get('status') for doc in items(site.client))

    wait_for(is_done, f'{sorted(expected)} as the only messages', timeout=240)
    for worker in site.workers:
        assert worker.container.terminate() == 0
    assert found() == expected
    kept = [*failures.listing()]
    assert len(kept) == len(expected), 'a task has several failures'
    return kept


class Configuration(NamedTuple):
    """How a worker runs tasks."""

    pool: str
    late: bool
    #: Where results are stored: `couchdb`, `redis` or `disabled`.
    backend: str
    ignores: bool
    settings: Mapping[str, Any] = {}


#: Each pair of a pool, an acknowledgement, a backend and whether results are ignored; then options.
CONFIGURATIONS = [
    Configuration('prefork', False, 'couchdb', False),
    Configuration('prefork', True, 'redis', False),
    Configuration('prefork', False, 'disabled', True),
    Configuration('solo', True, 'couchdb', True),
    Configuration('solo', False, 'redis', False),
    Configuration('solo', True, 'disabled', False),
    Configuration('threads', False, 'couchdb', True),
    Configuration('threads', True, 'redis', False),
    Configuration('threads', True, 'disabled', False),
    Configuration('gevent', True, 'couchdb', False),
    Configuration('gevent', False, 'redis', True),
    Configuration('gevent', False, 'disabled', False),
    Configuration('prefork', True, 'couchdb', False, {'task_acks_on_failure_or_timeout': False}),
    Configuration('prefork', False, 'couchdb', False, {'broker_transport_options': {'confirm_acks': True}}),
    Configuration('prefork', True, 'couchdb', False, {'broker_transport_options': {'keep_done': 3600}}),
]


def test_configurations_have_each_pair() -> None:
    for one, two in combinations(range(4), 2):
        pairs = {(each[one], each[two]) for each in CONFIGURATIONS}
        assert pairs == {*product({pair[0] for pair in pairs}, {pair[1] for pair in pairs})}


@pytest.mark.parametrize(Configuration._fields, CONFIGURATIONS)
def test_each_ending_is_one_failure_or_none(
    results: str, site: Site, pool: str, late: bool, backend: str, ignores: bool, settings: dict[str, Any]
) -> None:
    if pool == 'gevent' and importlib.util.find_spec('gevent') is None:
        pytest.skip('gevent is not installed')
    site.use_results(results)
    wanted = {**EVERYWHERE, **(PROCESSES if pool == 'prefork' else {}), **(CHORDS if backend != 'disabled' else {})}
    if settings.get('task_acks_on_failure_or_timeout') is False:  # a message is requeued at its time limit
        wanted = {name: each for name, each in wanted.items() if each.task != 'hard_limit'}
    send(site.app, wanted)
    start(site, pool, task_acks_late=late, task_ignore_result=ignores, **settings)
    revoke(site, pool)
    ends = {name: each.late if late else each.early for name, each in wanted.items()}
    ends |= {name: kind for name, (_, kind) in BROKEN.items()}
    expected = {name: error for name, error in ends.items() if error is not None}
    for failure in end_of(site, expected):
        letter = failure.letter
        assert letter['message']['headers']['id'] == failure.id
        if 'error' in letter:
            assert letter['error']['worker'].startswith('celery_test_worker@')
            assert letter['error']['retries'] == (3 if failure.id == 'no retry left' else 0)
            assert letter['expires'] - letter['failed'] == pytest.approx(7 * 86_400)
