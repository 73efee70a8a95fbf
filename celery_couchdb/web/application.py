"""The ASGI application: its routes, who may use them, errors, and headers that keep browsers safe."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kombu_couchdb.errors import AccessDenied, CouchDBError, ServerUnavailable
from kombu_couchdb.log import get_logger

from .accounts import Accounts, LoginRefused, who_runs_this
from .actions import check_token, perform
from .live import Watch
from .pages import PAGES
from .rendering import environment
from .sessions import COOKIE, Session, Sessions
from .view import Form, Page, View, json_response, link, redirect, wants_json

logger = get_logger(__name__)

STATIC = Path(__file__).parent / 'static'

#: The maximum size of a form in bytes, and the maximum number of its fields.
_MAX_FORM_BYTES, _MAX_FIELDS = 2_000_000, 10_000

#: How often a stream of events says that it is alive, in seconds.
_HEARTBEAT_SECONDS = 15.0

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


class Site:
    """What all requests share: the app, the settings, the accounts and the sessions."""

    def __init__(
        self, app: Any, *, read_only: bool, mask_args: bool, login: bool, trust_header: str | None, reader_role: str
    ) -> None:
        self.app, self.read_only, self.mask_args = app, read_only, mask_args
        self.login, self.trust_header = login, trust_header
        self.accounts, self.sessions = Accounts(app, reader_role), Sessions()
        self.pages = PAGES
        #: By name of a static file, a text that changes with its content.
        self.versions = {
            str(path.relative_to(STATIC)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for path in STATIC.rglob('*.*')
        }
        self.templates = environment()

    @property
    def has_login(self) -> bool:
        """Whether users log in here."""
        return self.login

    def session_of(self, request: Request) -> tuple[Session | None, str | None]:
        """Return the session of a request, and the secret of a new one, for a cookie; None without one.

        *Raises* `HTTPException` with status 403 for requests that nobody may send, and 401 for wrong passwords.
        """
        if self.login:
            given = request.headers.get('authorization', '')
            if given.lower().startswith('basic '):
                return self._program(given), None
            return self._known(request), None
        name = self._trusted_name(request)
        known = self._known(request)
        if known and known.name == name:
            return known, None
        session = Session(self.accounts.own, name)
        return session, None if wants_json(request) else self.sessions.begin(session)

    def _known(self, request: Request) -> Session | None:
        return self.sessions.find(request.cookies.get(COOKIE, ''))

    def _program(self, given: str) -> Session:
        if known := self.sessions.find(given):
            return known
        try:
            user, _, password = base64.b64decode(given[6:], validate=True).decode().partition(':')
            account = self.accounts.log_in(user, password)
        except ValueError:
            raise HTTPException(400, 'The header Authorization cannot be read.') from None
        except LoginRefused as exc:
            raise HTTPException(401, str(exc)) from None
        session = Session(account, user, is_program=True)
        self.sessions.begin(session, given)
        return session

    def _trusted_name(self, request: Request) -> str:
        """Return who sends a request to a page without a login."""
        if self.trust_header:
            if not (name := request.headers.get(self.trust_header, '').strip()):
                raise HTTPException(403, f'The request has no header {self.trust_header}: use the proxy.')
            return name
        if not _is_this_machine(request.url.hostname or ''):
            # The name of another site can lead its visitors' browsers to this machine.
            raise HTTPException(403, 'Without a login, this page is only for 127.0.0.1, ::1 and localhost.')
        return who_runs_this()


def application(site: Site) -> Starlette:
    """Return the ASGI application of a site."""
    routes = [
        Route('/', _answering(site, lambda view: view.redirect(PAGES[0].path))),
        Route('/login', _login(site), methods=['GET', 'POST']),
        Route('/logout', _answering(site, _log_out), methods=['POST']),
        Route('/events', _events(site)),
        Route('/status', _answering(site, lambda view: view.json(view.snapshot().status))),
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
        form = await _form(request)

        def respond() -> Response:
            session, secret = site.session_of(request)
            if session is None:
                return _must_log_in(request)
            request.state.session = session
            response = answer(View(site, request, session, form, page))
            if secret:
                _set_cookie(request, response, secret)
            return response

        return await run_in_threadpool(respond)

    return endpoint


def _must_log_in(request: Request) -> Response:
    if wants_json(request) or request.url.path.endswith('/metrics'):
        return _unauthorized('Log in with the name and password of a CouchDB user (HTTP Basic).')
    path = _own_path(request) if request.method == 'GET' else '/'
    target = link(request, '/login', next=path if path != '/' else None)
    if 'hx-request' in request.headers:
        return Response(status_code=204, headers={'HX-Redirect': target})
    return Response(status_code=303, headers={'Location': target})


def _unauthorized(text: str) -> Response:
    response = json_response({'error': text}, 401)
    response.headers['WWW-Authenticate'] = 'Basic realm="celery couchdb web", charset="UTF-8"'
    return response


def _own_path(request: Request) -> str:
    """Return the path of a request within this application, with its query."""
    path = request.url.path.removeprefix(request.scope.get('root_path', '')) or '/'
    return path + (f'?{request.url.query}' if request.url.query else '')


async def _form(request: Request) -> Form:
    """Return the fields of a form; no fields for a request without one."""
    if request.method != 'POST':
        return Form()
    body = b''
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MAX_FORM_BYTES:
                raise HTTPException(413, 'The form is too large.')
    except ClientDisconnect:
        raise HTTPException(400, 'The form was cut off.') from None
    try:
        fields = parse_qsl(body.decode('utf-8', 'replace'), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise HTTPException(413, 'The form has too many fields.') from None
    return Form(fields)


def _set_cookie(request: Request, response: Response, secret: str, seconds: int | None = None) -> None:
    response.set_cookie(
        COOKIE,
        secret,
        max_age=seconds,
        path=request.scope.get('root_path', '') or '/',
        secure=request.url.scheme == 'https',
        httponly=True,
        samesite='strict',
    )


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip('[]')).is_loopback
    except ValueError:
        return host == 'localhost'


# -- login


def _login(site: Site) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        if not site.login:
            return redirect(request, '/')
        form = await _form(request)
        if request.method == 'GET':
            return _login_form(site, request)
        return await run_in_threadpool(_log_in, site, request, form)

    return endpoint


def _log_in(site: Site, request: Request, form: Form) -> Response:
    user = form.get('user', '').strip()
    # The form of a login has no token yet, so that another site could send it; browsers say where a form is from.
    if request.headers.get('sec-fetch-site', 'same-origin') not in ('same-origin', 'none'):
        return _login_form(site, request, user, 'This form is from another site.', 403)
    try:
        account = site.accounts.log_in(user, form.get('password', ''))
    except LoginRefused as exc:
        return _login_form(site, request, user, str(exc), 403)
    except CouchDBError as exc:
        return _login_form(site, request, user, f'{exc}.', 503)
    secret = site.sessions.begin(Session(account, user))
    response = Response(status_code=303, headers={'Location': link(request, '/')})
    if (target := form.get('next', '')) and _is_own(target):
        path, _, query = target.partition('?')
        response.headers['Location'] = link(request, path, **dict(parse_qsl(query)))
    _set_cookie(request, response, secret)
    return response


def _is_own(path: str) -> bool:
    """Tell whether a path leads to this application, and not, as `//host` does, to another one."""
    return path.startswith('/') and not path.startswith(('//', '/\\')) and path.isprintable() and '\\' not in path


def _login_form(site: Site, request: Request, user: str = '', problem: str = '', status: int = 200) -> Response:
    view = View(site, request, Session(site.accounts.own, ''), Form())
    return view.render('login.html', status, user=user, problem=problem, target=view.param('next'))


def _log_out(view: View) -> Response:
    check_token(view)
    view.site.sessions.end(view.session)
    response = view.redirect('/')
    _set_cookie(view.request, response, '', 0)
    return response


# -- events, metrics, health


def _events(site: Site) -> Callable[[Request], Any]:
    """Return the endpoint of the stream of events: `change`, `problem` with a banner or nothing, and `end`."""

    async def endpoint(request: Request) -> Response:
        session, _ = await run_in_threadpool(site.session_of, request)
        headers = {'Cache-Control': 'no-store', 'X-Accel-Buffering': 'no'}
        stream = _stream(site, session) if session else _ended()
        return StreamingResponse(stream, media_type='text/event-stream', headers=headers)

    return endpoint


async def _ended() -> AsyncIterator[str]:
    yield 'event: end\ndata:\n\n'


async def _stream(site: Site, session: Session) -> AsyncIterator[str]:
    live, watch, told = session.account.live, Watch(), False
    live.watch(watch)
    try:
        with session.open_page():
            yield 'retry: 2000\n\n'
            while not session.is_over:
                if bool(live.problem) is not told:
                    told = not told
                    yield f'event: problem\ndata: {_banner(site, session)}\n\n'
                if await watch.wait(_HEARTBEAT_SECONDS):
                    if live.problem is None:
                        yield 'event: change\ndata:\n\n'
                else:
                    yield ': alive\n\n'
            yield 'event: end\ndata:\n\n'
    finally:
        live.leave(watch)


def _banner(site: Site, session: Session) -> str:
    live = session.account.live
    text = site.templates.get_template('banner.html').render(problem=live.problem, url=live.server)
    return ' '.join(text.split())


def _metrics(view: View) -> Response:
    from prometheus_client import generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    from ..cli.metrics import Exporter, Scrape

    def read() -> Scrape:
        found = view.snapshot()
        return Scrape(found.status, found.seconds)

    exporter = Exporter(read, (), timeout=8.0, keep=0.0)
    return Response(generate_latest(exporter.registry), media_type=CONTENT_TYPE_LATEST)


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
            return _unauthorized(exc.detail)
        texts = {404: 'There is no such page.', 405: 'This page does not take such a request.'}
        return _error(site, request, exc.status_code, texts.get(exc.status_code, exc.detail))

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


_TITLES = {403: 'Not allowed', 404: 'Not found', 500: 'An error', 503: 'CouchDB does not respond'}


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
