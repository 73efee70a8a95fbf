"""Measure: how the cost of a message grows with the number of consumers of its queue."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median

from .. import loops
from ..cases import Case, Figure, NotMeasured
from ..figures import percentile
from ..fleet import Fleet, fleet
from ..processes import Spent
from ..sizes import Fleets, Size, count
from ..systems import Place, System

__all__ = ['TITLE', 'cases']

TITLE = 'A fleet of consumers of one queue'
#: The work on each message of a burst, in seconds, and that of consumers which are busy until the end.
_BURST, _LONG = 2.0, 3600.0
#: The number of pings.
_PINGS = 3
#: The prefetch count of consumers of a backlog. All others take one message at a time.
_PREFETCH = 64
#: How long a server may still work after the last message, on acknowledgements for example, in seconds.
_REST = 0.5

_DELAYS = ('p50', 'p99', 'CPU per message')
_FIGURES = (
    Figure('% of a core', False, 'idle, CPU of the server'),
    *(Figure('ms', False, f'idle, {name}') for name in _DELAYS),
    Figure('ms', False, 'ping, until all have replied'),
    Figure('ms', False, 'burst, first to last start'),
    *(Figure('ms', False, f'busy, {name}') for name in ('first message', *_DELAYS)),
)
_BACKLOG_FIGURES = (Figure('messages/s', name='backlog'), Figure('ms', False, 'backlog, CPU per message'))


def cases(size: Size) -> Iterator[Case]:
    """Yield two cases for each number of consumers: messages that come when there is no backlog, and a backlog."""
    for consumers in size.fleets.sizes:
        label = count(consumers, 'consumer')
        for figures, run in ((_FIGURES, situations), (_BACKLOG_FIGURES, backlog)):
            yield Case('fleet', label, figures, partial(run, consumers, size.fleets), size.long_rounds, at=consumers)


def situations(consumers: int, amounts: Fleets, system: System) -> Sequence[float | None]:
    """Return the figures of a fleet that is idle, is pinged, gets a message for each consumer, and then is busy."""
    settling = amounts.idle / 4
    with _place(system) as place, fleet(place, consumers, prefetch=1) as members:
        members.settle(settling)
        idle = _cost_of_idling(system, amounts.idle)
        found = [None if idle is None else idle / 10, *_one_at_a_time(members, amounts.probes, idle, system)]
        found.append(median(members.ping() for _ in range(_PINGS)) * 1000)
        members.send(consumers, _BURST)
        starts = members.received(consumers)
        found.append((starts[-1] - starts[0]) * 1000)
        time.sleep(_BURST + settling)
        members.send(consumers - 1, _LONG)
        members.received(consumers - 1)
        time.sleep(settling)
        first = members.delays(1)[0] * 1000
        return [*found, first, *_one_at_a_time(members, amounts.probes, idle, system)]


def backlog(consumers: int, amounts: Fleets, system: System) -> Sequence[float | None]:
    """Return messages per second that all consumers together receive and acknowledge, and the CPU ms of each."""
    with _place(system) as place:
        sender = loops.sender(place)
        sender.send_all({'number': number, 'hold': 0.0} for number in range(amounts.backlog))
        sender.settle()
        sender.close()
        with fleet(place, consumers, _PREFETCH) as members:
            spent, began = Spent(system.host, system.port), time.time()
            ended = members.received(amounts.backlog)[-1]
            time.sleep(_REST)
            used = spent.milliseconds()
    return [amounts.backlog / (ended - began), None if used is None else used / amounts.backlog]


def _place(system: System) -> AbstractContextManager[Place]:
    if system.name not in ('couchdb', 'redis'):
        raise NotMeasured('fleets are compared over Redis only')
    return system.place()


def _cost_of_idling(system: System, seconds: float) -> float | None:
    """Return the CPU milliseconds per second of the server."""
    spent = Spent(system.host, system.port)
    time.sleep(seconds)
    used = spent.milliseconds()
    return None if used is None else used / seconds


def _one_at_a_time(members: Fleet, probes: int, idle: float | None, system: System) -> Sequence[float | None]:
    """Return p50 and p99 of the delay in milliseconds, and the CPU milliseconds of a message beside those of idling."""
    spent, began = Spent(system.host, system.port), time.monotonic()
    delays = members.delays(probes)
    time.sleep(_REST)
    used, seconds = spent.milliseconds(), time.monotonic() - began
    cost = None if used is None or idle is None else max(0.0, used - idle * seconds) / probes
    return [*(percentile(delays, share) * 1000 for share in (0.5, 0.99)), cost]
