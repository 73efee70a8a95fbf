"""The pages, in the order of the menu. Each module has an object `page`; see `web.view`."""

from __future__ import annotations

from . import activity, queues, workers

PAGES = (queues.page, workers.page, activity.page)
