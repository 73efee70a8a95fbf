"""An app whose tasks belong to tenants: the header `tenant` goes from task to task in two usual ways.

The receiver of `before_task_publish` takes it from `current_task`, or from a variable of the thread, which
`task_prerun` sets. Processes of the pool open a connection when they begin.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from celery import current_task, signals

from .app import app, note, pause

_current = threading.local()
_connection: dict[str, str] | None = None


@signals.worker_process_init.connect
def _connect(**_: Any) -> None:
    global _connection
    _connection = {}


@signals.task_prerun.connect
def _enter(task: Any, **_: Any) -> None:
    _current.tenant = (task.request.headers or {}).get('tenant')


@signals.task_postrun.connect
def _leave(**_: Any) -> None:
    _current.tenant = None


@signals.before_task_publish.connect
def _pass_on(headers: dict[str, Any], **_: Any) -> None:
    if tenant := getattr(_current, 'tenant', None):
        headers['tenant'] = tenant
    if current_task and (found := (current_task.request.headers or {}).get('tenant')):
        headers['current'] = found


@app.task(name='whose', bind=True)
def whose(self: Any, results: Any = None) -> list[str | None]:
    """Return the tenant, as it has come in both ways."""
    headers = self.request.headers or {}
    return [headers.get('tenant'), headers.get('current')]


@app.task(name='clean_up')
def clean_up(request: Any, exc: BaseException, traceback: Any) -> None:
    """Write to the journal whose chord has failed, with the connection of the process."""
    assert _connection is not None
    note(os.environ['JOURNAL'], f'failed for {_current.tenant}')


@app.task(name='slow_clean_up')
def slow_clean_up(request: Any, exc: BaseException, traceback: Any) -> None:
    """Write to the journal, and wait for the file `go on`."""
    note(os.environ['JOURNAL'], 'slow')
    pause(os.environ['JOURNAL'], None)
    note(os.environ['JOURNAL'], 'end')
