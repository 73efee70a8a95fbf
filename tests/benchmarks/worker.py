"""A Celery worker process, and the app that sends tasks to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from celery import Celery

from .systems import Place

__all__ = ['app_of', 'settings_of', 'working']

_ROOT = Path(__file__).parents[2]
_PATIENCE = 120.0
#: Tasks that run before the measurement, so that each process of the pool has run one.
_WARM_UP = 20


def settings_of(place: Place) -> dict[str, Any]:
    """Return the settings of Celery for a place."""
    return {
        'broker_url': place.broker,
        'result_backend': place.backend,
        'broker_transport_options': place.options,
        'task_default_queue': place.queue,
        'broker_connection_retry_on_startup': True,
        **place.settings,
    }


def app_of(place: Place) -> Celery:
    """Return an app that sends tasks to a place and reads their results from it."""
    app = Celery('benchmarks', set_as_current=False)
    app.conf.update(settings_of(place))
    return app


@contextmanager
def working(
    place: Place, app: Celery, concurrency: int = 2, requests: Path | None = None, pool: str = 'prefork'
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker with a pool that has run some tasks; *raises* `RuntimeError` if it runs none.

    It records its HTTP requests in the file `requests`, if that is given: see `counting`.
    """
    # The settings contain passwords: they are passed in the environment only.
    environment = {**os.environ, 'BENCHMARK_SETTINGS': json.dumps(settings_of(place)), 'PYTHONPATH': str(_ROOT)}
    if requests is not None:
        environment['BENCHMARK_REQUESTS'] = str(requests)
    with TemporaryFile() as log:
        process = subprocess.Popen(
            [
                sys.executable,
                '-m',
                'celery',
                '-A',
                'tests.benchmarks.tasks',
                'worker',
                '--pool',
                pool,
                '--concurrency',
                str(concurrency),
                '-l',
                'WARNING',
                '-n',
                f'{place.queue}@benchmark',
            ],
            cwd=_ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            try:
                for result in [app.send_task('add', (number, 1)) for number in range(_WARM_UP)]:
                    result.get(timeout=_PATIENCE)
            except Exception as exc:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors='replace'))
                raise RuntimeError('the worker ran no task; its log is printed above') from exc
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
