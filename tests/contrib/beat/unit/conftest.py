"""An app whose entries are tested; it has no connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.contrib.beat.entries import Entry, new_state

Make = Callable[..., Entry]

STATE = new_state('beat:state:x')


@pytest.fixture
def app() -> Celery:
    app = Celery('shop', set_as_current=False, broker='memory://')
    app.conf.timezone = 'Europe/Berlin'
    return app


@pytest.fixture
def entry(app: Celery) -> Make:
    """A function that makes an entry; its arguments are members of the document."""

    def entry(**members: Any) -> Entry:
        return Entry.of(
            'x', {'_id': 'beat:entry:x', 'type': 'Schedule', 'task': 't', 'schedule': {'every': 10}, **members}, app
        )

    return entry
