"""Unique jobs in Celery: a task class whose `apply_async` takes a job key and returns what happened to the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Task

from kombu_couchdb.documents.ids import JOB_KEY
from kombu_couchdb.unique import collect_outcomes

__all__ = ['UniqueTask']


class UniqueTask(Task):
    """A task that has at most one job for each key in its queue: `apply_async(…, job_key='…')`.

    `kombu_couchdb.unique` has the rules. The returned result has the additional attribute `outcome`:

    * `enqueued`: the job is new;
    * `moved`: a job with this key was waiting, and now has the due date of this call;
    * `again`: a job with this key is running, and will run once more.

    The `id` of the returned result is the id of the task that will run; for a moved job, that is the earlier task's id.
    `outcome` is None with `task_always_eager` and with other brokers, which have no unique jobs.

    These tasks are acknowledged late. With Celery's default, early acknowledgement, the queue would take a running job
    for finished, and a job with the same key would run at the same time.
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
        """Send the task; the other arguments are those of Celery's `apply_async`.

        *Raises* `ConfigurationError` if `job_key` is not text of 1 to 500 characters.
        """
        headers = {**(headers or {}), **({JOB_KEY: job_key} if job_key is not None else {})}
        with collect_outcomes() as outcomes:
            result = super().apply_async(args, kwargs, *others, headers=headers or None, **options)
        if outcomes and outcomes[-1].task_id is not None:
            result.id = outcomes[-1].task_id  # keep the object: the sending task may have recorded it as a child
        if JOB_KEY in headers:
            result.outcome = outcomes[-1].what if outcomes else None
        return result
