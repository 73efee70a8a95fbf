"""The optional rooms of results, workers and commands, and how the core finds them. See also `kombu_couchdb.rooms`.

To remove a room, delete its folder and its lines here. The core imports no room by name, and asks all rooms that are
there (`hooks`, `command_hooks`, `web_pages`). These are the functions that it asks for:

* of results and publishers: `members_of_result(app, request, task_id)` returns members that a result document gets;
  `results_elsewhere(request, task_id, doc)` returns the documents, each with the name of its database on the broker's
  server, in which the result `doc` is stored as member `result`, and whether it is stored among the results, too;
  `pass_on(headers)` adds what the sender of a chord passes on to its body; `check_headers(app, tasks, options)`
  raises `ConfigurationError` if tasks cannot be in the header of a chord.
* of workers: `prepare_worker()`, when a worker starts; `start_in_worker(worker)`, when a worker is ready whose app has
  made its result backend only now.
* of commands: `setup_plans(…)`, see `cli.setup`, `vacuum_part(…)`, see `cli.vacuum`, `exposition(status, seconds)`,
  which returns the metrics of a status in Prometheus' text format, and `read_history(client, hours)`, which returns
  the minutes of the last hours, see `metrics.history`. `whereabouts(app, broker, start)` returns the tasks that are
  elsewhere and whose ids begin with `start`, with their `id`, their name `task`, and where they are as `text`.

The room `web` asks the others for their pages; each is an object `page`, see `web.view.Page`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

#: By room: the package with the functions for results, publishers and workers.
HOOKS = {
    'metrics': 'celery_couchdb.contrib.metrics',
    'parcels': 'celery_couchdb.contrib.parcels',
    'regions': 'celery_couchdb.contrib.regions',
}

#: By name of the command: the module with the object `command`, and with functions for other commands.
COMMANDS = {
    'metrics': 'celery_couchdb.contrib.metrics.cli',
    'parcels': 'celery_couchdb.contrib.parcels.cli',
    'regions': 'celery_couchdb.contrib.regions.cli',
    'schedule': 'celery_couchdb.contrib.beat.cli',
    'web': 'celery_couchdb.web.cli',
}

#: By room: the module with the object `page`. It needs the packages of the room `web`, which alone imports it.
WEB_PAGES = {
    'metrics': 'celery_couchdb.contrib.metrics.page',
    'schedules': 'celery_couchdb.contrib.beat.page',
    'parcels': 'celery_couchdb.contrib.parcels.page',
    'regions': 'celery_couchdb.contrib.regions.page',
}


@cache
def hooks(name: str) -> list[Callable[..., Any]]:
    """Return the functions of this name for results, publishers and workers."""
    return [getattr(module, name) for module in map(import_module, HOOKS.values()) if hasattr(module, name)]


@cache
def command_hooks(name: str) -> list[Callable[..., Any]]:
    """Return the functions of this name for commands."""
    return [getattr(module, name) for module in map(import_module, COMMANDS.values()) if hasattr(module, name)]


@cache
def web_pages() -> list[Any]:
    """Return the pages of the rooms for the room `web`."""
    return [import_module(name).page for name in WEB_PAGES.values()]
