"""Measure: publish one by one from one or several threads, and in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .. import loops
from ..cases import Case, Figure, NotMeasured
from ..sizes import Size, amount, count
from ..systems import System

__all__ = ['TITLE', 'cases']

TITLE = 'Publish'
#: A batch publishes this many times more messages, so that it takes about as long.
_MORE = 4
#: The body size of the headline cases, in bytes.
_SMALL = 200


def cases(size: Size) -> Iterator[Case]:
    """Yield the cases: one by one, then in batches."""
    figure = (Figure('messages/s'),)
    for threads in size.threads:
        for body, number in size.published.items():
            label = f'{count(threads, "thread")}, {amount(body)}'
            yield Case('publish', label, figure, partial(one_by_one, body, number, threads), headline=body == _SMALL)
    for body, number in size.published.items():
        yield Case(
            'publish', f'batch, {amount(body)}', figure, partial(batch, body, number * _MORE), headline=body == _SMALL
        )


def one_by_one(body: int, number: int, threads: int, system: System) -> Sequence[float]:
    """Return the messages per second that `threads` threads publish, each over its own connection."""
    with system.place() as place, ThreadPoolExecutor(threads) as pool:
        text, gate = loops.body_of(body), threading.Barrier(threads)
        senders = [loops.sender(place) for _ in range(threads)]

        def publish(sender: loops.Sender) -> tuple[float, float]:
            sender.send(text)  # what the first message creates is created now
            gate.wait(60)
            started = time.monotonic()
            for _ in range(number // threads):
                sender.send(text)
            return started, time.monotonic()

        spans = list(pool.map(publish, senders))
        for sender in senders:
            sender.close()
    return [number // threads * threads / (max(end for _, end in spans) - min(start for start, _ in spans))]


def batch(body: int, number: int, system: System) -> Sequence[float]:
    """Return the messages per second that one thread publishes with `Producer.batch()`."""
    with system.place() as place:
        sender, text = loops.sender(place), loops.body_of(body)
        try:
            if not sender.batches:
                raise NotMeasured('kombu has no batches for it')
            sender.send(text)
            started = time.monotonic()
            sender.send_all(text for _ in range(number))
            return [number / (time.monotonic() - started)]
        finally:
            sender.close()
