"""Outcomes: results of tasks that did not run, or whose messages ended without a result."""

from __future__ import annotations

from typing import Any

from celery import states
from celery.exceptions import TaskRevokedError

from kombu_couchdb.documents.types import Document

from ..backend import CouchDBBackend


class TaskNotRun(Exception):
    """A task was given to another region and did not run there, or its message ended there as a dead letter."""


def backend_of(app: Any) -> CouchDBBackend | None:
    """Return the result backend of an app; None if it does not store results in CouchDB."""
    found = app.backend
    return found if isinstance(found, CouchDBBackend) else None


def merged_into(task_id: str | None) -> str:
    """Return why a unique job does not run: it was merged into that of another task."""
    return f'a job with its key waits already, and task {task_id} runs for both'


def outcome(backend: CouchDBBackend, task_id: str, task: str | None, state: str, reason: str) -> Document:
    """Return the result of a task that was revoked, or that has failed, with the reason."""
    error = TaskRevokedError(reason) if state == states.REVOKED else TaskNotRun(reason)
    result = backend.prepare_exception(error)
    meta = {'status': state, 'result': result, 'traceback': None, 'children': [], 'date_done': None}
    found: Any = backend.result_document(task_id, task, meta)
    return dict(found)
