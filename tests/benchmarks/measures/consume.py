"""Measure: consume and acknowledge the messages of a queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from .. import loops, peers
from ..cases import Case, Figure, NotMeasured
from ..sizes import Load, Size, amount, count
from ..systems import System

__all__ = ['TITLE', 'cases', 'rate']

TITLE = 'Consume and acknowledge'
#: With a larger backlog, systems that are slow to fill are left out. From this backlog on there are fewer rounds.
_MUCH = 100_000
_HEADLINES = (Load(64), Load(64, consumers=8, backlog=3000, take=3000))


def cases(size: Size) -> Iterator[Case]:
    """Yield a case for each load."""
    for load in size.loads:
        label = (
            f'prefetch {load.prefetch}, {count(load.consumers, "consumer")}, {amount(load.body)}, '
            f'backlog {load.backlog:,}'
        )
        rounds = size.long_rounds if load.backlog >= _MUCH else None
        yield Case('consume', label, (Figure('messages/s'),), partial(rate, load), rounds, headline=load in _HEADLINES)


def rate(load: Load, system: System) -> Sequence[float]:
    """Return the messages per second that all consumers together receive and acknowledge."""
    if load.backlog > _MUCH and not system.fills_fast:
        raise NotMeasured('filling such a backlog takes too long')
    with system.place() as place:
        if place.raw:  # without claims, all consumers of one queue would receive the same messages
            places = [place.part(number) for number in range(load.consumers)]
            for part in places:
                loops.fill(part, load.body, load.backlog // load.consumers)
        else:
            places = [place] * load.consumers
            loops.fill(place, load.body, load.backlog)
        return [load.take / peers.consume(places, load.prefetch, load.take, whole=load.take == load.backlog)]
