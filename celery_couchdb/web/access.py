"""Access to the page: the session of each request, with or without a login, and the login itself."""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kombu_couchdb.errors import CouchDBError

from ..audit import who_runs_this
from .accounts import LoginRefused
from .actions import check_token
from .sessions import Session
from .site import Site
from .view import Form, View, redirect, wants_json

#: The maximum size of a form in bytes, and the maximum number of its fields.
_MAX_FORM_BYTES, _MAX_FIELDS = 2_000_000, 10_000

#: The names of headers that proxies add.
_FORWARDED = re.compile('x-forwarded-.+|x-real-ip|forwarded|via')


def session_of(site: Site, request: Request) -> tuple[Session | None, str | None]:
    """Return the session of a request, and the secret of a new one, for a cookie; None without one.

    *Raises* `HTTPException` with status 403 for requests that nobody may send, and 401 for wrong passwords or tokens.
    """
    known = _known(site, request.cookies.get(_cookie(request), ''))
    if site.login:
        given = request.headers.get('authorization', '')
        is_ours = given.lower().startswith('bearer ' if site.accounts.by_token else 'basic ')
        return known or (_program(site, given) if is_ours and _is_program(request) else None), None
    name = _trusted_name(site, request)
    if known and known.name == name:
        return known, None
    session = Session(site.accounts.own, name)
    return session, None if wants_json(request) else site.sessions.begin(session)


def _known(site: Site, secret: str) -> Session | None:
    """Return the session of this secret, whose user has the roles that CouchDB tells now; None if there is none."""
    session = site.sessions.find(secret)
    if session:
        site.accounts.read_roles(session.account)
    return session if session and not session.is_over else None


def wants_password(request: Request) -> bool:
    """Tell whether somebody who has not logged in is asked for a password with each request, and not by the form."""
    return wants_json(request) or request.url.path.endswith('/metrics')


def _is_program(request: Request) -> bool:
    """Tell whether the header `Authorization` of a request is for this page.

    A browser has one for a proxy before the page that asks for a password itself. It is none of CouchDB's, and would
    count as a wrong one.
    """
    is_browser = 'text/html' in request.headers.get('accept', '') or _cookie(request) in request.cookies
    return wants_password(request) or not is_browser


def _program(site: Site, given: str) -> Session:
    if known := _known(site, given):
        return known
    try:
        if site.accounts.by_token:
            user, password = '', given.partition(' ')[2]
        else:
            user, _, password = base64.b64decode(given[6:], validate=True).decode().partition(':')
        account = site.accounts.log_in(user, password)
    except ValueError:
        raise HTTPException(400, 'The header Authorization cannot be read.') from None
    except LoginRefused as exc:
        raise HTTPException(401, str(exc)) from None
    session = Session(account, account.user or user, is_program=True)
    site.sessions.begin(session, given)
    return session


def _trusted_name(site: Site, request: Request) -> str:
    """Return who sends a request to a page without a login."""
    if site.trust_header:
        names = request.headers.getlist(site.trust_header)
        if len(names) != 1 or not names[0].strip():  # of two, one may be from the browser
            raise HTTPException(403, f'The request needs the header {site.trust_header}, once: use the proxy.')
        return names[0].strip()
    client = request.client.host if request.client else ''
    is_forwarded = any(map(_FORWARDED.fullmatch, request.headers))
    # The name of another site can lead its visitors' browsers to this machine; other machines can send any name.
    if is_forwarded or not (_is_this_machine(client) and _is_this_machine(request.url.hostname or '')):
        raise HTTPException(
            403,
            'Without a login, this page is only for 127.0.0.1, ::1 and localhost, without a proxy: let users log in.',
        )
    return who_runs_this()


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip('[]')).is_loopback
    except ValueError:
        return host == 'localhost'


# -- requests


async def form_of(request: Request) -> Form:
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


def set_cookie(request: Request, response: Response, secret: str, seconds: int | None = None) -> None:
    response.set_cookie(
        _cookie(request),
        secret,
        max_age=seconds,
        path=request.scope.get('root_path', '') or '/',
        secure=request.url.scheme == 'https',
        httponly=True,
        samesite='strict',
    )


def _cookie(request: Request) -> str:
    """Return the name of the cookie. It has port and path: browsers send a cookie to all ports, and to paths below."""
    host, root = request.headers.get('host', ''), request.scope.get('root_path', '')
    return f'celery_couchdb_{quote(host + root, safe="")}'


# -- login


def login(site: Site) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        if not site.login:
            return redirect(request, '/')
        form = await form_of(request)
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
    secret = site.sessions.begin(Session(account, account.user or user))
    path, _, query = form.get('next', '').partition('?')
    response = redirect(request, path, **parse_qs(query))
    set_cookie(request, response, secret)
    return response


def _login_form(site: Site, request: Request, user: str = '', problem: str = '', status: int = 200) -> Response:
    view = View(site, request, Session(site.accounts.own, ''), Form())
    return view.render('login.html', status, user=user, problem=problem, target=view.param('next'))


def log_out(view: View) -> Response:
    check_token(view)
    view.site.sessions.end(view.session)
    response = view.redirect('/')
    set_cookie(view.request, response, '', 0)
    return response
