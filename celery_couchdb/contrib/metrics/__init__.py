"""Metrics of tasks: what each worker counts, the history of the last day, and the export for Prometheus.

A worker counts its tasks in its main process (`counters`), and writes the counts with the heartbeat of its consumer,
which is written anyway: no task causes a write. One of the workers adds them up each minute (`history`).

This module has what the core asks of the room.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def prepare_worker() -> None:
    """Count the tasks of this process from now on, and let the history be written when a worker is ready."""
    import_module(f'{__package__}.counters').install()
    import_module(f'{__package__}.history').connect_signals()


def start_in_worker(worker: Any) -> None:
    """Begin with a worker that is ready."""
    prepare_worker()
    import_module(f'{__package__}.history').on_worker_ready(worker)
