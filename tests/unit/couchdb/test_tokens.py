"""Tokens: renewal before their end, refusals, and the exchange of API keys, without a CouchDB."""

from __future__ import annotations

import logging
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from kombu_couchdb.couchdb import auth as module
from kombu_couchdb.couchdb import tokens
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.auth import Auth
from kombu_couchdb.couchdb.server import Server
from kombu_couchdb.couchdb.tokens import described
from kombu_couchdb.errors import AccessDenied, BrokenAnswer, ConfigurationError, CouchDBError, ServerUnavailable
from tests.conftest import PATIENCE, wait_for
from tests.tokens import TokenServer, token

from .test_auth import decoded, never, respond, shown


class Source:
    """A source of tokens, as `Address.password`: returns `tokens` in turn, the last one repeatedly, or raises them."""

    def __init__(self, *tokens: Any) -> None:
        self.tokens, self.calls = list(tokens), 0
        #: Callers wait while it is not set.
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> str:
        self.calls += 1
        assert self.may_answer.wait(PATIENCE)
        found = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
        if isinstance(found, Exception):
            raise found
        return str(found)


def jwt(password: Any, **more: Any) -> Auth:
    return Auth(Address(password=password, auth='jwt', **more))


def sent(auth: Auth) -> str:
    """Return the token of the next request."""
    return shown(auth.headers(never))['Authorization'].removeprefix('Bearer ')


def refuse(auth: Auth, reason: str, status: int = 401, *, is_last: bool = False) -> bool:
    """Refuse the next request."""
    return auth.renew(auth.headers(never), respond(status, reason), is_last=is_last)


