"""The Celery app of the worker under test. Its settings are JSON in `BENCHMARK_SETTINGS`."""

from __future__ import annotations

import json
import os

from celery import Celery

app = Celery('benchmarks')
app.conf.update(json.loads(os.environ['BENCHMARK_SETTINGS']))


@app.task(name='add')
def add(x: int, y: int) -> int:
    """Return the sum."""
    return x + y
