"""Unique jobs: of a task sent with the header `job_key` there is one item in its queue, however often and by whomever it is sent.

`documents.unique_merge` has the rules. `told` is the older name of `collect_outcomes`.
"""

from __future__ import annotations

from .documents.unique_merge import AGAIN, ENQUEUED, MOVED, Outcome
from .queues.unique_jobs import collect_outcomes

__all__ = ['AGAIN', 'ENQUEUED', 'MOVED', 'Outcome', 'collect_outcomes', 'told']

told = collect_outcomes
