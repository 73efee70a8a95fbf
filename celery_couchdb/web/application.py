"""The ASGI application: its routes, who may use them, errors, and headers that keep browsers safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kombu_couchdb.errors import AccessDenied, CouchDBError, ServerUnavailable
from kombu_couchdb.log import get_logger

from ..rooms import rooms
from .access import form_of, log_out, login, session_of, set_cookie, wants_password
from .actions import perform
from .events import events
from .sessions import Session
from .site import STATIC, Site
from .view import Form, Page, View, json_response, link, own_path, wants_json

logger = get_logger(__name__)

#: The headers of every response. Scripts, styles and pictures come from this application alone, and none is inline.
_HEADERS = {
    'Content-Security-Policy': "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    'X-Content-Type-Options': 'nosniff',
    'X-Frame-Options': 'DENY',
    'Referrer-Policy': 'same-origin',
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Resource-Policy': 'same-origin',
}


def application(site: Site) -> Starlette:
    """Return the ASGI application of a site."""
    routes = [
        Route('/', _answering(site, _first)),
        Route('/login', login(site), methods=['GET', 'POST']),
        Route('/logout', _answering(site, log_out), methods=['POST']),
        Route('/events', events(site)),
        Route('/status', _answering(site, lambda view: view.json(view.account.live.snapshot(fully=True).status))),
        Route('/metrics', _answering(site, _metrics)),
        Route('/health', _health(site)),
        Mount('/static', StaticFiles(directory=STATIC)),
        *(Route(page.path, _page(site, page), methods=['GET', 'POST']) for page in site.pages),
    ]
    errors: Mapping[Any, Any] = {
        HTTPException: _on_http_error(site),
        CouchDBError: _on_couchdb_error(site),
        Exception: _on_error(site),
    }
    found = Starlette(routes=routes, exception_handlers=errors, middleware=[Middleware(_SafeHeaders)])
    found.router.redirect_slashes = False  # it would build an address from the header Host
    return found


# -- requests

Answer = Callable[[View], Response]


def _page(site: Site, page: Page) -> Callable[[Request], Any]:
    def answer(view: View) -> Response:
        return perform(view, page) if view.request.method == 'POST' else page.show(view)

    return _answering(site, answer, page)


def _answering(site: Site, answer: Answer, page: Page | None = None) -> Callable[[Request], Any]:
    """Return an endpoint that calls `answer` for requests with a session, in a thread of the pool."""

    async def endpoint(request: Request) -> Response:
        form = await form_of(request)

        def respond() -> Response:
            session, secret = session_of(site, request)
            if session is None:
                return _must_log_in(site, request)
            request.state.session = session
            response = answer(View(site, request, session, form, page))
            if secret:
                set_cookie(request, response, secret)
            return response

        return await run_in_threadpool(respond)

    return endpoint


def _must_log_in(site: Site, request: Request) -> Response:
    if wants_password(request):
        how = f'the {site.accounts.secret} of a CouchDB user (Bearer)'
        if not site.accounts.by_token:
            how = 'the name and password of a CouchDB user (HTTP Basic)'
        return _unauthorized(site, f'Log in with {how}.')
    path = own_path(request) + (f'?{request.url.query}' if request.url.query else '')
    target = link(request, '/login', next=path if request.method == 'GET' and path != '/' else None)
    if 'hx-request' in request.headers:
        return Response(status_code=204, headers={'HX-Redirect': target})
    return Response(status_code=303, headers={'Location': target})


def _unauthorized(site: Site, text: str) -> Response:
    response = json_response({'error': text}, 401)
    scheme = 'Bearer realm="celery couchdb web"'
    if not site.accounts.by_token:
        scheme = 'Basic realm="celery couchdb web", charset="UTF-8"'
    response.headers['WWW-Authenticate'] = scheme
    return response


def _first(view: View) -> Response:
    pages = view.site.pages
    return view.redirect(next((page for page in pages if page.in_menu and page.is_first(view)), pages[0]).path)


# -- metrics, health


def _metrics(view: View) -> Response:
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    found = view.account.live.snapshot(fully=True)
    for room in rooms():
        if (text := room.exposition(found.status, found.seconds)) is not None:
            return Response(text, media_type=CONTENT_TYPE_LATEST)
    raise HTTPException(404)


def _health(site: Site) -> Callable[[Request], Any]:
    """Return the endpoint for probes. It needs no login, and says no more than whether CouchDB responds."""

    def check() -> Response:
        try:
            site.accounts.own.live.ping()
        except CouchDBError:
            return PlainTextResponse('CouchDB does not respond, or refuses the app.\n', 503)
        return PlainTextResponse('The page works, and CouchDB responds.\n')

    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(check)

    return endpoint


# -- errors


def _on_http_error(site: Site) -> Callable[[Request, Exception], Any]:
    async def handler(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        if exc.status_code == 401:
            return _unauthorized(site, exc.detail)
        is_known = exc.detail != HTTPStatus(exc.status_code).phrase
        text = exc.detail if is_known else _TEXTS.get(exc.status_code, exc.detail)
        return _error(site, request, exc.status_code, text)

    return handler


def _on_couchdb_error(site: Site) -> Callable[[Request, Exception], Any]:
    async def handler(request: Request, exc: Exception) -> Response:
        status = 503 if isinstance(exc, ServerUnavailable) else 403 if isinstance(exc, AccessDenied) else 502
        return _error(site, request, status, f'{exc}.')

    return handler


def _on_error(site: Site) -> Callable[[Request, Exception], Any]:
    async def handler(request: Request, exc: Exception) -> Response:
        logger.error('an error in the page %s', request.url.path, exc_info=exc)
        response = _error(site, request, 500, 'This page has an error; the log of its process says more.')
        response.headers.update({**_HEADERS, 'Cache-Control': 'no-store'})  # this one is made outside of `_SafeHeaders`
        return response

    return handler


_TEXTS = {404: 'There is no such page.', 405: 'This page does not take such a request.'}
_TITLES = {403: 'Not allowed', 404: 'Not found', 500: 'An error', 503: 'CouchDB cannot be read'}


def _error(site: Site, request: Request, status: int, text: str) -> Response:
    if wants_json(request):
        return json_response({'error': text}, status)
    session = getattr(request.state, 'session', None)
    view = View(site, request, session or Session(site.accounts.own, ''), Form())
    title = _TITLES.get(status, 'Not possible')
    return view.render('error.html', status, title=title, text=text, has_session=session is not None)


# -- headers


class _SafeHeaders:
    """Adds the headers that keep browsers safe to every response; pages are not kept in caches."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] != 'http':
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message['type'] == 'http.response.start':
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                is_static = '/static/' in scope['path'] and b'v=' in scope['query_string'] and message['status'] == 200
                headers['Cache-Control'] = 'public, max-age=31536000, immutable' if is_static else 'no-store'
            await send(message)

        await self._app(scope, receive, send_with_headers)
