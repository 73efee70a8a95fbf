"""Who waits for a result goes on waiting while the server is away, and misses nothing."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError

from chaos.proxy import Proxy
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import PATIENCE, PATIENT, Server, wait_for

COMPLAINT = 'results are not heard of'


@pytest.fixture(autouse=True)
def warnings_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that ran in this process before may have set the level."""
    caplog.set_level('WARNING')


def backend_app(url: str, **options: Any) -> Celery:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    app.conf.result_backend_transport_options = {**PATIENT, **options}
    return app


@pytest.fixture
def away(server: Server, client: Client, database: str, proxy: Proxy) -> Iterator[Celery]:
    """An app that reaches the server through the proxy only."""
    url = server.couchdb_url(database).replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{proxy.port}/')
    yield backend_app(url)
    proxy.go_on()


@pytest.fixture
def worker(url: str, client: Client) -> Any:
    """A backend that reaches the server directly."""
    return backend_app(url).backend


class Waiting(threading.Thread):
    """Waits for some results in a thread of its own."""

    def __init__(self, app: Celery, names: list[str]) -> None:
        super().__init__(daemon=True)
        self.app, self.names = app, names
        self.values: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        self.values = {
            name: meta['result'] for name, meta in self.app.backend.get_many(self.names, timeout=2 * PATIENCE)
        }

    def waits(self) -> bool:
        """Whether its longpoll is open."""
        return self.app.backend.subscriber._longpoll._response is not None


@pytest.mark.parametrize('count', [3, 120], ids=['few', 'many'])
@pytest.mark.parametrize('trouble', ['cut', 'refuse'])
def test_results_stored_while_the_connection_is_down(
    away: Celery, worker: Any, proxy: Proxy, count: int, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(uuid.uuid4()) for _ in range(count)]
    waiting = Waiting(away, names)
    wait_for(waiting.waits, 'the wait')
    getattr(proxy, trouble)()
    if trouble == 'refuse':
        wait_for(lambda: COMPLAINT in caplog.text, 'the complaint')
    for name in names:
        worker.mark_as_done(name, name)
    if trouble == 'refuse':
        proxy.restore()
    waiting.join(2 * PATIENCE)
    assert waiting.values == {name: name for name in names}


def test_results_stored_while_the_server_is_silent(
    away: Celery, worker: Any, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(uuid.uuid4()) for _ in range(3)]
    waiting = Waiting(away, names)
    wait_for(waiting.waits, 'the wait')
    proxy.hang()
    for name in names:
        worker.mark_as_done(name, name)
    wait_for(lambda: COMPLAINT in caplog.text, 'the complaint')
    proxy.cut()
    proxy.go_on()
    waiting.join(2 * PATIENCE)
    assert waiting.values == {name: name for name in names}


def test_timeout_holds_while_the_server_is_away(away: Celery, proxy: Proxy) -> None:
    result = away.AsyncResult(str(uuid.uuid4()))
    assert not result.ready()

    def get() -> None:
        with pytest.raises(TimeoutError):
            result.get(timeout=2.0)
        timed_out.set()

    timed_out = threading.Event()
    waiting = threading.Thread(target=get)
    waiting.start()
    reader = away.backend.subscriber
    wait_for(lambda: reader._longpoll._response is not None or timed_out.is_set(), 'the wait')
    proxy.refuse()
    waiting.join()
    assert timed_out.is_set()
    with pytest.raises(ServerUnavailable):
        away.AsyncResult(str(uuid.uuid4())).get(timeout=1.0)


def test_results_are_stored_when_the_server_is_back(
    away: Celery, client: Client, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    name = str(uuid.uuid4())
    proxy.refuse()
    storing = threading.Thread(target=away.backend.mark_as_done, args=(name, 'kept'), daemon=True)
    storing.start()
    wait_for(lambda: 'results are not stored' in caplog.text, 'the complaint')
    proxy.restore()
    storing.join(PATIENCE)
    assert client.get(f'celery-task-meta-{name}')['value']['result'] == 'kept'


def test_result_is_given_up_when_the_policy_says_so(
    server: Server, client: Client, database: str, proxy: Proxy
) -> None:
    url = server.couchdb_url(database).replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{proxy.port}/')
    app = backend_app(url, retry_policy={'max_retries': 1})
    proxy.refuse()
    with pytest.raises(ServerUnavailable):
        app.backend.mark_as_done(str(uuid.uuid4()), 1)


def test_database_deleted_while_somebody_waits(
    worker: Any, client: Client, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [str(uuid.uuid4()) for _ in range(2)]
    waiting = Waiting(backend_app(url, sweep_interval=1.0), names)
    wait_for(waiting.waits, 'the wait')
    client.delete()
    for name in names:
        worker.mark_as_done(name, name)
    waiting.join(PATIENCE)
    assert waiting.values == {name: name for name in names}
