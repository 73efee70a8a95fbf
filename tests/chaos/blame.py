"""The faults that explain why a run was lost or repeated. Pure functions over the events of a ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from .ledger import Event

__all__ = ['Try', 'by_try', 'hits', 'killed_after']

#: A try of a task: the key of the task and the number of the try, from 0.
Try = tuple[str, int]

#: How long a worker may need after a run until its result is stored and the next task published, in seconds, if no
#: fault hinders it: one request that times out, and its repetition.
_ON_ITS_WAY = 5.0


def by_try(events: Iterable[Event]) -> dict[Try, list[Event]]:
    """Return the events of each try."""
    found: defaultdict[Try, list[Event]] = defaultdict(list)
    for event in events:
        found[event['key'], event['try']].append(event)
    return found


def hits(fault: Event, run: Event) -> bool:
    """Return whether a fault affected the worker of a run. `w1.4@chaos` is the fourth worker at the place w1."""
    if fault['workers'] is None:
        return True
    name = run['worker']
    return bool({name, name.partition('.')[0]} & set(fault['workers'])) and fault.get('pid') in (None, run.get('pid'))


def killed_after(end: Event, faults: Iterable[Event]) -> bool:
    """Return whether the process of a run was killed after the run's end, while the result was on its way.

    Other faults of the worker, such as a cut network, make that time longer.
    """
    until = end['at'] + _ON_ITS_WAY
    for fault in sorted((fault for fault in faults if hits(fault, end)), key=lambda fault: float(fault['began'])):
        if fault['began'] > until:
            return False
        if fault['ended'] >= end['at']:
            if fault['deadly']:
                return True
            until = max(until, fault['ended'] + _ON_ITS_WAY)
    return False
