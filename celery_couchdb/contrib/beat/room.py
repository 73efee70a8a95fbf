"""The room of schedules: see `celery_couchdb.room`. Its scheduler is an entry point, which Celery finds by itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...room import Room

__all__ = ['BeatRoom']


class BeatRoom(Room):
    """Schedules that operators see and change."""

    command_name, has_page = 'schedule', True

    def command(self) -> Any:
        """Return the command `schedule`."""
        return import_module(f'{__package__}.cli').command

    def page(self) -> Any:
        """Return the page of schedules."""
        return import_module(f'{__package__}.page').page
