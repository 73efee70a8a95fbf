"""Measure: the cost of an idle Celery worker and its server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from ..cases import Case, Figure, NotMeasured
from ..processes import cpu_of, server_of
from ..sizes import Size
from ..systems import System
from ..worker import app_of, working

__all__ = ['TITLE', 'cases']

TITLE = 'An idle worker'
#: How long to wait after the first tasks until worker and server are idle, in seconds.
_REST = 3.0


def cases(size: Size) -> Iterator[Case]:
    """Yield the one case."""
    figures = (
        Figure('requests/min', False, 'HTTP requests'),
        Figure('s/min', False, 'CPU of the worker'),
        Figure('s/min', False, 'CPU of the server'),
    )
    yield Case('idle', f'observed for {size.idle:g} s', figures, partial(cost, size.idle), rounds=size.long_rounds)


def cost(seconds: float, system: System) -> Sequence[float | None]:
    """Return requests and CPU seconds of worker and server, each per minute; None for what cannot be measured."""
    with system.place() as place:
        if place.raw:
            raise NotMeasured('no Celery')
        app = app_of(place)
        server = server_of(system.host, system.port)
        with working(place, app) as worker:
            app.close()
            time.sleep(_REST)
            before = system.requests(), cpu_of(worker.pid), server and cpu_of(server)
            started = time.monotonic()
            time.sleep(seconds)
            after = system.requests(), cpu_of(worker.pid), server and cpu_of(server)
            minutes = (time.monotonic() - started) / 60
    spent = [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]
    if spent[0] is not None:
        spent[0] -= 1  # the request for the count itself
    return [None if value is None else value / minutes for value in spent]
