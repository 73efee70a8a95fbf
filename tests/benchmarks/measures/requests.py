"""Measure: HTTP requests and document writes per message, counted in the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from .. import loops
from ..cases import Case, Figure, NotMeasured
from ..counting import counting
from ..sizes import Size
from ..systems import Place, System

__all__ = ['TITLE', 'cases']

TITLE = 'Requests and writes for each message'


def cases(size: Size) -> Iterator[Case]:
    """Yield a case for each way to publish and to consume."""
    figures, rounds = (Figure('requests', False, 'requests'), Figure('writes', False, 'writes')), size.long_rounds
    yield Case('requests', 'publish one by one', figures, partial(cost, size.counted, False, one_by_one), rounds)
    yield Case('requests', 'publish in batches', figures, partial(cost, size.counted, False, in_batches), rounds)
    for prefetch in sorted({load.prefetch for load in size.loads}):
        yield Case(
            'requests',
            f'consume, prefetch {prefetch}',
            figures,
            partial(cost, size.counted, True, partial(consume, prefetch)),
            rounds,
        )


def cost(number: int, filled: bool, action: Callable[[Place, int], None], system: System) -> Sequence[float]:
    """Return the requests and the writes per message of an action on `number` messages."""
    if system.name not in ('couchdb', 'raw'):
        raise NotMeasured('no HTTP')
    with system.place() as place:
        loops.fill(place, 200, number if filled else 0)
        with counting() as found:
            action(place, number)
    return [found.requests / number, found.writes / number]


def one_by_one(place: Place, number: int) -> None:
    """Publish messages one by one."""
    sender, body = loops.sender(place), loops.body_of(200)
    for _ in range(number):
        sender.send(body)
    sender.close()


def in_batches(place: Place, number: int) -> None:
    """Publish messages in a batch."""
    sender, body = loops.sender(place), loops.body_of(200)
    sender.send_all(body for _ in range(number))
    sender.close()


def consume(prefetch: int, place: Place, number: int) -> None:
    """Receive and acknowledge all messages."""
    bodies: list[Any] = []
    taker = loops.taker(place, prefetch, bodies.append)
    taker.start()
    loops.wait_until(lambda: len(bodies) >= number, lambda: taker.take(1.0))
    taker.close()
