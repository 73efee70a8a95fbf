"""Ends without a result: a worker tells whoever waits for a task that it has ended, though it stores no result.

A task may ignore its result, raise `Ignore`, or be revoked or expire although it ignores its result. Nothing would end
its receipt, or its record in another region, otherwise. A failure without a result is told by the backend
(`mark_as_failure`).
"""

from __future__ import annotations

from typing import Any

from celery import signals, states
from celery._state import get_current_worker_task
from celery.exceptions import TaskRevokedError

from ...backend import couchdb_backend_of


def connect() -> None:
    """Tell the ends of the tasks of this process, and of those that are forked from now on."""
    signals.task_postrun.connect(_on_end)
    signals.task_revoked.connect(_on_revoked)
    signals.before_task_publish.connect(_on_publish)


def _on_end(sender: Any = None, task_id: str = '', state: str = '', **_: Any) -> None:
    request = sender.request
    is_without = state == states.SUCCESS and (sender.ignore_result or request.ignore_result)
    if (is_without or state == states.IGNORED) and not getattr(request, 'couchdb_goes_on', False):
        _tell(sender.app, task_id, request, state)


def _on_revoked(sender: Any = None, request: Any = None, expired: bool = False, **_: Any) -> None:
    if sender.ignore_result or request.ignore_result:
        reason = TaskRevokedError('expired' if expired else 'revoked')
        _tell(sender.app, request.id, request, states.REVOKED, reason)


def _on_publish(headers: Any = None, **_: Any) -> None:
    """Note that the running task goes on in another message: it is retried, or replaced.

    The last task of a chain that replaces it gets its id, and the first one only says that it replaces a task.
    """
    task = get_current_worker_task()
    if task is not None and isinstance(headers, dict):
        nesting, own = headers.get('replaced_task_nesting'), task.request.get('replaced_task_nesting')
        if headers.get('id') == task.request.id or (nesting or 0) > (own or 0):
            task.request.couchdb_goes_on = True


def _tell(app: Any, task_id: str, request: Any, state: str, error: BaseException | None = None) -> None:
    if (backend := couchdb_backend_of(app)) is not None:
        backend.handover.store_end(task_id, request, state, error)
