"""The verdict: judges from the events of a ledger whether the promises hold. A pure function.

*Lost* is an accepted task whose last try did not end, and a *lost result* that of a task that ended and whose result is
not stored; `losses` says what early acknowledgements excuse. *Twice* is a try that began twice without an explanation.
A fault that interrupts explains a second run if it affected one of the two workers after the first of the two messages
was received and before the second run began. *Sent twice* is a message that was received in two documents for the same
try: no fault of a worker explains that. *Deaf* is a listener that did not receive the last event, which is sent after
the end of all faults.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .blame import Try, by_try, hits
from .ledger import Event
from .losses import losses

__all__ = ['Verdict', 'judge']

#: How long a worker may still use the wrong time after the server's clock was corrected, in seconds: it learns the
#: right time with its next heartbeat at the latest.
_LEARNT = 5.0

#: How wrong the server's time may be in a worker with a wrong clock, in seconds: see `kombu_couchdb.couchdb.clock`.
_ASTRAY = 2.5


@dataclass
class Verdict:
    """The result of a run. Its lists are empty if the promises hold."""

    tasks: int = 0
    chords: int = 0
    #: The number of faults by name.
    faults: Counter[str] = field(default_factory=Counter)
    #: How often the operating system paused a worker or the proxies for more than 1 s, without a fault as the cause.
    pauses: int = 0
    lost: list[str] = field(default_factory=list)
    #: Tasks that ended and whose results are not stored.
    results_lost: list[str] = field(default_factory=list)
    #: Tasks acknowledged early, and lost with the process that ran them.
    at_most_once: list[str] = field(default_factory=list)
    #: Tasks acknowledged early whose results were lost with the process that ran them.
    results_at_most_once: list[str] = field(default_factory=list)
    #: The number of chords whose bodies never run, because of what was acknowledged early and lost.
    unfinished: int = 0
    twice: list[str] = field(default_factory=list)
    #: Tries that ran twice because of a fault.
    explained: list[str] = field(default_factory=list)
    sent_twice: list[str] = field(default_factory=list)
    too_early: list[str] = field(default_factory=list)
    #: Whether the listener did not receive the last event that was sent.
    deaf: bool = False
    #: The longest time between the ends of two successive runs, in seconds.
    standstill: float = 0.0
    #: What else is wrong, in sentences: leftovers in the databases, processes that ended unexpectedly.
    remains: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Tell whether all promises were kept."""
        return not (
            self.lost
            or self.results_lost
            or self.twice
            or self.sent_twice
            or self.too_early
            or self.deaf
            or self.remains
        )


def judge(events: Iterable[Event]) -> Verdict:
    """Return the verdict on the events of a ledger, which may be in any order."""
    by_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.get('at', 0.0)):
        by_kind[event['event']].append(event)
    verdict = Verdict()
    faults = by_kind['fault'] + by_kind['machine']
    verdict.faults = Counter(fault['name'] for fault in by_kind['fault'])
    verdict.pauses = sum(not _is_explained(pause, by_kind['fault']) for pause in by_kind['machine'])
    verdict.tasks = sum(len(order['keys']) for order in by_kind['accepted'])
    verdict.chords = sum(order['kind'] == 'chord' for order in by_kind['accepted'])
    lost = losses(by_kind)
    verdict.lost, verdict.at_most_once, verdict.unfinished = lost.tasks, lost.at_most_once, lost.unfinished
    verdict.results_lost, verdict.results_at_most_once = lost.results, lost.results_at_most_once
    received, starts = (by_try(by_kind[kind]) for kind in ('received', 'start'))
    _judge_doubles(verdict, by_kind['accepted'], received, starts, faults)
    for which, dues in by_try(by_kind['due']).items():
        # A task that ran twice asked for its next try twice: that try may run when the first request is due.
        for run in starts.get(which, ()):
            if run['at'] < dues[0]['at'] - (_ASTRAY if run['astray'] else 0.0) and not _clock_was_ahead(
                run, received, faults
            ):
                verdict.too_early.append(which[0])
    told = max((event['number'] for event in by_kind['told']), default=None)
    verdict.deaf = told is not None and told not in {event['number'] for event in by_kind['heard']}
    verdict.standstill = max((later['at'] - one['at'] for one, later in pairwise(by_kind['end'])), default=0.0)
    return verdict


def _judge_doubles(
    verdict: Verdict,
    accepted: Iterable[Event],
    received: dict[Try, list[Event]],
    starts: dict[Try, list[Event]],
    faults: Sequence[Event],
) -> None:
    repeated = {which for which, runs in starts.items() if len(runs) > 1}
    links = {key: before for order in accepted if order['kind'] == 'chain' for before, key in pairwise(order['keys'])}
    for which, runs in starts.items():
        key, number = which
        # A task that ran twice also asked for its next try, or sent the next task of its chain, twice.
        inherited = (key, number - 1) in repeated or (not number and (links.get(key, ''), 0) in repeated)
        sent = {one['delivery'].rpartition(':')[0] for one in received.get(which, ())}
        if not inherited and len(sent) > 1:
            verdict.sent_twice.append(key)
        came: dict[tuple[str, str], float] = {
            (one['worker'], one['delivery']): one['at'] for one in received.get(which, ())
        }
        for first, second in pairwise(runs):
            since = min(came.get((run['worker'], run['delivery']), float(run['at'])) for run in (first, second))
            explained = inherited or any(
                fault['interrupts']
                and (hits(fault, first) or hits(fault, second))
                and fault['began'] <= second['at']
                and fault['ended'] >= since
                and (fault.get('since') is None or first['at'] >= fault['since'])
                for fault in faults
            )
            (verdict.explained if explained else verdict.twice).append(key)


def _clock_was_ahead(run: Event, received: dict[Try, list[Event]], faults: Iterable[Event]) -> bool:
    """Return whether the server's clock, which decides when tasks are due, was ahead when the message was received."""
    came = [one['at'] for one in received.get((run['key'], run['try']), ()) if one['delivery'] == run['delivery']]
    set_forward = [fault for fault in faults if fault.get('ahead', 0.0) > 0]
    return any(fault['began'] <= at <= fault['ended'] + _LEARNT for fault in set_forward for at in came)


def _is_explained(pause: Event, faults: Iterable[Event]) -> bool:
    """Return whether a fault explains a pause of a worker. No fault pauses the process of the proxies."""
    if pause['workers'] is None:
        return False
    worker = {'worker': pause['workers'][0]}
    return any(
        hits(fault, worker) and fault['began'] <= pause['ended'] and fault['ended'] >= pause['began']
        for fault in faults
    )
