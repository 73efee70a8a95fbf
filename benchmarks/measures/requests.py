"""Measure: HTTP requests and document writes per message, counted in the client."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from requests.adapters import HTTPAdapter

from .. import loops
from ..cases import Case, Figure, NotMeasured
from ..sizes import Size
from ..systems import Place, System

__all__ = ['TITLE', 'Count', 'cases', 'written']

TITLE = 'Requests and writes for each message'


class Count:
    """The number of requests sent, and of documents that they wrote or deleted."""

    requests = writes = 0


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


@contextmanager
def counting() -> Iterator[Count]:
    """Count the requests that this process sends with the library `requests`."""
    count, send = Count(), HTTPAdapter.send

    def counted(self: HTTPAdapter, request: Any, *args: Any, **kwargs: Any) -> Any:
        count.requests += 1
        count.writes += written(request.method, request.url, request.body)
        return send(self, request, *args, **kwargs)

    HTTPAdapter.send = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        HTTPAdapter.send = send  # type: ignore[method-assign]


def written(method: str, url: str, body: Any) -> int:
    """Return the number of documents that a request writes or deletes."""
    path = url.partition('?')[0]
    if method == 'POST' and path.endswith('/_bulk_docs'):
        # A large body is a file in memory, which is read in blocks.
        return len(json.loads(body.getvalue() if isinstance(body, io.BytesIO) else body)['docs'])
    return 1 if method in ('PUT', 'DELETE') else 0