def error_of(auth: Auth, reason: str, status: int = 401, **more: Any) -> CouchDBError:
    with pytest.raises(CouchDBError) as caught:
        refuse(auth, reason, status, **more)
    return caught.value


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are renewed soon after they were received, however long they are valid."""
    monkeypatch.setattr(module, '_RENEWED_SHARE', 0.0)
    monkeypatch.setattr(module, '_MIN_SECONDS', 0.0)


# -- what is sent


@pytest.mark.parametrize('given', [token(), f' {token()}\n', 'opaque', lambda: 'from-a-function'])
def test_token_is_sent_as_it_is(given: Any) -> None:
    text = given() if callable(given) else given
    assert sent(jwt(given)) == text.strip()


def test_user_is_that_of_the_token() -> None:
    assert (jwt(token('ann')).user, jwt(token('ann'), user='bob').user) == ('ann', 'ann')
    assert (jwt('opaque').user, jwt('opaque', user='bob').user) == (None, 'bob')
    assert (jwt('opaque').who, jwt(token('ann')).who) == ('the token', "user 'ann'")


@pytest.mark.parametrize(
    'text', ['', '.', 'a.b.c', 'é.é.é', '..', 'a.W10.c', 'a.' + 'W1tb' * 50_000 + '.c', token('bob', exp='soon', sub=3)]
)
def test_token_without_readable_claims_is_opaque(text: str) -> None:
    found = described(text, None)
    assert (found.user, found.password, found.seconds) == (None, text, None)


def test_impossible_times_are_ignored() -> None:
    assert [described(token(exp=value), None).seconds for value in (10**400, -(10**400), True, 'x')] == [None] * 4


@pytest.mark.parametrize('auth', ['jwt', 'iam', 'proxy'])
def test_missing_secret_is_one_sentence(auth: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^auth='{auth}' needs a.*, in the place of the password: "):
        Auth(Address(auth=auth)).headers(never)


@pytest.mark.parametrize('text', ['two words', 'line\nbreak', 'é', 'half \udcfc'])
def test_token_that_no_header_can_contain(text: str) -> None:
    with pytest.raises(ConfigurationError, match='the token must consist of printable ASCII characters') as caught:
        jwt(lambda: text).headers(never)
    assert text not in ''.join(traceback.format_exception(caught.value))


def test_proxy_sends_user_token_and_roles() -> None:
    auth = Auth(Address(user='bob', password='0abc', auth='proxy', proxy_roles=('a', 'b')))
    assert shown(auth.headers(never)) == {
        'X-Auth-CouchDB-UserName': 'bob',
        'X-Auth-CouchDB-Token': '0abc',
        'X-Auth-CouchDB-Roles': 'a,b',
    }


# -- sources


def returned() -> Any:
    """Return what the test has prepared; the source of the option `credentials`."""
    return _returned[0]


_returned: list[Any] = [None]


@pytest.mark.parametrize('found', ['opaque', ('ann', 'opaque'), ['', 'opaque\n']])
def test_function_returns_a_token_or_a_user_and_a_token(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    _returned[0] = found
    auth = Auth(Address(credentials=f'{__name__}:returned', auth='jwt'))
    assert (sent(auth), auth.user) == ('opaque', 'ann' if 'ann' in found else None)


@pytest.mark.parametrize('found', [None, b'opaque', 3, ('ann',)])
def test_function_that_returns_something_else(found: Any) -> None:
    _returned[0] = found
    with pytest.raises(ConfigurationError, match='must name a function that returns the token as text'):
        Auth(Address(credentials=f'{__name__}:returned', auth='jwt')).headers(never)


def test_environment_needs_no_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ('COUCHDB_USER', 'COUCHDB_PASSWORD', 'COUCHDB_PASSWORD_FILE'):
        monkeypatch.delenv(name, raising=False)
    address = Address(credentials='environment', auth='jwt')
    with pytest.raises(ConfigurationError, match='environment variables COUCHDB_PASSWORD or COUCHDB_PASSWORD_FILE'):
        Auth(address).headers(never)
    monkeypatch.setenv('COUCHDB_PASSWORD', 'from-variable')
    assert sent(Auth(address)) == 'from-variable'
    (tmp_path / 'token').write_text('from-file\n')
    monkeypatch.setenv('COUCHDB_PASSWORD_FILE', str(tmp_path / 'token'))
    assert sent(Auth(address)) == 'from-file'


def test_file(tmp_path: Path) -> None:
    file = tmp_path / 'secret'
    auth = Auth(Address(credentials=f'file:{file}', auth='jwt'))
    with pytest.raises(ServerUnavailable, match=f'the source of the token failed: FileNotFoundError: .*{file}'):
        auth.headers(never)
    file.write_text('from-file\n')
    assert sent(auth) == 'from-file'
    file.write_text('bob:pass:word\n')
    assert decoded(Auth(Address(credentials=f'file:{file}')).headers(never)) == 'bob:pass:word'
    file.write_text('tell-nobody')
    with pytest.raises(ConfigurationError, match='the file must have one line, user:password') as caught:
        Auth(Address(credentials=f'file:{file}')).headers(never)
    assert 'tell-nobody' not in ''.join(traceback.format_exception(caught.value))


# -- renewal before the end


def test_token_is_renewed_after_four_fifths_of_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = token(seconds=1000), token(seconds=1000)
    source = Source(first, second)
    auth = jwt(source)
    began = time.monotonic()
    assert sent(auth) == first
    monkeypatch.setattr(time, 'monotonic', lambda: began + 780)
    assert sent(auth) == first
    monkeypatch.setattr(time, 'monotonic', lambda: began + 805)
    sent(auth)
    monkeypatch.undo()
    wait_for(lambda: sent(auth) == second, 'the next token')
    assert source.calls == 2


def test_requests_use_the_old_token_while_one_thread_asks_for_the_next_one(soon: None) -> None:
    first, second = token(), token()
    source = Source(first, second)
    auth = jwt(source)
    assert sent(auth) == first
    source.may_answer.clear()
    assert {sent(auth) for _ in range(20)} == {first}
    wait_for(lambda: source.calls == 2, 'the second question')
    source.may_answer.set()
    wait_for(lambda: sent(auth) == second, 'the next token')


def test_failed_source_is_no_failure_before_the_token_ends(soon: None, caplog: pytest.LogCaptureFixture) -> None:
    first, second = token(), token()
    source = Source(first, OSError('no vault'), OSError('no vault'), second)
    auth = jwt(source)
    wait_for(lambda: sent(auth) == second, 'the next token')
    assert source.calls >= 4
    assert 'the source of the token failed: OSError: no vault; the present token is used until it ends' in caplog.text
    assert not any(secret in caplog.text for secret in (first, second))


def test_source_that_has_nothing_new_is_asked_again(soon: None) -> None:
    first, second = token(), token()
    source = Source(first, first, first, second)
    auth = jwt(source)
    wait_for(lambda: sent(auth) == second, 'the next token')


def test_token_that_has_ended_is_replaced_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = token(seconds=100), token(seconds=100)
    source = Source(first, second)
    auth = jwt(source)
    assert sent(auth) == first
    began = time.monotonic()
    monkeypatch.setattr(time, 'monotonic', lambda: began + 101)
    assert sent(auth) == second


def test_token_that_has_ended_by_this_machines_clock_is_used_until_couchdb_refuses_it() -> None:
    source = Source(old := token(seconds=-60))
    auth = jwt(source)
    assert {sent(auth) for _ in range(10)} == {old}
    assert source.calls == 1
    assert sent(jwt(old)) == old


# -- refusals

REASONS = [
    (401, 'exp not in future'),
    (400, 'Bad HMAC'),
    (400, 'Bad signature'),
    (400, 'Unknown kid'),
    (400, 'Malformed token'),
    (400, 'Missing exp claim'),
    (400, 'Invalid iss claim'),
    (400, 'Invalid alg header parameter'),
    (400, 'not an RSA public key'),
    (401, 'Token missing sub claim.'),
    (401, 'You are not authorized to access this db.'),
    (401, 'Authentication required.'),
    (401, 'Token is invalid or has expired.'),
]


@pytest.mark.parametrize(('status', 'reason'), REASONS)
def test_refused_token_is_one_sentence_with_the_reason(status: int, reason: str) -> None:
    given = token('ann')
    auth = jwt(given)
    for _ in range(2):
        error = error_of(auth, reason, status)
        assert isinstance(error, AccessDenied)
        assert str(error).startswith(f"http://localhost:5984 refused the token of user 'ann': {reason.rstrip('.')}; ")
        assert given not in str(error)
    assert ('authentication_handlers' in str(error)) == ('uth' in reason)


@pytest.mark.parametrize(('status', 'reason'), REASONS)
def test_refused_token_is_replaced_from_its_source(status: int, reason: str) -> None:
    first, second = token(), token()
    source = Source(first, second)
    auth = jwt(source)
    assert refuse(auth, reason, status)
    assert sent(auth) == second
    error = error_of(auth, reason, status)  # the source has nothing new
    assert isinstance(error, ServerUnavailable)
    assert reason.rstrip('.') in str(error)
    assert 'the source of the token is asked for a new one' in str(error)


def test_every_new_token_is_refused() -> None:
    """A source whose key CouchDB does not know: each request asks it once, and fails as in an outage."""
    source = Source(*(token() for _ in range(9)))
    auth = jwt(source)
    for _ in range(3):
        assert refuse(auth, 'Unknown kid', 400)
        assert isinstance(error_of(auth, 'Unknown kid', 400, is_last=True), ServerUnavailable)
    assert source.calls == 6


@pytest.mark.parametrize(
    ('status', 'reason'),
    [
        (403, 'You are not allowed to access this db.'),
        (401, 'You are not a server admin.'),
        (400, 'invalid UTF-8 JSON'),
        (401, 'only clerks may write'),
    ],
)
def test_missing_right_or_wrong_request_is_no_refused_token(status: int, reason: str) -> None:
    for given in (token(), Source(token(), token())):
        auth = jwt(given)
        before = sent(auth)
        assert not refuse(auth, reason, status)
        assert sent(auth) == before


def test_unknown_reason_is_perhaps_a_revoked_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, '_LOCKED_SECONDS', 0.0)
    first, second = token(), token()
    auth = jwt(Source(first, second))
    assert refuse(auth, 'revoked')
    assert sent(auth) == second
    assert not refuse(auth, 'revoked')  # there is no other token


@pytest.mark.parametrize(
    'headers', [{'WWW-Authenticate': 'Bearer error="invalid_token", error_description="it is revoked"'}, {}]
)
def test_gateway_refuses_a_token(headers: dict[str, str]) -> None:
    response = requests.Response()
    response.status_code, response._content = 401, b'' if not headers else b'{"error": "x"}'
    response.headers.update(headers)
    first, second = token(), token()
    auth = jwt(Source(first, second))
    assert auth.renew(auth.headers(never), response)
    assert sent(auth) == second
    with pytest.raises(ServerUnavailable, match='it is revoked' if headers else 'refused the token') as caught:
        auth.renew(auth.headers(never), response)
    assert second not in str(caught.value)


# -- API keys

KEY = f'key-{uuid.uuid4().hex}'


@pytest.fixture
def server() -> Iterator[TokenServer]:
    with TokenServer(KEY) as server:
        yield server


def iam(server: TokenServer, password: Any = KEY, **more: Any) -> Auth:
    return Server.of(Address(password=password, auth='iam', token_url=server.url, **more)).node.auth


def test_api_key_is_exchanged_once_for_all_clients(server: TokenServer) -> None:
    auths = [iam(server, database=name) for name in ('a', 'b')]
    threads = [threading.Thread(target=sent, args=(auth,)) for auth in auths * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert {sent(auth) for auth in auths} == {server.given[0]}
    assert server.requests == [{'grant_type': 'urn:ibm:params:oauth:grant-type:apikey', 'apikey': KEY}]
    assert auths[0].user == 'bob'


def test_revoked_token_is_replaced_once(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, '_LOCKED_SECONDS', 0.0)
    one, two = iam(server, database='one'), iam(server, database='two')
    assert sent(one) == sent(two)
    used = two.headers(never)
    assert refuse(one, 'revoked')
    assert two.renew(used, respond(401, 'revoked'))
    assert sent(one) == sent(two) == server.given[1]
    assert len(server.requests) == 2


def test_token_is_renewed_while_the_server_is_down(soon: None, server: TokenServer) -> None:
    auth = iam(server)
    first = sent(auth)
    server.answer = (503, {'error': 'maintenance'})
    wait_for(lambda: sent(auth) == first and len(server.requests) >= 3, 'two failed attempts')
    assert sent(auth) == first
    server.answer = None
    wait_for(lambda: sent(auth) != first, 'the next token')
    assert sent(auth) in server.given


def test_refused_key_is_one_sentence_without_the_key(server: TokenServer) -> None:
    wrong = f'wrong-{uuid.uuid4().hex}'
    auth = iam(server, wrong)
    for _ in range(3):
        with pytest.raises(AccessDenied) as caught:
            auth.headers(never)
    assert f'{server.url} refused the API key: Provided API key ** could not be found; ' in str(caught.value)
    assert len(server.requests) == 1
    assert wrong not in ''.join(traceback.format_exception(caught.value))


def test_refused_key_from_a_source_is_an_outage(server: TokenServer) -> None:
    source = Source('wrong', KEY)
    auth = iam(server, source)
    with pytest.raises(ServerUnavailable, match='its source is asked for a new one'):
        auth.headers(never)
    assert sent(auth) == server.given[0]


@pytest.mark.parametrize(
    ('status', 'body', 'kind', 'text'),
    [
        (500, b'', ServerUnavailable, 'responded with status 500: Internal Server Error'),
        (429, {'errorMessage': 'slow\ndown'}, ServerUnavailable, 'responded with status 429: slow down'),
        (404, {}, ConfigurationError, 'responded with status 404: .*; correct the option token_url'),
        (200, b'<html>', BrokenAnswer, 'has no access_token; is the option token_url right?'),
        (200, {'access_token': 'two words'}, BrokenAnswer, 'has no access_token'),
        (200, {'access_token': 3}, BrokenAnswer, 'has no access_token'),
        (401, {'error': 'invalid_client', 'error_description': 'Go.'}, AccessDenied, 'refused the API key: Go; '),
        (403, [], AccessDenied, 'refused the API key: Forbidden; '),
    ],
)
def test_other_responses(server: TokenServer, status: int, body: Any, kind: type[Exception], text: str) -> None:
    server.answer = (status, body)
    with pytest.raises(kind, match=text) as caught:
        iam(server).headers(never)
    assert KEY not in ''.join(traceback.format_exception(caught.value))


def test_no_server_of_tokens() -> None:
    with pytest.raises(ServerUnavailable, match=r'127\.0\.0\.1:1/token: no server listens at this port'):
        Auth(Address(password=KEY, auth='iam', token_url='http://127.0.0.1:1/token')).headers(never)


def test_opaque_token_ends_after_the_time_that_its_server_says(server: TokenServer) -> None:
    server.answer = (200, {'access_token': 'opaque', 'expires_in': 100})
    source = tokens.TokenServer(Address(password=KEY, auth='iam', token_url=server.url))
    assert 99 < (source.token(None).seconds or 0) <= 100
    server.answer = (200, {'access_token': 'other', 'expires_in': '100'})
    assert source.token(source.token(None)).seconds is None


def test_no_token_is_sent_that_has_ended(server: TokenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    clock = SimpleNamespace(time=time.time, monotonic=lambda: now)
    for each in (module, tokens):
        monkeypatch.setattr(each, 'time', clock)
    server.answer = (200, {'access_token': 'old', 'expires_in': 100})
    auth = iam(server)
    assert sent(auth) == 'old'
    server.answer = (200, {'access_token': 'new', 'expires_in': 100})
    now = 1060.0
    assert sent(auth) == 'old'
    now = 1100.1
    assert sent(auth) == 'new'
    assert len(server.requests) == 2


def test_log_has_no_secret(soon: None, server: TokenServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    auth = iam(server)
    wait_for(lambda: sent(auth) and len(server.given) > 2, 'two renewals')
    assert not any(secret in caplog.text for secret in (KEY, *server.given))
