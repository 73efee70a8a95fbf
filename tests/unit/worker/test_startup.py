"""When a worker checks at its start that results can be stored (`celery_couchdb.worker.startup`)."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_couchdb.worker import startup


class Server:
    """A simulated CouchDB that records writes."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    def put(self, doc: dict[str, Any], **_: Any) -> str:
        self.written.append(doc)
        return '1-x'


def backend_of(server: Server, **settings: Any) -> Any:
    app = Celery('app', set_as_current=False, broker='memory://', backend='couchdb://host/db')
    app.conf.update(settings)
    backend = app.backend
    backend.client.put = server.put
    return backend


@pytest.mark.parametrize(
    ('settings', 'ignored', 'writes'),
    [
        ({}, None, 2),
        ({}, True, 0),
        ({'task_ignore_result': True}, None, 0),
        ({'task_ignore_result': True}, False, 2),
    ],
)
def test_no_check_if_no_task_stores_results(settings: dict[str, Any], ignored: bool | None, writes: int) -> None:
    server = Server()
    backend = backend_of(server, **settings)
    if ignored is not None:

        @backend.app.task(name='one', ignore_result=ignored, shared=False)
        def one() -> None:
            pass

        backend.app.finalize()
        for name in [name for name in backend.app.tasks if name != 'one' and not name.startswith('celery.')]:
            backend.app.tasks.unregister(name)  # a task that plugins have added
    startup.check(backend)
    assert len(server.written) == writes


def test_check_is_not_repeated_after_a_reconnect() -> None:
    server = Server()
    backend = backend_of(server)
    backend.app.app = backend.app
    try:
        for _ in range(3):
            # Not through the signal: before 5.7, Celery does not connect a receiver at the address of a collected one.
            backend._on_worker_ready(sender=backend.app)
    finally:
        backend.sweeper.stop()
    assert len(server.written) == 2
