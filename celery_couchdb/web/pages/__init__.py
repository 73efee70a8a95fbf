"""The pages, in the order of the menu. Each module has an object `page`; see `web.view`. Rooms have pages, too."""

from __future__ import annotations

from importlib import import_module

from ... import rooms
from . import activity, jobs, queues, workers

PAGES = (
    queues.page,
    jobs.page,
    workers.page,
    *(import_module(name).page for name in rooms.PAGES.values()),
    activity.page,
)
