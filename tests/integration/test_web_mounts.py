"""The page below a path: in FastAPI, Starlette and Django, and behind a proxy that keeps or removes the prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.testing import Server
from celery_couchdb.web import create_app
from celery_couchdb.web.cli import Prefixed
from kombu_couchdb.admin.queues import paused
from kombu_couchdb.couchdb.client import Client
from tests.support import publish, run_python
from tests.web import Browser, served


def in_fastapi(page: Any) -> Any:
    fastapi = pytest.importorskip('fastapi')
    parent = fastapi.FastAPI()
    parent.get('/')(lambda: 'the shop')
    parent.mount('/celery', page)
    return parent


def in_starlette(page: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    return Starlette(routes=[Route('/', lambda request: PlainTextResponse('the shop')), Mount('/celery', page)])


def in_django(page: Any) -> Any:
    """As in examples/django/shop/asgi.py."""
    pytest.importorskip('django')
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from starlette.routing import Mount, Router

    if not settings.configured:
        settings.configure(ROOT_URLCONF='tests.django_urls', ALLOWED_HOSTS=['127.0.0.1'], SECRET_KEY='none')
    return Router([Mount('/celery', page)], default=get_asgi_application())


def behind_a_proxy(*, keeps_prefix: bool) -> Callable[[Any], Any]:
    """Return what `--url-prefix` serves, behind a proxy."""

    def wrap(page: Any) -> Any:
        prefixed = Prefixed(page, '/celery')

        async def proxy(scope: Any, receive: Any, send: Any) -> None:
            path = scope.get('path', '')
            if scope['type'] == 'http' and not path.startswith('/celery'):
                await send({'type': 'http.response.start', 'status': 200, 'headers': []})
                await send({'type': 'http.response.body', 'body': b'the shop'})
                return
            if scope['type'] == 'http' and not keeps_prefix:
                path = path.removeprefix('/celery') or '/'
                scope = {**scope, 'path': path, 'raw_path': path.encode()}
            await prefixed(scope, receive, send)

        return proxy

    return wrap


MOUNTS = {
    'fastapi': in_fastapi,
    'starlette': in_starlette,
    'django': in_django,
    'prefix kept': behind_a_proxy(keeps_prefix=True),
    'prefix removed': behind_a_proxy(keeps_prefix=False),
}


@pytest.fixture(params=MOUNTS)
def browser(request: pytest.FixtureRequest, app: Celery) -> Iterator[Browser]:
    """A browser that is not logged in, at a page below /celery."""
    lifespan = 'off' if 'prefix' in request.param else 'on'  # as `celery couchdb web` serves it, and as servers do
    with served(MOUNTS[request.param](create_app(app)), lifespan=lifespan) as url:
        yield Browser(f'{url}/celery')


def test_page_stays_below_its_path(browser: Browser, server: Server, connection: Connection, client: Client) -> None:
    publish(connection, 'job', 'mails')
    assert browser.get('').url == f'{browser.url}/login'
    assert browser.log_in(server.user, server.password).url == f'{browser.url}/queues'
    [cookie] = list[Any](browser.session.cookies)
    assert (cookie.path, cookie.secure) == ('/celery', False)
    assert 'mails' in browser.text

    addresses = re.findall(r'(?:href|src|action|hx-get|sse-connect)="([^"#]+)"', browser.page.text)
    assert addresses
    assert [address for address in addresses if not re.match('/celery(/|$)', address)] == []
    for address in addresses:
        if '/static/' in address:
            found = browser.get(address.removeprefix('/celery'))
            assert found.status_code == 200
            assert 'immutable' in found.headers['Cache-Control']

    with browser.events() as events:
        assert next(events) == 'change'
        browser.get('/queues')
        shown = browser.post('/queues', select='mails', action='pause', confirmed='1', reason='a try')
        assert shown.url == f'{browser.url}/queues'
        assert paused(client)['mails']['reason'] == 'a try'
        assert 'a try' in browser.text
        publish(connection, 'another job', 'mails')
        assert next(events) == 'change'

    assert browser.post('/logout').url == f'{browser.url}/login'
    assert browser.session.cookies.get_dict() == {}
    assert 'the shop' in browser.session.get(browser.url.removesuffix('celery')).text


def test_page_needs_no_uvicorn(server: Server) -> None:
    url = server.couchdb_url('any')
    run_python(
        "import sys; sys.modules['uvicorn'] = None; from celery import Celery; "
        f'from celery_couchdb.web import create_app; create_app(Celery(broker={url!r}, backend={url!r}))'
    )
