"""The numbers of claimed messages and of running tasks, by queue and consumer, for `status` and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ..couchdb.client import Document
from ..design.rows import ClaimCount
from ..documents.shared_documents import ReportedTask, WorkerReport
from ..schema import Schema
from .lease import ends_at

#: The most tasks that a heartbeat can report: what a document says may be any number.
_MAX_COUNT = 10**6

#: What a heartbeat reports.
_REPORT = Schema.of(WorkerReport)


class WorkerLoad:
    """What consumers have claimed, and what they report as running."""

    def __init__(self, claims: Collection[ClaimCount], heartbeats: Iterable[Document], now: float) -> None:
        #: The number of claimed messages that are not reported as running, by queue, and by id of the consumer.
        self.prefetched, self.of_consumers = Counter[str](), Counter[str]()
        #: The number of tasks that are reported as running, by queue.
        self.running = Counter[str]()
        holding = {claim.consumer for claim in claims}
        reported = {
            doc['_id']: reported_counts(doc) for doc in heartbeats if ends_at(doc, holds=doc['_id'] in holding) > now
        }
        #: The ids of the consumers whose leases are current.
        self.alive: Collection[str] = reported.keys()
        for counts in reported.values():
            self.running.update({queue: running for queue, (running, _) in counts.items()})
        for claim in claims:
            if claim.queue is not None:
                _, claimed = reported.get(claim.consumer, {}).get(claim.queue, (0, 0))
                prefetched = max(0, claim.total - claimed)
                self.prefetched[claim.queue] += prefetched
                self.of_consumers[claim.consumer] += prefetched


def reported(doc: Document) -> list[ReportedTask]:
    """Return the tasks that a heartbeat names as running, the longest running first."""
    found: list[ReportedTask] = _REPORT.clean(doc).get('running', {}).get('tasks', [])
    return [{'id': task['id'], 'task': task['task'], 'queue': task['queue'], 'since': task['since']} for task in found]


def reported_counts(doc: Document) -> dict[str, tuple[int, int]]:
    """Return how many tasks a heartbeat reports as running, by queue, and how many of those are still claimed."""
    queues = _REPORT.clean(doc).get('running', {}).get('queues', {})
    return {name: (_count(running), _count(claimed)) for name, (running, claimed) in queues.items()}


def _count(found: float) -> int:
    return int(max(0, min(found, _MAX_COUNT)))
