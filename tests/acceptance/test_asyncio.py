"""Web applications with many requests that wait for results, through an outage of CouchDB."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from typing import Any

import pytest
from celery import chain, chord, group, uuid
from pytest_celery import CeleryTestWorker

from celery_couchdb import aio
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, wait_for

from .conftest import Site
from .test_examples import Example

httpx = pytest.importorskip('httpx')
pytest.importorskip('uvicorn')


def test_canvas(site: Site) -> None:
    def task(name: str, *args: Any) -> Any:
        return site.app.signature(name, args)

    async def main() -> None:
        one = await aio.delay(task('add', 1), 2)
        results = [
            await aio.group(task('add', number, 1) for number in range(10)),
            await aio.apply_async(chain(task('add', 1, 1), task('add', 10), task('add', 100), app=site.app)),
            await aio.apply_async(chord([task('add', n, 0) for n in range(10)], task('total'), app=site.app)),
            await aio.apply_async(
                chain(task('add', 1, 2), group([task('add', n) for n in range(3)], app=site.app), app=site.app)
            ),
        ]
        assert await aio.get(one, PATIENCE) == 3
        assert [await aio.get(result, PATIENCE) for result in results] == [list(range(1, 11)), 112, 45, [3, 4, 5]]
        failed = await aio.apply_async(chain(task('fail', 'no'), task('add', 1), task('add', 2), app=site.app))
        with pytest.raises(ValueError, match='no'):
            await aio.get(failed, PATIENCE)
        assert failed.parent.parent.state == 'FAILURE'

    site.worker()
    asyncio.run(main())


class Application:
    """An example that uvicorn serves, whose connections to CouchDB lead through the proxy."""

    def __init__(self, site: Site, proxy: Proxy, name: str, application: str, path: str) -> None:
        self.path = path
        example = Example(site, name)
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            self.port = free.getsockname()[1]
        environment = {**example.environment, 'PYTHONPATH': str(example.folder)}
        for variable in ('CELERY_BROKER_URL', 'CELERY_RESULT_BACKEND'):
            environment[variable] = site.through(proxy, environment[variable])
        command = [sys.executable, '-m', 'uvicorn', application, '--port', str(self.port), '--log-level', 'warning']
        self.process: CeleryTestWorker = site.run(command, environment, {})
        wait_for(self.responds, 'the application to start')

    def responds(self) -> bool:
        """Tell whether the application accepts connections."""
        with socket.socket() as connection:
            return connection.connect_ex(('127.0.0.1', self.port)) == 0

    def client(self) -> Any:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # uvicorn closes idle ones
        return httpx.AsyncClient(base_url=f'http://127.0.0.1:{self.port}', timeout=PATIENCE, limits=limits)

    async def wait(self, client: Any, task_id: str, seconds: float) -> str:
        """Return the state of a task after a request that waits for it."""
        answer = await client.get(self.path.format(task_id), params={'wait': seconds})
        return str(answer.json()['state'])


@pytest.mark.parametrize(
    ('name', 'application', 'path'),
    [('fastapi', 'shop:web', '/invoices/{}'), ('django', 'shop.asgi:application', '/tasks/{}/')],
)
@pytest.mark.parametrize(('trouble', 'outage'), [('refuse', 0.0), pytest.param('hang', 30.0, marks=pytest.mark.slow)])
def test_requests_that_wait_during_an_outage(
    site: Site, proxy: Proxy, name: str, application: str, path: str, trouble: str, outage: float
) -> None:
    pytest.importorskip(name)
    site.app.backend.client.create()
    served = Application(site, proxy, name, application, path)
    early, late, missing = ([uuid() for _ in range(40)] for _ in range(3))

    def store(task_ids: list[str]) -> None:
        for task_id in task_ids:
            site.app.backend.mark_as_done(task_id, 1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with served.client() as client:

            def waits(task_ids: list[str], seconds: float) -> list[asyncio.Task[str]]:
                return [asyncio.ensure_future(served.wait(client, task_id, seconds)) for task_id in task_ids]

            first = waits(early, 30)
            patient = waits(late, 30)
            await loop.run_in_executor(None, store, early)
            assert await asyncio.gather(*first) == ['SUCCESS'] * 40

            getattr(proxy, trouble)()
            began = time.monotonic()
            await loop.run_in_executor(None, store, late)
            # All of these end while CouchDB does not respond.
            assert await asyncio.gather(*waits(missing, 2), *waits(missing, 0)) == ['PENDING'] * 80
            if name == 'fastapi':
                orders = (client.post('/invoices', json={'amounts': [1]}) for _ in range(20))
                assert {answer.status_code for answer in await asyncio.gather(*orders)} == {503}
            if outage:
                await asyncio.sleep(max(0.0, outage + 1 - (time.monotonic() - began)))
                await asyncio.gather(*patient)  # whose time is over

            proxy.restore() if trouble == 'refuse' else proxy.go_on()
            assert await asyncio.gather(*waits(late, 30)) == ['SUCCESS'] * 40
            if not outage:
                assert set(await asyncio.gather(*patient)) <= {'SUCCESS', 'PENDING'}
            assert await asyncio.gather(*waits(missing, 0.1)) == ['PENDING'] * 40

    asyncio.run(main())
    log = served.process.logs()
    assert 'never retrieved' not in log
    assert 'Traceback' not in log
