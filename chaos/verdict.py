"""The verdict: what the ledger says about the promises. Pure.

*Lost* is an accepted task whose last try never came to its end. *Twice* is a try that began twice although nothing that
happened to either of the two workers explains it: a fault which interrupts explains a second run if it hit one of them after
the first message of the two had come to its worker, and before the second run began. *Sent twice* is a message that came
for the same how-manieth time twice, so that there must have been two of it: no fault of a worker explains that. *Deaf* is a
listener that has not heard the last event, which is sent when all faults are over.

A task that is acknowledged early is the exception: Celery takes it from the queue before it runs, so that what kills its
worker, or the child it runs in, loses it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .ledger import Event

__all__ = ['Verdict', 'judge']

#: A try of a task: its key, and which try it is, from 0.
Try = tuple[str, int]

#: How long after the server's clock was set right a worker may still go by the wrong time, in seconds: it learns the right one
#: with its next heartbeat at the latest.
_LEARNT = 5.0

#: How exactly a worker with a wrong clock can know the server's time, in seconds: see `kombu_couchdb.couchdb.clock`.
_ASTRAY = 2.5


@dataclass
class Verdict:
    """What was found. Lists are empty where the promises hold."""

    tasks: int = 0
    chords: int = 0
    #: How many faults happened, by name.
    faults: Counter[str] = field(default_factory=Counter)
    #: How often the machine itself did not let a worker, or the network, run for more than a second, with no fault to make it so.
    pauses: int = 0
    lost: list[str] = field(default_factory=list)
    #: Acknowledged early, and lost with the process in which they ran.
    at_most_once: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    #: Tries that ran twice for a reason.
    explained: list[str] = field(default_factory=list)
    sent_twice: list[str] = field(default_factory=list)
    too_early: list[str] = field(default_factory=list)
    #: Whether the last event was sent, and the listener did not hear it.
    deaf: bool = False
    #: The longest time in which no run came to its end, in seconds.
    standstill: float = 0.0
    #: In sentences, what else is wrong: what stayed in the database, processes that ended by themselves.
    remains: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all promises were kept."""
        return not (self.lost or self.twice or self.sent_twice or self.too_early or self.deaf or self.remains)


def judge(events: Iterable[Event]) -> Verdict:
    """Return the verdict about all that a ledger has, in any order."""
    by_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.get('at', 0.0)):
        by_kind[event['event']].append(event)
    verdict = Verdict()
    faults = by_kind['fault'] + by_kind['machine']
    verdict.faults = Counter(fault['name'] for fault in by_kind['fault'])
    verdict.pauses = sum(not _was_made(pause, by_kind['fault']) for pause in by_kind['machine'])
    received, starts, ends = (_by_try(by_kind[kind]) for kind in ('received', 'start', 'end'))
    _judge_losses(verdict, by_kind['accepted'], received, ends, faults)
    _judge_doubles(verdict, received, starts, faults)
    for which, dues in _by_try(by_kind['due']).items():
        # Who ran twice has also asked for its next try twice: it may run when the first of them is due.
        for run in starts.get(which, ()):
            if run['at'] < dues[0]['at'] - (_ASTRAY if run['astray'] else 0.0) and not _clock_was_ahead(
                run, received, faults
            ):
                verdict.too_early.append(which[0])
    told = max((event['number'] for event in by_kind['told']), default=None)
    verdict.deaf = told is not None and told not in {event['number'] for event in by_kind['heard']}
    verdict.standstill = max((later['at'] - one['at'] for one, later in pairwise(by_kind['end'])), default=0.0)
    return verdict


def _by_try(events: Iterable[Event]) -> dict[Try, list[Event]]:
    found: defaultdict[Try, list[Event]] = defaultdict(list)
    for event in events:
        found[event['key'], event['try']].append(event)
    return found


def _judge_losses(
    verdict: Verdict,
    accepted: Iterable[Event],
    received: dict[Try, list[Event]],
    ends: dict[Try, list[Event]],
    faults: Sequence[Event],
) -> None:
    for order in accepted:
        verdict.tasks += len(order['keys'])
        verdict.chords += order['kind'] == 'chord'
        for key in order['keys']:
            last = (key, order['tries'] - 1)
            if last in ends:
                continue
            excused = order['kind'] == 'early' and any(
                fault['deadly'] and _hits({**fault, 'pid': None}, one) and fault['ended'] >= one['at']
                for one in received.get(last, ())
                for fault in faults
            )
            (verdict.at_most_once if excused else verdict.lost).append(key)


def _judge_doubles(
    verdict: Verdict, received: dict[Try, list[Event]], starts: dict[Try, list[Event]], faults: Sequence[Event]
) -> None:
    repeated = {which for which, runs in starts.items() if len(runs) > 1}
    for which, runs in starts.items():
        key, number = which
        # Who ran twice has also asked for its next try twice.
        inherited = (key, number - 1) in repeated
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
                and (_hits(fault, first) or _hits(fault, second))
                and fault['began'] <= second['at']
                and fault['ended'] >= since
                and (fault.get('since') is None or first['at'] >= fault['since'])
                for fault in faults
            )
            (verdict.explained if explained else verdict.twice).append(key)


def _clock_was_ahead(run: Event, received: dict[Try, list[Event]], faults: Iterable[Event]) -> bool:
    """Tell whether the server's clock, by which planned tasks are due, was ahead when the message of a run came."""
    came = [one['at'] for one in received.get((run['key'], run['try']), ()) if one['delivery'] == run['delivery']]
    set_forward = [fault for fault in faults if fault.get('ahead', 0.0) > 0]
    return any(fault['began'] <= at <= fault['ended'] + _LEARNT for fault in set_forward for at in came)


def _was_made(pause: Event, faults: Iterable[Event]) -> bool:
    """Tell whether one of the faults explains why a worker was not let run; who carries the requests of all is hit by none."""
    if pause['workers'] is None:
        return False
    worker = {'worker': pause['workers'][0]}
    return any(
        _hits(fault, worker) and fault['began'] <= pause['ended'] and fault['ended'] >= pause['began']
        for fault in faults
    )


def _hits(fault: Event, run: Event) -> bool:
    """Tell whether a fault hit the worker of a run; a worker is named with its place, `w1.4@chaos` being the fourth at w1."""
    if fault['workers'] is None:
        return True
    name = run['worker']
    return bool({name, name.partition('.')[0]} & set(fault['workers'])) and fault.get('pid') in (None, run.get('pid'))
