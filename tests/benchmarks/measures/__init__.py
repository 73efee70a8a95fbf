"""The measures in the order of the report. Each module has `TITLE` and `cases(size)`."""

from __future__ import annotations

from types import ModuleType

from . import consume, delay, fleet, idle, job, memory, publish, requests, results, steady, waiting

__all__ = ['MEASURES']

MEASURES: dict[str, ModuleType] = {
    'publish': publish,
    'consume': consume,
    'delay': delay,
    'fleet': fleet,
    'job': job,
    'steady': steady,
    'results': results,
    'waiting': waiting,
    'requests': requests,
    'idle': idle,
    'memory': memory,
}
