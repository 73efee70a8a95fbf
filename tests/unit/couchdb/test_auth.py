"""Authentication (`kombu_couchdb.couchdb.auth`), without a server."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from kombu_couchdb.couchdb import auth as module
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.auth import Auth
from kombu_couchdb.couchdb.credentials import Credentials, environment
from kombu_couchdb.couchdb.http import LoginHeaders
from kombu_couchdb.couchdb.server import Server
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError, NotCouchDB, ServerUnavailable
from tests.conftest import PATIENCE, wait_for

SECRET = 'tell-nobody'
WRONG = 'Name or password is incorrect.'
LOCKED = 'Account is temporarily locked due to multiple authentication failures'


def respond(status: int = 200, reason: str = '', **headers: str) -> requests.Response:
    """Return a response of CouchDB."""
    response = requests.Response()
    response.status_code = status
    response._content = json.dumps({'error': 'unauthorized', 'reason': reason}).encode()
    response.headers.update({name.replace('_', '-'): value for name, value in headers.items()})
    return response


def cookie(name: str, age: int = 600) -> str:
    return f'AuthSession={name}; Version=1; Expires=Sat, 21-Nov-2026 21:26:17 GMT; Max-Age={age}; Path=/; HttpOnly'


class Sessions:
    """A server's `/_session`: records the posted bodies, and returns `responses` in turn, then sessions s1, s2 etc."""

    def __init__(self, *responses: requests.Response, age: int = 600) -> None:
        self.posted: list[Any] = []
        self._responses, self._age = list(responses), age

    def __call__(self, data: bytes) -> requests.Response:
        self.posted.append(json.loads(data))
        if self._responses:
            return self._responses.pop(0)
        return respond(Set_Cookie=cookie(f's{len(self.posted)}', self._age))


def never(data: bytes) -> requests.Response:
    pytest.fail('no request is expected')


def basic(user: str, password: str) -> Auth:
    return Auth(Address(user=user, password=password))


def session() -> Auth:
    return Auth(Address(user='me', password=SECRET, auth='cookie'))


def shown(headers: LoginHeaders) -> dict[str, str]:
    """Return the headers of a request."""
    fields: dict[str, str] = {}
    headers.add_to(fields)
    return fields


def decoded(headers: LoginHeaders) -> str:
    return b64decode(shown(headers)['Authorization'].removeprefix('Basic ')).decode()


#: The values that the function `credentials` returns in turn, the last one repeatedly.
given: list[Any] = []


def credentials() -> Any:
    """Return the next prepared value, or raise it."""
    found = given.pop(0) if len(given) > 1 else given[0]
    if isinstance(found, Exception):
        raise found
    return found


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The dotted path of `credentials`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield f'{__name__}:credentials'
    given.clear()


# -- basic


def test_basic_sends_user_and_password_in_utf8() -> None:
    auth = basic('jürgen', 'p:ß@')
    assert decoded(auth.headers(never)) == 'jürgen:p:ß@'
    assert auth.headers(never) is auth.headers(never)
    assert auth.user == 'jürgen'


@pytest.mark.parametrize(
    ('status', 'reason'), [(403, 'You are not allowed to access this db.'), (401, 'You are not a server admin.')]
)
def test_a_missing_right_is_not_a_wrong_password(status: int, reason: str) -> None:
    auth = basic('me', SECRET)
    assert not auth.renew(auth.headers(never), respond(status, reason))
    assert decoded(auth.headers(never)) == f'me:{SECRET}'
    if status == 403:
        auth, sessions = session(), Sessions()
        assert not auth.renew(auth.headers(sessions), respond(status, reason))
        assert shown(auth.headers(sessions)) == {'Cookie': 'AuthSession=s1'}


def test_a_refused_password_is_not_sent_again_for_two_minutes() -> None:
    auth = basic('me', SECRET)
    with pytest.raises(AccessDenied, match=r"http://localhost:5984 refused user 'me': .*check the user, password"):
        auth.renew(auth.headers(never), respond(401, WRONG))
    for _ in range(3):
        with pytest.raises(AccessDenied, match=r'is not sent again for (1[012]|\d)\d s') as caught:
            auth.headers(never)
        assert SECRET not in str(caught.value)
    auth._refused_until = 0.0
    assert decoded(auth.headers(never)) == f'me:{SECRET}'


