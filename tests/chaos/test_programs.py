"""Programs without a worker, such as web applications: what they call during an outage ends, with one sentence."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError
from celery.result import GroupResult
from kombu.exceptions import OperationalError

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE
from tests.support import end

#: Time limits that a server that hangs exceeds soon.
QUICK = {'request_timeout': 1.0, 'connect_timeout': 1.0}


@pytest.fixture(params=['refuse', 'hang'])
def start(
    request: pytest.FixtureRequest, url: str, server: Server, proxy: Proxy, client: Client
) -> Iterator[Callable[..., Celery]]:
    """A function that returns an app, which has sent a task before CouchDB stopped responding.

    It has the settings of the start pages, and these options of the result backend.
    """
    apps: list[Celery] = []

    def start(**options: Any) -> Celery:
        through_proxy = url.replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{proxy.port}/')
        app = Celery('test', set_as_current=False, broker=through_proxy, backend=through_proxy)
        app.conf.update(
            result_backend_always_retry=True,
            broker_transport_options=QUICK,
            result_backend_transport_options={**QUICK, **options},
        )
        apps.append(app)
        app.send_task('add')
        getattr(proxy, request.param)()
        return app

    yield start
    proxy.go_on()
    for app in apps:
        end(app)


def error_of(call: Callable[[], Any]) -> BaseException:
    """Return the error that a call raises; fail the test if it raises none, or does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    [error] = errors
    assert str(error).count('\n') == 0
    return error


def test_reads_of_results_end(start: Callable[..., Celery]) -> None:
    app = start()

    def result() -> Any:
        return app.AsyncResult(str(uuid.uuid4()))

    group = GroupResult('group', [result(), result()], app=app)
    reads: list[Callable[[], Any]] = [
        lambda: result().state,
        lambda: result().ready(),
        lambda: result().successful(),
        lambda: result().children,
        group.ready,
        group.completed_count,
        lambda: GroupResult.restore('group', app=app),
    ]
    for read in reads:
        assert isinstance(error_of(read), ServerUnavailable)


def test_get_ends_at_its_timeout(start: Callable[..., Celery]) -> None:
    app = start(request_timeout=PATIENCE, connect_timeout=PATIENCE)
    results = [app.AsyncResult(str(uuid.uuid4())) for _ in range(2)]
    began = time.monotonic()
    for call in (results[0].get, GroupResult('group', results, app=app).get):
        assert isinstance(error_of(lambda call=call: call(timeout=1.0)), TimeoutError)  # type: ignore[misc]
    assert time.monotonic() - began < PATIENCE / 2


def test_removing_results_ends(start: Callable[..., Celery]) -> None:
    app = start(retry_policy={'max_retries': 2, 'interval_max': 0})
    result = app.AsyncResult(str(uuid.uuid4()))
    group = GroupResult('group', [result], app=app)
    for call in (result.forget, group.save, group.delete):
        assert isinstance(error_of(call), ServerUnavailable)


def test_sending_ends(start: Callable[..., Celery]) -> None:
    app = start()
    for call in (lambda: app.send_task('add'), app.AsyncResult('id').revoke, app.control.ping):
        assert isinstance(error_of(call), OperationalError)
