"""The pages, in the order of the menu. Each module has an object `page`; see `web.view`."""

from __future__ import annotations

from ...rooms import web_pages
from . import activity, queues, system, workers

PAGES = (queues.page, workers.page, *web_pages(), system.page, activity.page)