@pytest.mark.parametrize('scheme', ['basic', 'cookie'])
def test_a_locked_user_is_an_outage_that_ends(scheme: str) -> None:
    """A lock, caused by other processes, once ended every worker of the user."""
    auth = Auth(Address(user='me', password=SECRET, auth=scheme))
    locked = respond(403, LOCKED)
    sessions = Sessions(locked)
    for _ in range(3):
        with pytest.raises(
            ServerUnavailable, match=r"localhost:5984 has locked user 'me' for up to five minutes"
        ) as caught:
            auth.renew(auth.headers(sessions), locked)
        assert SECRET not in str(caught.value)
    assert len(sessions.posted) == (scheme == 'cookie')
    assert 0.0 < auth._refused_until - time.monotonic() < 10.0
    auth._refused_until = 0.0
    assert auth.headers(sessions)


def test_sessions_are_not_shared_between_different_tls_settings() -> None:
    """Without verification, the session may come from another server, and so may a refusal."""
    given: list[dict[str, Any]] = [{}, {'verify': False}, {'verify': 'ca.pem'}, {'cert': 'me.pem'}]
    addresses = [Address(user='me', password=SECRET, host='shared', tls=True, auth='cookie', **tls) for tls in given]
    sessions = Sessions()
    cookies = [shown(Server.of(address).node.auth.headers(sessions))['Cookie'] for address in addresses]
    assert cookies == [f'AuthSession=s{number}' for number in range(1, len(given) + 1)]


# -- sessions


def test_a_session_is_replaced_when_nine_tenths_of_its_lifetime_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # A request needs time to arrive, and may arrive after the end of the session.
    auth, sessions = session(), Sessions(age=600)
    for now, expected in ((1000.0, 's1'), (1539.0, 's1'), (1541.0, 's2')):
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda now=now: now))
        assert shown(auth.headers(sessions)) == {'Cookie': f'AuthSession={expected}'}


def test_a_response_to_an_older_session_changes_nothing() -> None:
    auth, sessions = session(), Sessions()
    old = auth.headers(sessions)
    assert auth.renew(old, respond(401))
    new = auth.headers(sessions)
    assert auth.renew(old, respond(401))  # a late response to another thread
    auth.observe(old, respond(Set_Cookie=cookie('late')))
    assert auth.headers(sessions) is new
    assert len(sessions.posted) == 2


@pytest.mark.parametrize(
    ('status', 'reason', 'kind'),
    [(401, WRONG, AccessDenied), (500, 'internal error', ServerUnavailable), (200, '', NotCouchDB)],
)
def test_errors_when_a_session_begins(status: int, reason: str, kind: type[CouchDBError]) -> None:
    auth, sessions = session(), Sessions(respond(status, reason), respond(status, reason))
    for _ in range(2):
        with pytest.raises(kind) as caught:
            auth.headers(sessions)
        assert SECRET not in str(caught.value)
    assert len(sessions.posted) == (1 if kind is AccessDenied else 2)


