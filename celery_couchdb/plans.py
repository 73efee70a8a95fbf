"""The cost of a load on a managed CouchDB service, in units a second, and the plan of IBM Cloudant that suffices.

Such a service limits three kinds of units in a second: reads, writes and queries. See `kombu_couchdb.couchdb.pacing`.
The costs are those of docs/production/managed.rst; ``tests/acceptance/test_costs.py`` measures them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple


class Units(NamedTuple):
    """Units of each kind, for example in a second."""

    reads: float
    writes: float
    queries: float

    def scarce(self) -> str:
        """Return the name of the kind that decides which plan suffices."""
        plan = LITE if suffices(self, LITE) else STANDARD
        shares = {name: getattr(self, name) / getattr(plan, name) for name in Units._fields}
        return max(shares, key=shares.__getitem__)

    def plus(self, other: Units) -> Units:
        """Return the sum."""
        return Units(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Units:
        """Return a multiple."""
        return Units(*(factor * number for number in self))


#: The limits of IBM Cloudant's plans in a second: of Lite, and of each capacity unit of Standard.
LITE, STANDARD = Units(20, 10, 5), Units(100, 50, 5)

#: The share of a limit that may be used on average, so that some seconds may need more.
USABLE = 0.8

#: A task: it is published, claimed and acknowledged. Of several workers, one reads it again before it claims it.
TASK = Units(1, 3, 0.2)

#: A result that is stored, and read by a program.
RESULT = Units(1, 1, 0)

#: The state STARTED (`task_track_started`), and a completed job that is kept and deleted later (`keep_done`).
STARTED, KEPT = Units(0, 1, 0), Units(0, 1, 0)

#: The retry of a task with a result: one more message, and the state RETRY.
RETRY = Units(1, 4, 0.2)

#: A member of a chord: a task with a result, and the document that counts it, which is deleted at the end.
CHORD_MEMBER = Units(1, 6, 0.5)

#: The events of a task, and of a worker in a minute, while a monitor such as Flower receives them.
TASK_EVENTS, WORKER_EVENTS = Units(2, 9.4, 0.1), Units(31, 95, 8)

#: A worker in a minute, without any task.
WORKER = Units(9, 4, 14)


@dataclass(frozen=True)
class Workload:
    """What an app does: tasks a second, on average, and how its settings treat them."""

    tasks: float
    workers: int
    #: Whether results are stored.
    results: bool = True
    #: Whether the state STARTED is stored.
    started: bool = False
    #: Whether workers send events, and a monitor receives them.
    events: bool = False
    #: Whether completed jobs are kept.
    kept: bool = False

    def parts(self) -> dict[str, Units]:
        """Return the units in a second, by what they are for."""
        found = {'tasks': TASK.times(self.tasks)}
        if self.results:
            found['results'] = RESULT.times(self.tasks)
        if self.started:
            found['state STARTED'] = STARTED.times(self.tasks)
        if self.kept:
            found['completed jobs'] = KEPT.times(self.tasks)
        if self.events:
            found['events'] = TASK_EVENTS.times(self.tasks).plus(WORKER_EVENTS.times(self.workers / 60))
        return {**found, 'idle workers': WORKER.times(self.workers / 60)}

    def total(self) -> Units:
        """Return the units in a second."""
        total = Units(0, 0, 0)
        for units in self.parts().values():
            total = total.plus(units)
        return total

    def savings(self) -> Iterator[tuple[str, Workload]]:
        """Return what could be done to need less, and the load afterwards."""
        if self.events:
            yield (
                'Start workers without -E (worker_send_task_events=False), and use "celery couchdb web"',
                replace(self, events=False),
            )
        if self.results:
            yield (
                'Set task_ignore_result=True, or ignore_result=True for tasks whose results nobody reads',
                replace(self, results=False, started=False),
            )
        if self.started:
            yield 'Set task_track_started=False', replace(self, started=False)
        if self.kept:
            yield 'Set the transport option keep_done to 0', replace(self, kept=False)


def suffices(units: Units, plan: Units) -> bool:
    """Tell whether a plan suffices for units in a second, with `USABLE` of its limits."""
    return all(needed <= limit * USABLE for needed, limit in zip(units, plan, strict=True))


def capacity(units: Units) -> int:
    """Return how many capacity units of the plan Standard suffice for units in a second."""
    return max(1, *(ceil(needed / (limit * USABLE)) for needed, limit in zip(units, STANDARD, strict=True)))
