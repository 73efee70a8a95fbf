"""Data that error trackers record (variables of all frames, and causes) contain no password and no session."""

from __future__ import annotations

import logging
import pickle
import traceback
import types
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from kombu_couchdb.couchdb import bounds, credentials, pacing, server, tokens
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import Call, HTTPOptions
from kombu_couchdb.couchdb.changes import Longpoll
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import Shared
from kombu_couchdb.errors import CouchDBError
from tests.conftest import PATIENCE

from .test_http import DOC, Wire, dripped, endless, head, wires

__all__ = ['wires']

PASSWORD, SESSION = 'unguessable-77', 'c2Vzc2lvbi03Nw'
SECRETS = (PASSWORD, b64encode(f'me:{PASSWORD}'.encode()).decode(), SESSION)

#: The folder with the frames of tests, which do not count.
ROOT = Path(__file__).parents[2]


def recorded(exc: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield names and values: variables of all frames outside of tests, and attributes of errors and causes."""
    seen, chain = set[int](), [exc]
    while chain:
        one = chain.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        chain += [other for other in (one.__cause__, one.__context__) if other is not None]
        yield repr(one), (one.args, vars(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            code = frame.f_code
            if not Path(code.co_filename).is_relative_to(ROOT / 'tests'):
                for name, value in frame.f_locals.items():
                    yield f'{name} in {code.co_qualname if hasattr(code, "co_qualname") else code.co_name}', value


def texts(value: Any, depth: int = 8) -> Iterator[str]:
    """Yield all texts in a value. Objects of these packages count with their repr()."""
    if isinstance(value, bytes | bytearray):
        yield value.decode('latin-1')
    elif isinstance(value, str):
        yield value
    elif isinstance(value, types.ModuleType | type | types.FunctionType) or not depth:
        return
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from texts(pair, depth - 1)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from texts(item, depth - 1)
    else:
        yield repr(value)
        if not type(value).__module__.startswith(('kombu_couchdb', 'celery_couchdb')) and hasattr(value, '__dict__'):
            yield from texts(vars(value), depth - 1)


def revealing(exc: BaseException) -> list[tuple[str, str]]:
    """Return the names of the values that contain a secret."""
    return [
        (where, text) for where, value in recorded(exc) for text in texts(value) if any(one in text for one in SECRETS)
    ]


BEGUN = head(200, f'Set-Cookie: AuthSession={SESSION}; Max-Age=600', 'Content-Length: 2') + b'{}'
PROLONGED = f'Set-Cookie: AuthSession={SESSION}longer; Max-Age=600'


def told(status: int, reason: str = 'x', *lines: str) -> bytes:
    text = b'{"error":"x","reason":"%s"}' % reason.encode()
    return head(status, f'Content-Length: {len(text)}', *lines) + text


WRONG, LOCKED = (
    'Name or password is incorrect.',
    'Account is temporarily locked due to multiple authentication failures',
)

#: The responses of the server, by kind of error.
ANSWERS: dict[str, Any] = {
    **{str(status): told(status, 'x', PROLONGED) for status in (302, 400, 404, 409, 413, 429, 503)},
    '401': told(401),
    '403': told(403),
    'wrong': told(401, WRONG),
    'wrong token': told(400, 'Bad HMAC'),
    'ignored': told(401, 'You are not authorized to access this db.'),
    'locked': told(403, LOCKED),
    'no database': told(404, 'no_db_file', PROLONGED),
    'cut': b'',
    'no HTTP': b'\x15\x03\x01\x00\x02\x02F',
    'cut head': b'HTTP/1.1 200 OK\r\nA: b',
    'cut body': head(200, 'Content-Length: 500', PROLONGED) + DOC[:-3],
    'no JSON': head(200, 'Content-Length: 1', PROLONGED) + b'<',
    'other JSON': head(200, 'Content-Length: 2', PROLONGED) + b'{}',
    'deep JSON': head(200, 'Content-Length: 100000', PROLONGED) + b'[' * 100_000,
    'compressed': head(200, 'Content-Length: 1', PROLONGED, 'Content-Encoding: gzip') + b'x',
    'slow head': dripped(b'HTTP/1.1 200 OK\r\nA: ', 1000),
    'slow body': dripped(head(200, 'Content-Length: 1000', PROLONGED), 1000),
    'too large': endless(head(200, PROLONGED), b' ' * 1000),
}

CALLS: dict[str, Callable[[Client], Any]] = {
    'get': lambda client: client.get('x'),
    'bulk': lambda client: client.bulk([{'_id': 'x', 'text': 'y' * 100_000}]),
    'longpoll': lambda client: Longpoll(client).wait(0, 0, {}),
}


def failure(call: Callable[[], Any]) -> CouchDBError:
    with pytest.raises(CouchDBError) as caught:
        call()
    return caught.value


def check(exc: CouchDBError) -> None:
    assert revealing(exc) == []
    assert not any(secret in repr(pickle.loads(pickle.dumps(exc))) + str(pickle.dumps(exc)) for secret in SECRETS)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, '_servers', Shared({}))
    monkeypatch.setattr(bounds, 'MAX_RESPONSE_BYTES', 1_000_000)
    monkeypatch.setattr(pacing, '_MAX_WAIT_SECONDS', 0.1)


def client_of(port: int, auth: str = 'basic', **more: Any) -> Client:
    return Client(
        Address(host='127.0.0.1', port=port, user='me', password=PASSWORD, auth=auth, **more),
        HTTPOptions(PATIENCE, PATIENCE),
    )


@pytest.mark.parametrize('auth', ['basic', 'cookie', 'jwt', 'proxy'])
@pytest.mark.parametrize('call', CALLS)
def test_error_responses(wires: Callable[[], Wire], call: str, auth: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for kind, answer in ANSWERS.items():
        if kind.startswith('slow') and call == 'longpoll':
            continue  # a longpoll may be silent for a long time
        wire = wires()
        client = client_of(wire.server_address[1], auth)
        wire.answer = BEGUN
        with suppress(CouchDBError):
            client.get('x')  # begins a session
        wire.answer = answer
        limit(client, kind)
        try:
            CALLS[call](client)
        except CouchDBError as exc:
            check(exc)
        else:  # errors of single documents are part of the response
            assert (call, kind) in [('bulk', status) for status in ('400', '409', '413', 'wrong token')]
        client.close()
    assert not any(secret in caplog.text for secret in SECRETS)


def limit(client: Client, answer: str) -> None:
    """Set a short time limit for slow responses."""
    client.options = HTTPOptions(0.3, 0.3) if answer.startswith('slow') else client.options


def test_session_that_cannot_be_opened(wires: Callable[[], Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, answer in ANSWERS.items():
        monkeypatch.setattr(server, '_servers', Shared({}))
        wire = wires()
        wire.answer = answer
        client = client_of(wire.server_address[1], 'cookie')
        limit(client, kind)
        check(failure(lambda client=client: client.get('x')))  # type: ignore[misc]
        client.close()


def test_api_key_that_cannot_be_exchanged(wires: Callable[[], Wire], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, 'Call', partial(Call, timeouts=(0.3, 0.3)))
    for answer in (*ANSWERS.values(), told(400, f'The key {PASSWORD} is unknown.')):
        monkeypatch.setattr(server, '_servers', Shared({}))
        wire = wires()
        wire.answer = answer
        client = client_of(1, 'iam', token_url=f'http://127.0.0.1:{wire.server_address[1]}/token')
        check(failure(lambda client=client: client.get('x')))  # type: ignore[misc]


def test_token_from_a_key_that_is_refused(wires: Callable[[], Wire]) -> None:
    body = b'{"access_token": "%s", "expires_in": 60}' % SESSION.encode()
    exchange = wires()
    exchange.answer = head(200, f'Content-Length: {len(body)}') + body
    for answer in ANSWERS.values():
        wire = wires()
        wire.answer = answer
        url = f'http://127.0.0.1:{exchange.server_address[1]}/token'
        client = client_of(wire.server_address[1], 'iam', token_url=url)
        client.options = HTTPOptions(0.3, 0.3)
        check(failure(lambda client=client: client.get('x')))  # type: ignore[misc]
        client.close()


@pytest.mark.parametrize('auth', ['basic', 'cookie'])
def test_server_that_does_not_respond(auth: str) -> None:
    for tls in (True, False):
        check(failure(lambda tls=tls: client_of(1, auth, tls=tls).get('x')))  # type: ignore[misc]


@pytest.mark.parametrize('auth', ['basic', 'cookie'])
def test_tls_failure(wires: Callable[[], Wire], auth: str) -> None:
    wire = wires()
    wire.answer = head(400)
    client = client_of(wire.server_address[1], auth, tls=True)
    limit(client, 'slow')
    check(failure(lambda: client.get('x')))
    check(failure(lambda: client_of(wire.server_address[1], auth, tls=True, verify='no-such.pem').get('x')))


given: list[Any] = []


def source() -> Any:
    return given[0]


@pytest.mark.parametrize(
    'pair', [('me', PASSWORD, 1), ('me', PASSWORD + '\udcfc'), [PASSWORD], {'me': PASSWORD}, PASSWORD]
)
def test_source_with_an_invalid_return_value(pair: Any) -> None:
    given[:] = [pair]
    check(failure(lambda: Client(Address(port=1, credentials=f'{__name__}:source')).get('x')))


def asking() -> str:
    """Ask a server that does not respond."""
    return requests.get('http://127.0.0.1:1', auth=('me', PASSWORD), timeout=1).text


@pytest.mark.parametrize('auth', ['basic', 'jwt'])
def test_source_that_asks_a_server(auth: str) -> None:
    client = Client(Address(port=1, credentials=f'{__name__}:asking', auth=auth))
    check(failure(lambda: client.get('x')))


def test_environment_without_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('COUCHDB_USER', raising=False)
    monkeypatch.setenv('COUCHDB_PASSWORD', PASSWORD)
    check(failure(credentials.environment))
