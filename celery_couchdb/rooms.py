"""The optional rooms of results, workers and commands: a list of classes, see `celery_couchdb.room`.

To remove a room, delete its folder and its line here. The core imports no room by name.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from celery import signals
from celery._state import get_current_worker_task

from .room import Room

__all__ = ['concerned', 'header_of', 'pass_on', 'rooms']

#: The module of each room, and its class.
ROOMS = (
    ('celery_couchdb.contrib.metrics.room', 'MetricsRoom'),
    ('celery_couchdb.contrib.beat.room', 'BeatRoom'),
    ('celery_couchdb.contrib.parcels.room', 'ParcelsRoom'),
    ('celery_couchdb.contrib.regions.room', 'RegionsRoom'),
)


@cache
def rooms() -> tuple[Room, ...]:
    """Return the rooms of this installation."""
    return tuple(getattr(import_module(module), name)() for module, name in ROOMS)


# -- the headers of tasks that belong to rooms


def header_of(request: Any, name: str) -> Any:
    """Return a header of a task, or None; `request` is the task's request or None."""
    return getattr(request, name, None) or (getattr(request, 'headers', None) or {}).get(name)


def concerned(request: Any) -> list[Room]:
    """Return the rooms to which a task belongs; `request` is its request or None."""
    found = getattr(request, 'headers', None) or {}
    having = [room for room in rooms() for name in room.headers if name in found or getattr(request, name, None)]
    return list(dict.fromkeys(having))


def pass_on(headers: dict[str, Any]) -> None:
    """Give a message those headers of the running task that belong to rooms."""
    if task := get_current_worker_task():
        for room in concerned(task.request):
            for name in room.headers:
                if value := header_of(task.request, name):
                    headers.setdefault(name, value)


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict):
        pass_on(headers)
