"""Unique jobs: tasks with the same `job_key` header share one message in their queue, however many are published.

`documents.unique_merge` has the rules.
"""

from __future__ import annotations

from .documents.unique_merge import AGAIN, ENQUEUED, MOVED, Outcome
from .queues.unique_jobs import collect_outcomes

__all__ = ['AGAIN', 'ENQUEUED', 'MOVED', 'Outcome', 'collect_outcomes']
