"""Functions that pytest-celery runs beside a worker without Docker: it copies this file to the app as `utils.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import psutil

_COLUMNS = ('pid', 'name', 'username', 'cmdline', 'cpu_percent', 'memory_percent', 'create_time')


def get_running_processes_info(columns: Sequence[str] | None = None) -> str:
    """Return facts about the worker's process and its children, as a JSON list of objects; `columns` are psutil's."""
    worker = psutil.Process(int(os.environ['WORKER_PID']))
    return json.dumps([process.as_dict(columns or _COLUMNS) for process in [worker, *worker.children(recursive=True)]])
