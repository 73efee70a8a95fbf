"""The Celery app that the worker under test runs; its settings come from `BENCHMARK_SETTINGS`, as JSON."""

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
