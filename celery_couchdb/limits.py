"""Concurrency limits in Celery: a task class whose tasks share a limit with all tasks that have the same key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from celery import Task

from kombu_couchdb.consumer import running
from kombu_couchdb.documents.concurrency import CONCURRENCY_KEY, CONCURRENCY_LIMIT, check
from kombu_couchdb.errors import ConfigurationError

__all__ = ['LimitedTask']


class LimitedTask(Task):
    """A task of which at most `concurrency_limit` run at the same time for each key, over all workers.

    `@app.task(base=LimitedTask, concurrency_key=…, concurrency_limit=…)`. The key is text, or a function of the task's
    arguments that returns text, or None for no limit. Both are also options of `apply_async`. All tasks with the same
    key share its slots, whatever their names and queues are.

    These tasks are acknowledged late: with Celery's default, early acknowledgement, the worker would free the slot when
    the task begins.
    """

    abstract = True
    acks_late = True
    concurrency_key: str | Callable[..., str | None] | None = None
    concurrency_limit: int | None = None

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *others: Any,
        concurrency_key: str | None = None,
        concurrency_limit: int | None = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Send the task; the other arguments are those of Celery's `apply_async`.

        *Raises* `ConfigurationError` if the key is not text of 1 to 500 characters, if the limit is not a whole number
        from 1 to 1,000, or if the task is not acknowledged late.
        """
        given = dict(headers or {})
        # A retry has the headers of the first attempt: a key that was given to `apply_async` stays.
        key = given.get(CONCURRENCY_KEY) if concurrency_key is None else concurrency_key
        if key is None:
            key = self._key(args or (), kwargs or {})
        if key is not None:
            if concurrency_limit is None:
                concurrency_limit = given.get(CONCURRENCY_LIMIT, self.concurrency_limit)
            limited = {CONCURRENCY_KEY: key, CONCURRENCY_LIMIT: concurrency_limit}
            if concurrency_limit is None:
                raise ConfigurationError(f'the task {self.name} has a concurrency_key and needs a concurrency_limit')
            check(limited)
            if not self.acks_late:
                raise ConfigurationError(f'the task {self.name} has a concurrency_key and needs acks_late=True')
            given |= limited
        return super().apply_async(args, kwargs, *others, headers=given or None, **options)

    def _key(self, args: Any, kwargs: Any) -> Any:
        key = type(self).concurrency_key  # not of `self`: a function would become a method
        return key(*args, **kwargs) if callable(key) else key


def _may_run(task_id: str) -> bool:
    """Tell whether the worker in this process may be running a task."""
    state = sys.modules.get('celery.worker.state')
    if state is None or state.should_terminate not in (None, False):
        return True  # no worker, or one that does not wait for its tasks: they may have begun a moment ago
    try:
        return any(request.id == task_id for request in state.active_requests)
    except RuntimeError:  # another thread has changed the set meanwhile
        return True


running.register(_may_run)
