"""Results that CouchDB refuses, at the start of a worker and later (`celery_couchdb.worker.startup`, `.backend`)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import WorkerShutdown

from celery_couchdb.worker import startup
from kombu_couchdb.errors import AccessDenied, BrokenAnswer, NotCouchDB, ServerUnavailable


class Server:
    """A simulated CouchDB that records writes, and raises an error from the nth write on."""

    def __init__(self, error: Exception | None = None, after: int = 0) -> None:
        self.error, self.after = error, after
        self.written: list[dict[str, Any]] = []

    def put(self, doc: dict[str, Any], **_: Any) -> str:
        self.written.append(doc)
        if self.error and len(self.written) > self.after:
            raise self.error
        return '1-x'


def backend_of(server: Server, **settings: Any) -> Any:
    app = Celery('app', set_as_current=False, broker='memory://', backend='couchdb://host/db')
    app.conf.update(settings)
    backend = app.backend
    backend.client.put = server.put
    return backend


@pytest.mark.parametrize('error', [AccessDenied('these are read-only'), NotCouchDB('a web page')])
def test_refused_result_ends_the_worker_with_one_sentence(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WorkerShutdown) as caught:
        startup.check(backend_of(Server(error)))
    assert caught.value.code == 1
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.CRITICAL, f'results cannot be stored: {error}')
    assert record.exc_info is None


@pytest.mark.parametrize('error', [ServerUnavailable('answered 507: insufficient_storage'), BrokenAnswer('cut')])
def test_outage_does_not_end_the_worker(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(error)
    startup.check(backend_of(server))
    assert len(server.written) == 1  # the write is not retried, so that the worker does not wait
    assert caplog.messages == [f'results cannot be stored just now: {error}']


def test_refused_deletion_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    startup.check(backend_of(Server(AccessDenied('no deletions'), after=1)))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ('settings', 'ignored', 'writes'),
    [
        ({}, None, 2),
        ({}, True, 0),
        ({}, False, 2),
        ({'task_ignore_result': True}, None, 0),
        ({'task_ignore_result': True}, True, 0),
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
            server.error = AccessDenied('no more')
    finally:
        backend.sweeper.stop()
    assert len(server.written) == 2


# -- rights that are revoked while a worker runs


def refusing() -> Any:
    backend = backend_of(Server())

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AccessDenied('these are read-only')

    backend.store.write = refuse
    return backend


def test_refused_result_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    request = Context(id='x', task='add')
    refusing().mark_as_done('x', 3, request)
    assert caplog.messages == ['the result of add[x] (SUCCESS) is lost: these are read-only']
    assert caplog.records[0].exc_info is None
