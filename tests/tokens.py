"""JSON Web Tokens, a server that gives them for API keys and to programs, and a gateway that accepts no others."""

from __future__ import annotations

import hmac
import json
import threading
import time
import uuid
from base64 import b64decode, b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import requests

from celery_couchdb.testing import Server
from tests.conftest import PATIENCE

#: The key that signs tokens.
KEY = b'a key of tests, which signs tokens'

Sign = Callable[[bytes], bytes]


def _encoded(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b'=').decode()


def _decoded(text: str) -> bytes:
    return urlsafe_b64decode(text + '=' * (-len(text) % 4))


def hs256(key: bytes) -> Sign:
    return lambda text: hmac.digest(key, text, 'sha256')


def token(user: str = 'bob', seconds: float = 3600, sign: Sign | None = None, header: Any = (), **claims: Any) -> str:
    """Return a token of a user that is valid for `seconds`, unlike any other one; None in `claims` removes a claim."""
    claims = {'sub': user, 'exp': int(time.time() + seconds), 'jti': uuid.uuid4().hex, **claims}
    claims = {name: value for name, value in claims.items() if value is not None}
    parts = {'alg': 'HS256', 'typ': 'JWT', **dict(header)}, claims
    text = '.'.join(_encoded(json.dumps(part).encode()) for part in parts)
    return f'{text}.{_encoded((sign or hs256(KEY))(text.encode()))}'


def problem_of(given: str) -> str | None:
    """Return why a token is not accepted, in CouchDB's words; None if it is."""
    try:
        text, _, signature = given.rpartition('.')
        claims = json.loads(_decoded(text.partition('.')[2]))
        if not hmac.compare_digest(_decoded(signature), hs256(KEY)(text.encode())):
            return 'Bad HMAC'
        return None if claims['exp'] > time.time() else 'exp not in future'
    except (ValueError, KeyError, TypeError):
        return 'Malformed token'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get('Content-Length') or 0))

    def respond(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {'Content-Length': str(len(data)), **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    handler: type[_Handler]

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), self.handler)
        self.url = f'http://127.0.0.1:{self.server_port}'

    def handle_error(self, *args: Any) -> None:
        """Say nothing of clients that close their connections."""


@contextmanager
def running(server: Any) -> Iterator[Any]:
    """Serve in a thread meanwhile."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# -- a server of tokens


class _Grants(_Handler):
    server: TokenServer

    def do_POST(self) -> None:
        """Exchange an API key (IBM's grant), or id and secret of a program (OAuth 2), for a token."""
        server = self.server
        form = {name: values[0] for name, values in parse_qs(self.body().decode()).items()}
        server.requests.append(form)
        if server.answer:
            self.respond(*server.answer)
        elif self._secret(form) in server.keys:
            self.respond(200, {'access_token': server.token(), 'expires_in': server.seconds, 'token_type': 'Bearer'})
        else:
            reason = f'Provided API key {form.get("apikey")} could not be found.'
            self.respond(400, {'errorCode': 'BXNIM0415E', 'errorMessage': reason})

    def _secret(self, form: dict[str, str]) -> str | None:
        if form.get('grant_type') == 'urn:ibm:params:oauth:grant-type:apikey':
            return form.get('apikey')
        given = b64decode(self.headers.get('Authorization', '').removeprefix('Basic ')).decode().partition(':')[2]
        return given if form.get('grant_type') == 'client_credentials' else None


class TokenServer(_Server):
    """Gives tokens for API keys, and for the secrets of programs."""

    handler = _Grants

    def __init__(self, *keys: str, seconds: float = 3600.0, user: str = 'bob') -> None:
        super().__init__()
        self.keys, self.seconds, self.user = {*keys}, seconds, user
        #: The forms that were sent, in order.
        self.requests: list[dict[str, str]] = []
        #: The tokens that were given, in order.
        self.given: list[str] = []
        #: The status and body of all responses, instead of tokens.
        self.answer: tuple[int, Any] | None = None

    def token(self) -> str:
        self.given.append(token(self.user, self.seconds))
        return self.given[-1]


# -- a gateway


class _Forward(_Handler):
    server: Gateway

    def do_GET(self) -> None:
        """Pass a request on as the administrator, if its token is accepted."""
        gateway, data = self.server, self.body()
        given = self.headers.get('Authorization', '').removeprefix('Bearer ')
        problem = 'revoked' if given in gateway.revoked else problem_of(given)
        gateway.seen.append(given)
        if problem:
            gateway.refused.append(problem)
            self.respond(401, b'no', WWW_Authenticate=f'Bearer error="invalid_token", error_description="{problem}"')
            return
        names = {'authorization', 'host', 'content-length', 'connection', 'accept-encoding'}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in names}
        headers |= {'Authorization': gateway.authorization, 'Accept-Encoding': 'identity'}
        with requests.request(
            self.command, gateway.target + self.path, data=data, headers=headers, stream=True, timeout=PATIENCE
        ) as response:
            self.send_response(response.status_code)
            for name in ('Content-Type', 'Date', 'ETag'):
                if name in response.headers:
                    self.send_header(name, response.headers[name])
            self.send_header('Transfer-Encoding', 'chunked')
            self.end_headers()
            for part in response.raw.stream(65_536, decode_content=False):
                self.wfile.write(b'%x\r\n%s\r\n' % (len(part), part))
            self.wfile.write(b'0\r\n\r\n')

    do_PUT = do_POST = do_DELETE = do_GET


class Gateway(_Server):
    """Accepts tokens that `KEY` has signed, and passes the requests on to a CouchDB as its administrator."""

    handler = _Forward

    def __init__(self, couchdb: Server) -> None:
        super().__init__()
        self.target = f'http://{couchdb.host}:{couchdb.port}'
        pair = f'{couchdb.user}:{couchdb.password}'.encode()
        self.authorization = f'Basic {b64encode(pair).decode()}'
        #: The tokens of all requests, and why it refused some.
        self.seen, self.refused = list[str](), list[str]()
        self.revoked = set[str]()

    def couchdb_url(self, database: str, secret: str = '', auth: str = '') -> str:
        """Return the URL of a database behind the gateway."""
        login, query = f':{secret}@' if secret else '', f'?login_method={auth}' if auth else ''
        return f'couchdb://{login}127.0.0.1:{self.server_port}/{database}{query}'
