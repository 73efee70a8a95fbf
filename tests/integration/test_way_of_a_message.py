"""What is not switched on lies on no message's way: no module of an optional room or of limits runs for a plain one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.support import ROOT, Inbox, items, publish

from .conftest import Connect

PACKAGES = tuple(f'{ROOT / name}/' for name in ('kombu_couchdb', 'celery_couchdb'))

#: What an app needs neither without rooms and limits, nor with a server that has none.
OPTIONAL = (
    'kombu_couchdb/contrib',
    'celery_couchdb/contrib',
    'kombu_couchdb/limits',
    'kombu_couchdb/couchdb/pacing.py',
)


@contextmanager
def called_modules() -> Iterator[set[str]]:
    """Provide the modules of the packages in which a function is called, in this thread and in those that start."""
    found = set[str]()

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == 'call' and frame.f_code.co_filename.startswith(PACKAGES):
            found.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_message(connect: Connect, client: Client) -> None:
    with called_modules() as found:
        connection, inbox = connect(), Inbox(connect())
        publish(connection, 1)
        inbox.wait(1)
        wait_for(lambda: not items(client), 'the first ack')
        found.clear()  # the start of a connection may ask every room what it does
        publish(connection, 2)
        inbox.wait(2)
        wait_for(lambda: not items(client), 'the second ack')
    assert 'kombu_couchdb/consumer/claims.py' in found
    assert not [name for name in found if name.startswith(OPTIONAL)]


def test_result(app: Celery) -> None:
    app.backend.store_result('first', 1, 'SUCCESS')
    with called_modules() as found:
        app.backend.store_result('second', 2, 'SUCCESS')
        assert app.AsyncResult('second').get(timeout=30) == 2
    assert 'celery_couchdb/results/result_store.py' in found
    assert not [name for name in found if name.startswith(OPTIONAL)]
