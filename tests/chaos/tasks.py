"""The app of workers and publishers. Its tasks record in the ledger what happens to them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

ASTRAY = float(os.environ.get('CHAOS_ASTRAY', 0))
if ASTRAY:
    import time_machine

    # Before all other imports. Children of the pool inherit it by fork.
    time_machine.travel(datetime.now(timezone.utc) + timedelta(seconds=ASTRAY), tick=True).start()

from celery import Celery, signals  # noqa: E402

from .ledger import Ledger  # noqa: E402
from .machine import watch  # noqa: E402

app = Celery('chaos')
app.conf.update(json.loads(os.environ['CHAOS_SETTINGS']))
ledger = Ledger(Path(os.environ['CHAOS_LEDGER']))


@contextmanager
def noted(request: Any) -> Iterator[None]:
    """Record the begin and the end of a run."""
    run = {
        'key': request.id,
        'try': request.retries,
        'worker': request.hostname,
        'pid': os.getpid(),
        'astray': bool(ASTRAY),
        'delivery': request.properties['delivery_tag'],
    }
    ledger.note('start', at=time.monotonic(), **run)
    yield
    ledger.note('end', at=time.monotonic(), **run)


@app.task(name='late', bind=True)
def late(self: Any, seconds: float, ballast: str = '') -> None:
    """Work for `seconds`; `ballast` makes the message large."""
    with noted(self.request):
        time.sleep(seconds)


@app.task(name='early', bind=True, acks_late=False)
def early(self: Any, seconds: float, number: int = 0) -> int:
    """Return a number; acknowledged early: Celery delivers such a task at most once."""
    with noted(self.request):
        time.sleep(seconds)
        return number


@app.task(name='tried', bind=True, max_retries=None)
def tried(self: Any, seconds: float, tries: int) -> None:
    """Fail all tries but the last."""
    with noted(self.request):
        time.sleep(seconds)
    if self.request.retries + 1 < tries:
        countdown = 0 if ASTRAY else 1  # a countdown starts from the worker's own clock, which is wrong then
        ledger.note('due', key=self.request.id, at=time.monotonic() + countdown, **{'try': self.request.retries + 1})
        raise self.retry(countdown=countdown)


@app.task(name='part', bind=True)
def part(self: Any, seconds: float, number: int) -> int:
    """Return a number."""
    with noted(self.request):
        time.sleep(seconds)
        return number


@app.task(name='body', bind=True)
def body(self: Any, numbers: list[int]) -> int:
    """Receive the results of the parts, in order."""
    if numbers != list(range(len(numbers))):
        raise ValueError(f'the body of a chord received {numbers}')
    with noted(self.request):
        return len(numbers)


@signals.task_received.connect
def on_received(request: Any, **_: Any) -> None:
    """Record that this worker received a message."""
    ledger.note(
        'received',
        key=request.id,
        at=time.monotonic(),
        worker=request.hostname,
        delivery=request.message.delivery_tag,
        **{'try': request.request_dict['retries'] or 0},
    )


@signals.celeryd_after_setup.connect
def watch_machine(sender: str, **_: Any) -> None:
    """Record pauses of this process by the operating system."""
    watch(ledger, [sender], threading.Event())
