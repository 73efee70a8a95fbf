"""What it costs when nothing happens: a Celery worker that has no work, and its server."""

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
#: After its first tasks, a worker and its server have that long to come to rest, in seconds.
_REST = 3.0


def cases(size: Size) -> Iterator[Case]:
    """Yield the one case."""
    figures = (
        Figure('requests/min', False, 'HTTP requests'),
        Figure('s/min', False, 'CPU of the worker'),
        Figure('s/min', False, 'CPU of the server'),
    )
    yield Case('idle', f'watched for {size.idle:g} s', figures, partial(cost, size.idle), rounds=size.long_rounds)


def cost(seconds: float, system: System) -> Sequence[float | None]:
    """Return requests, and CPU seconds of worker and server, each in a minute; None for what cannot be seen from here."""
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
        spent[0] -= 1  # the question itself
    return [None if value is None else value / minutes for value in spent]
