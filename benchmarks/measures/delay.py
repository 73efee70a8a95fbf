"""How long a message takes from before it is published until a waiting consumer has it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

from .. import loops, peers
from ..cases import Case, Figure, NotMeasured
from ..figures import percentile
from ..sizes import Size
from ..systems import System

__all__ = ['TITLE', 'cases']

TITLE = 'Delay from publishing to delivery'

#: The busy consumer gets so many other messages a second and works so long on each, in seconds: a quarter of its time.
_RATE, _WORK = 50.0, 0.005
_PREFETCH = 8
#: The time between two messages is that long on average, in seconds, and varies, so as not to fall in step with a poll.
_GAP = 0.06
#: The first are not counted: connections and feeds are being opened.
_FIRST = 5


def cases(size: Size) -> Iterator[Case]:
    """Yield the idle and the busy case."""
    figures = (Figure('ms', False, 'p50'), Figure('ms', False, 'p99'))
    for busy in (False, True):
        label = 'busy consumer' if busy else 'idle consumer'
        yield Case('delay', label, figures, partial(delays, size.probes, busy), headline=not busy)


def delays(probes: int, busy: bool, system: System) -> Sequence[float]:
    """Return the median and the 99th percentile, in milliseconds."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('its loop waits for nothing')
        sender = loops.sender(place)
        with (
            peers.listening(place, _PREFETCH, _FIRST + probes, _WORK) as answer,
            peers.loading(place, 200, _RATE) if busy else nullcontext(),
        ):
            for _ in range(_FIRST + probes):
                time.sleep(random.uniform(0.5, 1.5) * _GAP)
                sender.send({'sent': time.time()})
            found = answer()[_FIRST:]
        sender.close()
    return [percentile(found, share) * 1000 for share in (0.5, 0.99)]
