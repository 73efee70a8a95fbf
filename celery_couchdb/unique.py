"""Unique jobs in Celery: a task class whose `apply_async` takes a job key and says what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Task

from kombu_couchdb.documents.job_key import JOB_KEY
from kombu_couchdb.unique import told

__all__ = ['UniqueTask']


class UniqueTask(Task):
    """A task of which `apply_async(…, job_key='…')` has one job in the queue: see `kombu_couchdb.unique` for the rules.

    The result has one attribute more, `outcome`: `enqueued`, `moved` (one was waiting; its due date is now the one given) or
    `again` (one is running; it will run once more). Its `id` is that of the task which will run: where a job was moved, that
    of the earlier one. With `task_always_eager`, and with other brokers, there is no queue to ask, and `outcome` is None.

    Its message is acknowledged when it has ended: one that is acknowledged when it starts, as Celery does otherwise, is
    finished then as far as the queue knows, and a job sent while it runs would run beside it.
    """

    abstract = True
    acks_late = True

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *others: Any,
        job_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Send the task; *raises* `ConfigurationError` for a job key that cannot be one."""
        headers = {**(headers or {}), **({JOB_KEY: job_key} if job_key is not None else {})}
        with told() as outcomes:
            result = super().apply_async(args, kwargs, *others, headers=headers or None, **options)
        if outcomes and outcomes[-1].task_id is not None:
            result.id = outcomes[-1].task_id  # the same object: it may be noted as a child of the task that sends
        if JOB_KEY in headers:
            result.outcome = outcomes[-1].what if outcomes else None
        return result
