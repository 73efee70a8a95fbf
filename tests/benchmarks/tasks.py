"""The Celery app of the worker under test.

Its settings are JSON in `BENCHMARK_SETTINGS`. If `BENCHMARK_REQUESTS` names a file, its HTTP
requests are recorded there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from celery import Celery

from . import without  # noqa: F401 - it changes this process
from .counting import record

app = Celery('benchmarks')
app.conf.update(json.loads(os.environ['BENCHMARK_SETTINGS']))
if path := os.environ.get('BENCHMARK_REQUESTS'):
    record(Path(path))


@app.task(name='add')
def add(x: int, y: int) -> int:
    """Return the sum."""
    return x + y


@app.task(name='nap')
def nap(seconds: float) -> None:
    """Take some time."""
    time.sleep(seconds)


@app.task(name='total')
def total(numbers: Iterable[int]) -> int:
    """Return the sum of the results of a chord's header."""
    return sum(numbers)
