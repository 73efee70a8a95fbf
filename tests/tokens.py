"""JSON Web Tokens, a server that gives them for API keys and to programs, and a gateway that accepts no others."""

from __future__ import annotations

import hmac
import json
import threading
import time
import uuid
from base64 import b64decode, b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery_couchdb.testing import Server
from examples.managed.proxy import Proxy, Request, Response

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


# -- a server of tokens


class _Grants(BaseHTTPRequestHandler):
    server: TokenServer

    def do_POST(self) -> None:
        """Exchange an API key (IBM's grant), or id and secret of a program (OAuth 2), for a token."""
        server, body = self.server, self.rfile.read(int(self.headers['Content-Length']))
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        server.requests.append(form)
        reason = f'Provided API key {form.get("apikey")} could not be found.'
        answer: Any
        status, answer = 400, {'errorCode': 'BXNIM0415E', 'errorMessage': reason}
        if server.answer:
            status, answer = server.answer
        elif self._secret(form) in server.keys:
            status, answer = 200, {'access_token': server.token(), 'expires_in': server.seconds}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def _secret(self, form: dict[str, str]) -> str | None:
        if form.get('grant_type') == 'urn:ibm:params:oauth:grant-type:apikey':
            return form.get('apikey')
        given = b64decode(self.headers.get('Authorization', '').removeprefix('Basic ')).decode().partition(':')[2]
        return given if form.get('grant_type') == 'client_credentials' else None

    def log_message(self, *args: object) -> None:
        pass


class TokenServer(ThreadingHTTPServer):
    """Gives tokens for API keys, and for the secrets of programs; a context manager."""

    daemon_threads = True

    def __init__(self, *keys: str, seconds: float = 3600.0, user: str = 'bob') -> None:
        super().__init__(('127.0.0.1', 0), _Grants)
        self.url = f'http://127.0.0.1:{self.server_port}'
        self.keys, self.seconds, self.user = {*keys}, seconds, user
        #: The forms that were sent, in order.
        self.requests: list[dict[str, str]] = []
        #: The tokens that were given, in order.
        self.given: list[str] = []
        #: The status and body of all responses, instead of tokens.
        self.answer: tuple[int, Any] | None = None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def token(self) -> str:
        """Return a new token."""
        self.given.append(token(self.user, self.seconds))
        return self.given[-1]

    def __exit__(self, *exc_info: Any) -> None:
        self.shutdown()
        super().__exit__(*exc_info)


# -- a gateway


class Gateway(Proxy):
    """Accepts tokens that `KEY` has signed, and passes the requests on to a CouchDB as its administrator."""

    def __init__(self, couchdb: Server) -> None:
        pair = f'{couchdb.user}:{couchdb.password}'.encode()
        super().__init__(urlsplit(couchdb.url), self._check, authorization=f'Basic {b64encode(pair).decode()}')
        #: The tokens of all requests, in order.
        self.seen: list[str] = []
        #: The tokens that are not accepted any more.
        self.revoked: set[str] = set()

    def _check(self, request: Request) -> Response | None:
        given = request.headers.get('Authorization', '').removeprefix('Bearer ')
        self.seen.append(given)
        problem = 'revoked' if given in self.revoked else problem_of(given)
        challenge = f'Bearer error="invalid_token", error_description="{problem}"'
        return Response(401, {}, {'WWW-Authenticate': challenge}) if problem else None

    def __enter__(self) -> Gateway:
        return self

    def couchdb_url(self, database: str, secret: str = '') -> str:
        """Return the URL of a database behind the gateway."""
        return f'couchdb://{f":{secret}@" if secret else ""}127.0.0.1:{self.port}/{database}'
