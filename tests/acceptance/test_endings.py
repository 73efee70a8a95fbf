"""However a task ends, its message is kept as exactly one failure, or none: for each pool, acknowledgement, backend."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from celery import Celery

from celery_couchdb.failures import Failure, Failures
from tests.conftest import wait_for
from tests.support import items
from tests.worker_process import WorkerProcess

from .conftest import Site

#: The app of the workers.
APP = {'app.py': b'from tests.acceptance.endings import app'}


class Ending(NamedTuple):
    """A way in which a task ends."""

    task: str
    args: tuple[Any, ...] = ()
    #: The type of the error of its only failure if it is acknowledged late, or early; None: there is no failure.
    late: str | None = None
    early: str | None = None
    options: Mapping[str, Any] = {}

    @classmethod
    def of(cls, task: str, error: str | None, *args: Any, **options: Any) -> Ending:
        """Return an ending that is the same for both."""
        return cls(task, args, error, error, options)


#: What every pool can do.
EVERYWHERE = {
    'success': Ending.of('succeed', None),
    'exception': Ending.of('raise', 'ValueError', 'no'),
    'large message': Ending.of('raise', 'ValueError', 'x' * 50_000),
    'exception without text': Ending.of('unprintable', 'Unprintable'),
    'exception of 1 MB': Ending.of('huge', 'ValueError'),
    'ignored': Ending.of('ignore', None),
    'rejected': Ending('reject', late='rejected', early='Reject'),
    'rejected and requeued': Ending.of('requeue', None),
    'retried': Ending.of('retry', None, 2),
    'no retry left': Ending.of('retry', 'KeyError', 9),
    'revoked': Ending.of('succeed', None, expires=-1),
    'unregistered': Ending.of('unknown', 'rejected'),
    'undecodable': Ending.of('succeed', 'malformed', serializer='pickle'),
}
#: What needs a pool of processes. A message that was acknowledged early is not delivered again.
PROCESSES = {
    'soft time limit': Ending.of('soft_limit', 'SoftTimeLimitExceeded'),
    'soft time limit, handled': Ending.of('handled_limit', None),
    'time limit': Ending.of('hard_limit', 'TimeLimitExceeded'),
    'process lost': Ending.of('lost', 'WorkerLostError'),
    'process lost, message requeued': Ending('lost_and_retried', late=None, early='WorkerLostError'),
}


def send(app: Celery, endings: Mapping[str, Ending]) -> dict[str, str | None]:
    """Send the tasks; return their names by id."""
    return {app.send_task(each.task, each.args, **each.options).id: name for name, each in endings.items()}


def start(site: Site, pool: str, **settings: Any) -> None:
    """Start a worker."""
    command = WorkerProcess.command('--pool', pool, '--concurrency', '2')
    site.run(command, {**site.environment, 'SETTINGS': json.dumps(settings)}, APP)


def end_of(site: Site, names: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Failure]:
    """Wait for the expected failures, stop the workers, check that there are no others, and return them."""
    failures = Failures(site.app)

    def found() -> dict[str, Any]:
        return {names.get(each.id, each.id): each.error_type for each in failures.listing()}

    def is_done() -> bool:
        return found().keys() >= expected.keys() and all(doc.get('status') for doc in items(site.client))

    wait_for(is_done, f'{sorted(expected)} as the only messages', timeout=240)
    for worker in site.workers:
        assert worker.container.terminate() == 0
    assert found() == expected
    kept = [*failures.listing()]
    assert len(kept) == len(expected), 'a task has several failures'
    return kept


#: Each pool and each backend, acknowledged early or late; both ways with the pool that has a process for each task.
CONFIGURATIONS = [
    *(('prefork', False, {}), ('prefork', True, {}), ('solo', True, {}), ('threads', False, {}), ('gevent', True, {})),
    ('prefork', False, {'task_ignore_result': True}),
    ('threads', True, {'result_backend': 'disabled://'}),
    ('prefork', True, {'result_backend': 'redis'}),
    ('prefork', True, {'task_acks_on_failure_or_timeout': False}),
    ('prefork', False, {'broker_transport_options': {'confirm_acks': True}}),
    ('prefork', True, {'broker_transport_options': {'keep_done': 3600}}),
]


@pytest.mark.parametrize(('pool', 'late', 'settings'), CONFIGURATIONS, ids=str)
def test_each_ending_is_one_failure_or_none(
    site: Site, pool: str, late: bool, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if pool == 'gevent' and importlib.util.find_spec('gevent') is None:
        pytest.skip('gevent is not installed')
    if settings.get('result_backend') == 'redis':
        settings = {**settings, 'result_backend': request.getfixturevalue('redis')}
    wanted = {**EVERYWHERE, **(PROCESSES if pool == 'prefork' else {})}
    if settings.get('task_acks_on_failure_or_timeout') is False:  # a message is requeued at its time limit
        del wanted['time limit']
    names = send(site.app, wanted)
    start(site, pool, task_acks_late=late, **settings)
    expected = {
        name: error for name, each in wanted.items() if (error := each.late if late else each.early) is not None
    }
    for failure in end_of(site, names, expected):
        letter = failure.letter
        assert letter['message']['headers']['id'] == failure.id
        if 'error' in letter:
            assert letter['error']['worker'].startswith('celery_test_worker@')
            assert letter['error']['retries'] == (3 if names[failure.id] == 'no retry left' else 0)
            assert letter['expires'] - letter['failed'] == pytest.approx(7 * 86_400)
