"""The room of metrics: see `celery_couchdb.room`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases.leader import Led

from ...room import Room

__all__ = ['MetricsRoom']


def _part(name: str) -> Any:
    return import_module(f'{__package__}.{name}')


class MetricsRoom(Room):
    """Counts tasks in each worker, and keeps the numbers of the last day."""

    command_name, has_page = 'metrics', True

    def prepare_worker(self, app: Any) -> None:
        """Count the tasks of this process from now on."""
        _part('counters').install()

    def services(self, app: Any, concurrency: int) -> Mapping[str, Led]:
        """Return the loop that writes the history, unless the option `task_history` is off."""
        if not (app.conf.broker_transport_options or {}).get('task_history', True):
            return {}
        return {'celery-couchdb-history': _part('history').loop(app)}

    def command(self) -> Any:
        """Return the command `metrics`."""
        return _part('cli').command

    def page(self) -> Any:
        """Return the page of tasks."""
        return _part('page').page

    def exposition(self, status: Any, seconds: float) -> bytes:
        """Return the metrics of a status; *raises* `ImportError` without the package prometheus_client."""
        found: bytes = _part('cli').exposition(status, seconds)
        return found

    def read_history(self, client: Client, hours: float) -> list[Any]:
        """Return the minutes of the last hours; see `history`."""
        return [*_part('history').read_history(client, hours)]
