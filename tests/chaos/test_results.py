"""Waiting for results during an outage: callers keep waiting, and get all results afterwards."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, PATIENT, wait_for

COMPLAINT = 'results are not received'


@pytest.fixture(autouse=True)
def warnings_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Set the log level, because a worker that ran in this process earlier may have changed it."""
    caplog.set_level('WARNING')


def backend_app(url: str, **options: Any) -> Celery:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    app.conf.result_backend_transport_options = {**PATIENT, **options}
    return app


@pytest.fixture
def behind_proxy(server: Server, client: Client, database: str, proxy: Proxy) -> Iterator[Celery]:
    """An app that reaches the server only through the proxy."""
    url = server.couchdb_url(database).replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{proxy.port}/')
    yield backend_app(url)
    proxy.go_on()


@pytest.fixture
def worker(url: str, client: Client) -> Any:
    """A backend that reaches the server directly."""
    return backend_app(url).backend


class Waiting(threading.Thread):
    """A thread that waits for results."""

    def __init__(self, app: Celery, names: list[str]) -> None:
        super().__init__(daemon=True)
        self.app, self.names = app, names
        self.values: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        self.values = {
            name: meta['result'] for name, meta in self.app.backend.await_results(self.names, timeout=2 * PATIENCE)
        }

    def waits(self) -> bool:
        """Return whether the longpoll of the thread is open."""
        return self.app.backend.subscriber._longpoll._response is not None


@pytest.mark.parametrize(('count', 'trouble'), [(3, 'cut'), (120, 'refuse')])
def test_results_stored_while_the_connection_is_down(
    behind_proxy: Celery, worker: Any, proxy: Proxy, count: int, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(uuid.uuid4()) for _ in range(count)]
    waiting = Waiting(behind_proxy, names)
    wait_for(waiting.waits, 'the longpoll to open')
    getattr(proxy, trouble)()
    if trouble == 'refuse':
        wait_for(lambda: COMPLAINT in caplog.text, 'the log line about the failure')
    for name in names:
        worker.mark_as_done(name, name)
    if trouble == 'refuse':
        proxy.restore()
    waiting.join(2 * PATIENCE)
    assert waiting.values == {name: name for name in names}


def test_results_stored_while_the_server_is_silent(
    behind_proxy: Celery, worker: Any, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(uuid.uuid4()) for _ in range(3)]
    waiting = Waiting(behind_proxy, names)
    wait_for(waiting.waits, 'the longpoll to open')
    proxy.hang()
    for name in names:
        worker.mark_as_done(name, name)
    wait_for(lambda: COMPLAINT in caplog.text, 'the log line about the failure')
    proxy.cut()
    proxy.go_on()
    waiting.join(2 * PATIENCE)
    assert waiting.values == {name: name for name in names}


def test_timeout_ends_the_wait_during_an_outage(behind_proxy: Celery, proxy: Proxy) -> None:
    result = behind_proxy.AsyncResult(str(uuid.uuid4()))
    assert not result.ready()

    def get() -> None:
        with pytest.raises(TimeoutError):
            result.get(timeout=2.0)
        timed_out.set()

    timed_out = threading.Event()
    waiting = threading.Thread(target=get)
    waiting.start()
    subscriber = behind_proxy.backend.subscriber
    wait_for(lambda: subscriber._longpoll._response is not None or timed_out.is_set(), 'the longpoll to open')
    proxy.refuse()
    waiting.join()
    assert timed_out.is_set()
    with pytest.raises(ServerUnavailable):
        behind_proxy.AsyncResult(str(uuid.uuid4())).get(timeout=1.0)


def test_result_is_stored_after_the_outage(
    behind_proxy: Celery, client: Client, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    name = str(uuid.uuid4())
    proxy.refuse()
    storing = threading.Thread(target=behind_proxy.backend.mark_as_done, args=(name, 'kept'), daemon=True)
    storing.start()
    wait_for(lambda: 'results are not stored' in caplog.text, 'the log line about the failure')
    proxy.restore()
    storing.join(PATIENCE)
    assert client.get(f'celery-task-meta-{name}')['value']['result'] == 'kept'


def test_retry_policy_limits_the_attempts_to_store_a_result(
    server: Server, client: Client, database: str, proxy: Proxy
) -> None:
    url = server.couchdb_url(database).replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{proxy.port}/')
    app = backend_app(url, retry_policy={'max_retries': 1})
    proxy.refuse()
    with pytest.raises(ServerUnavailable):
        app.backend.mark_as_done(str(uuid.uuid4()), 1)


def test_wait_continues_after_the_database_was_deleted(
    worker: Any, client: Client, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(uuid.uuid4()) for _ in range(2)]
    waiting = Waiting(backend_app(url, sweep_interval=1.0), names)
    wait_for(waiting.waits, 'the longpoll to open')
    client.delete()
    for name in names:
        worker.mark_as_done(name, name)
    waiting.join(PATIENCE)
    assert waiting.values == {name: name for name in names}
