"""The pages, in the order of the menu. Each module has an object `page`; see `web.view`. Rooms have pages, too."""

from __future__ import annotations

from ...rooms import rooms
from . import activity, failures, find, jobs, queues, system, task, workers

_of_rooms = [room.page() for room in rooms() if room.has_page]

PAGES = (
    failures.page,
    queues.page,
    jobs.page,
    workers.page,
    *_of_rooms,
    system.page,
    activity.page,
    task.page,
    find.page,
)
