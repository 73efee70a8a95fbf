"""Measure: the delay from before a message is published until a waiting consumer receives it."""

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

#: The busy consumer receives this many other messages per second and works this many seconds on each: 25 % of its time.
_RATE, _WORK = 50.0, 0.005
_PREFETCH = 8
#: The mean time between two messages in seconds. It varies, so that it does not synchronise with a polling interval.
_GAP = 0.06
#: The first messages are not counted: connections and changes feeds are still being opened.
_FIRST = 5


def cases(size: Size) -> Iterator[Case]:
    """Yield the cases of an idle and of a busy consumer."""
    figures = (Figure('ms', False, 'p50'), Figure('ms', False, 'p99'))
    for busy in (False, True):
        label = 'busy consumer' if busy else 'idle consumer'
        yield Case('delay', label, figures, partial(delays, size.probes, busy), headline=not busy)


def delays(probes: int, busy: bool, system: System) -> Sequence[float]:
    """Return the median and the 99th percentile in milliseconds."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('its loop does not wait for messages')
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
