"""Limits in Celery: a task class whose tasks share a limit or a rate with all tasks that have the same key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from celery import Task

from kombu_couchdb.consumer.worker_hooks import while_running
from kombu_couchdb.documents import rates
from kombu_couchdb.documents.concurrency import CONCURRENCY_KEY, CONCURRENCY_LIMIT
from kombu_couchdb.documents.rates import RATE, RATE_KEY
from kombu_couchdb.errors import ConfigurationError

__all__ = ['LimitedTask']


class LimitedTask(Task):
    """A task that is limited over all workers: how many run at the same time, and how many start in a period.

    `@app.task(base=LimitedTask, concurrency_key=…, concurrency_limit=…)`. The key is text, or a function of the task's
    arguments that returns text, or None for no limit. Both are also options of `apply_async`. All tasks with the same
    key share its slots, whatever their names and queues are.

    `@app.task(base=LimitedTask, rate='10/s')`: at most so many start in a period; `'100/m'`, `'5/h'`, or a number per
    second. The rate is that of the concurrency key, or else of the task's name, unless `rate_key` is given, which is
    text or such a function. All tasks with the same rate key share its starts.

    These tasks are acknowledged late: with Celery's default, early acknowledgement, the worker would free the slot when
    the task begins.
    """

    abstract = True
    acks_late = True
    concurrency_key: str | Callable[..., str | None] | None = None
    concurrency_limit: int | None = None
    rate: str | float | None = None
    rate_key: str | Callable[..., str | None] | None = None

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *others: Any,
        concurrency_key: str | None = None,
        concurrency_limit: int | None = None,
        rate: str | float | None = None,
        rate_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Send the task; the other arguments are those of Celery's `apply_async`.

        *Raises* `ConfigurationError` if a key is not text of 1 to 500 characters, if the limit is not a whole number
        from 1 to 1,000, if the rate is not one from one start a day to 1,000 a second, if a key has no limit or no
        rate, or if a task with a concurrency limit is not acknowledged late.
        """
        given = dict(headers or {})
        # A retry has the headers of the first attempt: a key that was given to `apply_async` stays.
        key = given.get(CONCURRENCY_KEY) if concurrency_key is None else concurrency_key
        if key is None:
            key = _key(type(self).concurrency_key, args, kwargs)
        if key is not None:
            if concurrency_limit is None:
                concurrency_limit = given.get(CONCURRENCY_LIMIT, self.concurrency_limit)
            limited = {CONCURRENCY_KEY: key, CONCURRENCY_LIMIT: concurrency_limit}
            if concurrency_limit is None:
                raise ConfigurationError(f'the task {self.name} has a concurrency_key and needs a concurrency_limit')
            rates.check(limited)
            if not self.acks_late:
                raise ConfigurationError(f'the task {self.name} has a concurrency_key and needs acks_late=True')
            given |= limited
        given |= self._rate(args, kwargs, rate, rate_key, given)
        return super().apply_async(args, kwargs, *others, headers=given or None, **options)

    def _rate(self, args: Any, kwargs: Any, rate: Any, key: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the headers of the rate, or {} if there is none. `given` has the other headers."""
        if RATE_KEY in given:  # those of the first attempt
            rate, key = given.get(RATE) if rate is None else rate, given[RATE_KEY] if key is None else key
        rate = self.rate if rate is None else rate
        key = _key(type(self).rate_key, args, kwargs) if key is None else key
        if rate is None:
            if key is not None:
                raise ConfigurationError(f'the task {self.name} has a rate_key and needs a rate')
            return {}
        if key is None:
            key = given.get(CONCURRENCY_KEY, self.name)
        headers = {RATE: rate, RATE_KEY: key}
        rates.check(headers)
        return headers


def _key(key: Any, args: Any, kwargs: Any) -> Any:
    """Return a key, or what the function returns that was given in its place."""
    return key(*(args or ()), **(kwargs or {})) if callable(key) else key


def _may_run(task_id: str) -> bool:
    """Tell whether the worker in this process may be running a task."""
    state = sys.modules.get('celery.worker.state')
    if state is None or state.should_terminate not in (None, False):
        return True  # no worker, or one that does not wait for its tasks: they may have begun a moment ago
    try:
        return any(request.id == task_id for request in state.active_requests)
    except RuntimeError:  # another thread has changed the set meanwhile
        return True


while_running(_may_run)
