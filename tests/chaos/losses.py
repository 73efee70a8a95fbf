"""Losses: tasks that never ended, and results that are not stored. A pure function.

Celery removes a task that is acknowledged early from the queue before it runs. A fault that kills the worker, or the
child that runs it, loses the task, what it would have published next, or its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .blame import Try, by_try, hits, killed_after
from .ledger import Event

__all__ = ['Losses', 'losses']


@dataclass
class Losses:
    """The keys of tasks that were lost, and of tasks that ended and whose results were lost."""

    tasks: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    #: Acknowledged early, and lost with the process that ran them, or that should have published them.
    at_most_once: list[str] = field(default_factory=list)
    #: Results of tasks that were acknowledged early, lost with the process that ran them.
    results_at_most_once: list[str] = field(default_factory=list)
    #: The number of chords whose bodies never run, because of what was lost.
    unfinished: int = 0


def losses(by_kind: Mapping[str, Sequence[Event]]) -> Losses:
    """Return what the events, by their kind, say to be lost. Without `stored` events no result is missed."""
    found, excuses = Losses(), _Excuses(by_kind)
    stored = {key for event in by_kind['stored'] for key in event['keys']} if by_kind['stored'] else None
    for order in by_kind['accepted']:
        early = order['early']
        for key in order['keys']:
            last = (key, order['tries'] - 1)
            ends = excuses.ends.get(last)
            if not ends:
                (found.at_most_once if early and excuses.lost(last) else found.tasks).append(key)
            elif stored is not None and order['results'] and key not in stored:
                (found.results_at_most_once if early and excuses.fell(last) else found.results).append(key)
        found.unfinished += order['kind'] == 'chord' and order['keys'][-1:] == found.at_most_once[-1:]
    return found


class _Excuses:
    def __init__(self, by_kind: Mapping[str, Sequence[Event]]) -> None:
        self.received, self.ends = by_try(by_kind['received']), by_try(by_kind['end'])
        self._faults = [*by_kind['fault'], *by_kind['machine']]
        self._before = dict(_predecessors(by_kind['accepted']))

    def lost(self, which: Try) -> bool:
        """Return whether a fault explains that a try, acknowledged early, never ended."""
        if which in self.received:
            return any(
                fault['deadly'] and hits({**fault, 'pid': None}, one) and fault['ended'] >= one['at']
                for one in self.received[which]
                for fault in self._faults
            )
        key, number = which
        before = [(key, number - 1)] if number else [(other, 0) for other in self._before.get(key, ())]
        return any(self.fell(other) if other in self.ends else self.lost(other) for other in before)

    def fell(self, which: Try) -> bool:
        """Return whether a fault explains that what follows the end of a try, acknowledged early, did not happen."""
        return any(killed_after(end, self._faults) for end in self.ends[which])


def _predecessors(accepted: Iterable[Event]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield keys with those of the tasks that publish them: links of chains, and bodies of chords."""
    for order in accepted:
        keys = order['keys']
        if order['kind'] == 'chain':
            yield from ((key, [before]) for before, key in pairwise(keys))
        elif order['kind'] == 'chord':
            yield keys[-1], keys[:-1]
