"""Beat: periodic tasks, whose schedules and states are documents in the broker's database.

Of all processes that run beat with this scheduler, one is the leader and sends the tasks. Each due date of each entry
is sent once, even if leaders are killed or paused.

`CouchDBScheduler` is for `celery beat -S couchdb`, and `Schedules` for programs that read and change entries.
"""

from __future__ import annotations

from .scheduler import CouchDBScheduler
from .stored_schedules import Schedules

__all__ = ['CouchDBScheduler', 'Schedules']
