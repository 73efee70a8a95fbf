"""Next tasks: what a worker publishes when a task has ended, such as the next step of a chain.

Celery 5.7 publishes callbacks and the rest of a chain through one method. This module lets the backend have these
messages: they are handed over together with the result of the task, and the worker's process stores all of them.
"""

from __future__ import annotations

from typing import Any

from celery.app.amqp import AMQP

from kombu_couchdb.transport import taken_by

__all__ = ['install']

#: Celery's own method; older versions have none, and a task there waits until its next tasks are stored.
_publish = getattr(AMQP, '_retry_publish', None)


def _retry_publish(self: Any, publish: Any, *args: Any, **kwargs: Any) -> Any:
    """Publish callbacks or the next step of a chain."""
    assert _publish is not None
    with taken_by(getattr(getattr(self.app.backend, 'handover', None), 'take_next_tasks', None)):
        return _publish(self, publish, *args, **kwargs)


def install() -> None:
    """Replace Celery's method."""
    if _publish is not None:
        AMQP._retry_publish = _retry_publish
