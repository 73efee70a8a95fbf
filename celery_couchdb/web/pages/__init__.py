"""The pages, in the order of the menu. Each module has an object `page`; see `web.view`. Rooms have pages, too."""

from __future__ import annotations

from ...rooms import web_pages
from . import activity, failures, jobs, queues, system, task, workers

PAGES = (failures.page, queues.page, jobs.page, workers.page, *web_pages(), system.page, activity.page, task.page)