def test_waiting_threads_share_the_error_of_one_attempt() -> None:
    """The consumer's thread once waited for the time limits of all threads before it in turn."""
    auth, failures = session(), list[Exception]()
    others = [threading.Thread(target=lambda: failures.append(failure(auth, never))) for _ in range(3)]

    def is_waiting(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code.co_name == 'headers' and 'called_at' in frame.f_locals

    def post(data: bytes) -> ServerUnavailable:
        for thread in others:
            thread.start()
        wait_for(lambda: all(map(is_waiting, others)), 'the other threads to wait for the lock')
        return ServerUnavailable('no answer')

    failures.append(failure(auth, post))
    for thread in others:
        thread.join(PATIENCE)
    assert [str(exc) for exc in failures] == ['no answer'] * 4
    assert len(set(map(id, failures))) == 4
    assert auth.headers(Sessions())


def failure(auth: Auth, post: Any) -> Exception:
    with pytest.raises(ServerUnavailable) as caught:
        auth.headers(post)
    return caught.value


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_forked_child_uses_the_session_of_its_parent_though_the_lock_was_held() -> None:
    server = Server(Address(user='me', password=SECRET, auth='cookie'))
    auth = server.node.auth
    auth.headers(Sessions())
    with auth._lock:
        child = os.fork()
        if not child:
            os._exit(0 if shown(auth.headers(never)) == {'Cookie': 'AuthSession=s1'} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- the option credentials


def test_a_password_function_is_called_again_after_a_refusal() -> None:
    passwords = ['old', 'new', 'new']
    auth = Auth(Address(user='me', password=lambda: passwords.pop(0)))
    assert auth.renew(auth.headers(never), respond(401, WRONG))
    assert decoded(auth.headers(never)) == 'me:new'


@pytest.mark.parametrize('scheme', ['basic', 'cookie'])
def test_a_password_that_is_not_utf8_does_not_appear_in_the_error(source: str, scheme: str) -> None:
    """An environment in Latin-1 contains such passwords. The error once contained a character of the password."""
    given[:] = [('me', SECRET + '\udcfc')]
    with pytest.raises(ConfigurationError, match='cannot be encoded as UTF-8') as caught:
        Auth(Address(credentials=source, auth=scheme)).headers(never)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize('wrong', [None, 'me:' + SECRET, ('me',), ('me', None), (b'me', SECRET), ('me', SECRET, 1)])
def test_a_source_must_return_two_strings(source: str, wrong: Any) -> None:
    given[:] = [wrong]
    with pytest.raises(
        ConfigurationError, match='must name a function that returns two strings, user and password'
    ) as caught:
        Auth(Address(credentials=source)).headers(never)
    assert SECRET not in str(caught.value)


def test_a_failed_source_is_asked_again(source: str) -> None:
    given[:] = [OSError('no vault'), ('me', 'new')]
    auth = Auth(Address(credentials=source))
    with pytest.raises(ServerUnavailable, match=r'the source of user and password failed: OSError: no vault$'):
        auth.headers(never)
    assert decoded(auth.headers(never)) == 'me:new'


@pytest.mark.parametrize(
    'path',
    ['no.such.module:credentials', 'kombu_couchdb.couchdb.auth:nothing', 'kombu_couchdb.couchdb.auth.__all__', 'x'],
)
def test_a_source_that_cannot_be_imported(path: str) -> None:
    with pytest.raises(ConfigurationError, match=f'credentials={path!r}'):
        Auth(Address(credentials=path)).headers(never)


# -- the environment


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment, without the variables of this module."""
    for name in ('COUCHDB_USER', 'COUCHDB_PASSWORD', 'COUCHDB_PASSWORD_FILE'):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_password_file_may_change(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv('COUCHDB_USER', 'me')
    env.setenv('COUCHDB_PASSWORD_FILE', str(tmp_path / 'password'))
    for password in ('old', ' new ß '):
        (tmp_path / 'password').write_text(f'{password}\n', 'utf-8')
        assert environment() == Credentials('me', password)


@pytest.mark.parametrize('names', [(), ('COUCHDB_USER',), ('COUCHDB_PASSWORD',), ('COUCHDB_PASSWORD_FILE',)])
def test_a_missing_variable_is_named(env: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / 'password').write_text(SECRET)
    for name in names:
        env.setenv(name, str(tmp_path / 'password'))
    with pytest.raises(ConfigurationError, match='COUCHDB_USER, and COUCHDB_PASSWORD or COUCHDB_PASSWORD_FILE'):
        Auth(Address(credentials='environment')).headers(never)


def test_a_missing_password_file_is_an_outage(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv('COUCHDB_USER', 'me')
    env.setenv('COUCHDB_PASSWORD_FILE', str(tmp_path / 'none'))
    with pytest.raises(ServerUnavailable, match='none'):
        Auth(Address(credentials='environment')).headers(never)
