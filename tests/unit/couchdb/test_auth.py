"""Who a process is for a server (`kombu_couchdb.couchdb.auth`), without a server."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.auth import Auth, Headers, environment
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError, NotCouchDB, ServerUnavailable
from tests.conftest import PATIENCE, wait_for

SECRET = 'tell-nobody'
WRONG = 'Name or password is incorrect.'
LOCKED = 'Account is temporarily locked due to multiple authentication failures'


def answer(status: int = 200, reason: str = '', **headers: str) -> requests.Response:
    """Return an answer of CouchDB."""
    response = requests.Response()
    response.status_code = status
    response._content = json.dumps({'error': 'unauthorized', 'reason': reason}).encode()
    response.headers.update({name.replace('_', '-'): value for name, value in headers.items()})
    return response


def cookie(name: str, age: int = 600) -> str:
    return f'AuthSession={name}; Version=1; Expires=Sat, 21-Nov-2026 21:26:17 GMT; Max-Age={age}; Path=/; HttpOnly'


class Sessions:
    """A server's `/_session`: notes what is posted, and gives the sessions s1, s2 and so on, or the `answers` in turn."""

    def __init__(self, *answers: requests.Response, age: int = 600) -> None:
        self.posted: list[Any] = []
        self._answers, self._age = list(answers), age

    def __call__(self, data: bytes) -> requests.Response:
        self.posted.append(json.loads(data))
        return self._answers.pop(0) if self._answers else answer(Set_Cookie=cookie(f's{len(self.posted)}', self._age))


def never(data: bytes) -> requests.Response:
    pytest.fail('there is nothing to post')


def basic(user: str, password: str) -> Auth:
    return Auth(Address(user=user, password=password))


def session() -> Auth:
    return Auth(Address(user='me', password=SECRET, auth='cookie'))


def shown(headers: Headers) -> dict[str, str]:
    """Return the headers as they are sent."""
    fields: dict[str, str] = {}
    headers.add_to(fields)
    return fields


def decoded(headers: Headers) -> str:
    return b64decode(shown(headers)['Authorization'].removeprefix('Basic ')).decode()


def sessions_of(logins: list[Auth]) -> list[str]:
    """Return the sessions that these begin, one after the other, at one server."""
    sessions = Sessions()
    return [shown(login.headers(sessions))['Cookie'] for login in logins]


#: What the function `credentials` returns in turn, the last for ever, and how often it was asked.
given: list[Any] = []
asked: list[None] = []


def credentials() -> Any:
    """Return what a test has prepared."""
    asked.append(None)
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
    asked.clear()


# -- with each request


def test_nobody_says_nothing() -> None:
    assert shown(Auth(Address()).headers(never)) == {}
    assert shown(Auth(Address(auth='cookie')).headers(never)) == {}


def test_basic_is_said_with_each_request_in_utf8() -> None:
    login = basic('jürgen', 'p:ß@')
    assert decoded(login.headers(never)) == 'jürgen:p:ß@'
    assert login.headers(never) is login.headers(never)
    assert login.user == 'jürgen'


@pytest.mark.parametrize(
    ('status', 'reason'), [(403, 'You are not allowed to access this db.'), (401, 'You are not a server admin.')]
)
def test_a_right_that_is_missing_is_no_wrong_password(status: int, reason: str) -> None:
    login = basic('me', SECRET)
    assert not login.renewed(login.headers(never), answer(status, reason))
    assert decoded(login.headers(never)) == f'me:{SECRET}'


def test_what_was_refused_is_not_sent_again_for_a_while() -> None:
    login = basic('me', SECRET)
    with pytest.raises(AccessDenied, match=r"http://localhost:5984 refused user 'me': .*check the user, password"):
        login.renewed(login.headers(never), answer(401, WRONG))
    for _ in range(3):
        with pytest.raises(AccessDenied, match=r'is not sent again for (1[012]|\d)\d s') as caught:
            login.headers(never)
        assert SECRET not in str(caught.value)
    login._rests_until = 0.0
    assert decoded(login.headers(never)) == f'me:{SECRET}'


@pytest.mark.parametrize('auth', ['basic', 'cookie'])
@pytest.mark.parametrize('where', ['url', 'function', 'source'])
def test_a_user_that_is_locked_is_waited_for(source: str, where: str, auth: str) -> None:
    """Others sent the wrong passwords: it ended every worker of the user."""
    given[:] = [('me', SECRET)]
    login = Auth(
        Address(credentials=source, auth=auth)
        if where == 'source'
        else Address(user='me', password=SECRET if where == 'url' else lambda: SECRET, auth=auth)
    )
    locked = answer(403, LOCKED)
    sessions = Sessions(locked)
    for _ in range(3):
        with pytest.raises(
            ServerUnavailable, match=r"localhost:5984 has locked user 'me' for up to five minutes"
        ) as caught:
            login.renewed(login.headers(sessions), locked)
        assert SECRET not in str(caught.value)
    assert len(sessions.posted) == (auth == 'cookie')
    assert 0.0 < login._rests_until - time.monotonic() < 10.0
    login._rests_until = 0.0
    assert login.headers(sessions)


def test_a_source_that_names_another_user_ends_the_wait_for_one_that_is_locked(source: str) -> None:
    given[:] = [('me', SECRET), ('you', 'other')]
    login = Auth(Address(credentials=source))
    assert login.renewed(login.headers(never), answer(403, LOCKED))
    assert decoded(login.headers(never)) == 'you:other'


def test_a_password_that_is_wrong_is_told_once_the_user_is_no_longer_locked() -> None:
    login = basic('me', SECRET)
    with pytest.raises(ServerUnavailable):
        login.renewed(login.headers(never), answer(403, LOCKED))
    login._rests_until = 0.0
    with pytest.raises(AccessDenied, match='check the user, password'):
        login.renewed(login.headers(never), answer(401, WRONG))


def test_all_clients_of_a_server_and_a_user_share_what_is_known() -> None:
    one = Address(user='me', password=SECRET, database='one', host='shared')
    assert Auth.of(one) is Auth.of(Address(user='me', password=SECRET, database='two', host='shared'))
    for other in (
        {'user': 'you'},
        {'password': 'x'},
        {'host': 'other'},
        {'auth': 'cookie'},
        {'tls': True},
        {'port': 1},
    ):
        assert Auth.of(one) is not Auth.of(Address(**{'user': 'me', 'password': SECRET, 'host': 'shared', **other}))


def test_a_login_is_not_shared_across_other_ways_to_verify_the_server() -> None:
    """Without verification anybody may have answered: that session, and what was refused there, is not for the others."""
    given: list[dict[str, Any]] = [
        {},
        {'verify': False},
        {'verify': 'ca.pem'},
        {'cert': 'me.pem'},
        {'cert': ('me.pem', 'k')},
    ]
    logins = [
        Auth.of(Address(user='me', password=SECRET, host='shared', tls=True, auth='cookie', **tls)) for tls in given
    ]
    assert len(set(map(id, logins))) == len(given)
    assert sessions_of(logins) == [f'AuthSession=s{number}' for number in range(1, len(given) + 1)]


# -- sessions


def test_the_password_goes_once_for_a_session() -> None:
    login, sessions = session(), Sessions()
    assert shown(login.headers(sessions)) == shown(login.headers(sessions)) == {'Cookie': 'AuthSession=s1'}
    assert sessions.posted == [{'name': 'me', 'password': SECRET}]


def test_a_session_that_has_ended_is_begun_anew_before_it_is_used() -> None:
    # With a session that is over CouchDB takes a request for nobody's, and may well answer it.
    login, sessions = session(), Sessions(age=0)
    assert [shown(login.headers(sessions))['Cookie'] for _ in range(2)] == ['AuthSession=s1', 'AuthSession=s2']


@pytest.mark.parametrize('digits', [10, 400, 5000])
def test_a_session_that_lasts_longer_than_python_can_count(digits: int) -> None:
    login, sessions = session(), Sessions(answer(Set_Cookie=cookie('s1').replace('600', '9' * digits)))
    assert shown(login.headers(sessions)) == shown(login.headers(sessions)) == {'Cookie': 'AuthSession=s1'}


def test_a_session_that_the_server_ended_is_begun_anew() -> None:
    login, sessions = session(), Sessions()
    assert login.renewed(login.headers(sessions), answer(401, 'You are not authorized to access this db.'))
    assert shown(login.headers(sessions)) == {'Cookie': 'AuthSession=s2'}


def test_a_session_is_no_matter_of_rights() -> None:
    login, sessions = session(), Sessions()
    assert not login.renewed(login.headers(sessions), answer(403, 'You are not allowed to access this db.'))
    assert shown(login.headers(sessions)) == {'Cookie': 'AuthSession=s1'}


def test_a_prolonged_session_is_taken_over() -> None:
    login, sessions = session(), Sessions(age=0)
    login.observe(login.headers(sessions), answer(Set_Cookie=cookie('longer')))
    assert shown(login.headers(sessions)) == {'Cookie': 'AuthSession=longer'}


def test_the_answer_to_an_older_session_changes_nothing() -> None:
    login, sessions = session(), Sessions()
    old = login.headers(sessions)
    assert login.renewed(old, answer(401))
    new = login.headers(sessions)
    assert login.renewed(old, answer(401))  # another thread, which was as late
    login.observe(old, answer(Set_Cookie=cookie('late')))
    assert login.headers(sessions) is new
    assert len(sessions.posted) == 2


@pytest.mark.parametrize('other', ['Set-Cookie', 'Server'])
def test_other_cookies_are_not_ours(other: str) -> None:
    login, sessions = session(), Sessions()
    login.observe(login.headers(sessions), answer(**{other: 'route=7; Path=/'}))
    assert shown(login.headers(sessions)) == {'Cookie': 'AuthSession=s1'}


def test_basic_takes_no_cookie() -> None:
    login = basic('me', SECRET)
    login.observe(login.headers(never), answer(Set_Cookie=cookie('s1')))
    assert 'Cookie' not in shown(login.headers(never))


@pytest.mark.parametrize(
    ('status', 'reason', 'kind'),
    [(401, WRONG, AccessDenied), (500, 'trouble', ServerUnavailable), (200, '', NotCouchDB)],
)
def test_a_session_that_is_not_begun(status: int, reason: str, kind: type[CouchDBError]) -> None:
    login, sessions = session(), Sessions(answer(status, reason), answer(status, reason))
    for _ in range(2):
        with pytest.raises(kind) as caught:
            login.headers(sessions)
        assert SECRET not in str(caught.value)
    assert len(sessions.posted) == (1 if kind is AccessDenied else 2)


def test_many_threads_begin_one_session() -> None:
    login, sessions, seen = session(), Sessions(), []
    together = threading.Barrier(8)

    def use() -> None:
        together.wait(PATIENCE)
        seen.append(shown(login.headers(sessions)))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == [{'Cookie': 'AuthSession=s1'}] * 8
    assert len(sessions.posted) == 1


def test_a_server_that_does_not_answer_holds_no_thread_for_each_of_the_others() -> None:
    """The consumer's thread waited for as many time limits as there were threads before it."""
    login, failures = session(), list[Exception]()
    others = [threading.Thread(target=lambda: failures.append(failure(login, never))) for _ in range(3)]

    def is_waiting(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code.co_name == 'headers' and 'asked' in frame.f_locals

    def post(data: bytes) -> ServerUnavailable:
        for thread in others:
            thread.start()
        wait_for(lambda: all(map(is_waiting, others)), 'the others to wait')
        return ServerUnavailable('no answer')

    failures.append(failure(login, post))
    for thread in others:
        thread.join(PATIENCE)
    assert [str(exc) for exc in failures] == ['no answer'] * 4
    assert len(set(map(id, failures))) == 4
    assert login.headers(Sessions())


def failure(login: Auth, post: Any) -> Exception:
    with pytest.raises(ServerUnavailable) as caught:
        login.headers(post)
    return caught.value


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_child_goes_on_with_its_parents_session_whatever_a_thread_of_that_was_doing() -> None:
    login = session()
    login.headers(Sessions())
    with login._lock:
        child = os.fork()
        if not child:
            os._exit(0 if shown(login.headers(never)) == {'Cookie': 'AuthSession=s1'} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- a source of user and password


def test_a_source_is_asked_when_it_is_needed(source: str) -> None:
    given[:] = [('me', 'old')]
    login = Auth(Address(credentials=source))
    assert asked == []
    assert decoded(login.headers(never)) == decoded(login.headers(never)) == 'me:old'
    assert login.user == 'me'
    assert len(asked) == 1


def test_who_it_is_can_be_asked_first(source: str) -> None:
    given[:] = [('me', 'old')]
    assert Auth(Address(credentials=source)).user == 'me'


@pytest.mark.parametrize('auth', ['basic', 'cookie'])
def test_what_was_refused_is_asked_for_again(source: str, auth: str) -> None:
    given[:] = [('me', 'old'), ('you', 'new')]
    login, sessions = Auth(Address(credentials=source, auth=auth)), Sessions()
    assert login.renewed(login.headers(sessions), answer(401, WRONG))
    new = login.headers(sessions)
    assert (
        sessions.posted[1:] == [{'name': 'you', 'password': 'new'}] if auth == 'cookie' else decoded(new) == 'you:new'
    )
    assert login.user == 'you'


def test_a_source_that_has_nothing_new_yet_is_asked_until_it_has(source: str) -> None:
    given[:] = [('me', 'old')]
    login = Auth(Address(credentials=source))
    with pytest.raises(
        ServerUnavailable, match=r"refused user 'me': Name or password is incorrect.*asked for another one"
    ):
        login.renewed(login.headers(never), answer(401, WRONG))
    with pytest.raises(ServerUnavailable, match='is not sent again'):
        login.headers(never)
    given[:] = [('me', 'new')]
    assert decoded(login.headers(never)) == 'me:new'


def test_a_password_may_be_a_function_that_is_asked_again() -> None:
    passwords = ['old', 'new', 'new']
    login = Auth(Address(user='me', password=lambda: passwords.pop(0)))
    assert login.renewed(login.headers(never), answer(401, WRONG))
    assert decoded(login.headers(never)) == 'me:new'


@pytest.mark.parametrize('auth', ['basic', 'cookie'])
def test_a_password_that_is_no_text_is_told_without_it(source: str, auth: str) -> None:
    """So it comes out of an environment in Latin-1; it ended the worker, and the error told of a letter of it."""
    given[:] = [('me', SECRET + '\udcfc')]
    with pytest.raises(ConfigurationError, match='no UTF-8') as caught:
        Auth(Address(credentials=source, auth=auth)).headers(never)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize('wrong', [None, 'me:' + SECRET, ('me',), ('me', None), (b'me', SECRET), ('me', SECRET, 1)])
def test_a_source_that_returns_something_else(source: str, wrong: Any) -> None:
    given[:] = [wrong]
    with pytest.raises(
        ConfigurationError, match='must name a function that returns two texts, user and password'
    ) as caught:
        Auth(Address(credentials=source)).headers(never)
    assert SECRET not in str(caught.value)


def test_a_source_that_fails_is_tried_again(source: str) -> None:
    given[:] = [OSError('no vault'), ('me', 'new')]
    login = Auth(Address(credentials=source))
    with pytest.raises(ServerUnavailable, match='the source of user and password failed') as caught:
        login.headers(never)
    assert isinstance(caught.value.__cause__, OSError)
    assert decoded(login.headers(never)) == 'me:new'


@pytest.mark.parametrize(
    'path',
    ['no.such.module:credentials', 'kombu_couchdb.couchdb.auth:nothing', 'kombu_couchdb.couchdb.auth.__all__', 'x'],
)
def test_a_source_that_is_not_there(path: str) -> None:
    with pytest.raises(ConfigurationError, match=f'credentials={path!r}'):
        Auth(Address(credentials=path)).headers(never)


# -- the environment


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment, without ours."""
    for name in ('COUCHDB_USER', 'COUCHDB_PASSWORD', 'COUCHDB_PASSWORD_FILE'):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_environment_has_user_and_password(env: pytest.MonkeyPatch) -> None:
    env.setenv('COUCHDB_USER', 'me')
    env.setenv('COUCHDB_PASSWORD', SECRET)
    assert decoded(Auth(Address(credentials='environment')).headers(never)) == f'me:{SECRET}'


def test_a_file_may_have_the_password_and_change(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv('COUCHDB_USER', 'me')
    env.setenv('COUCHDB_PASSWORD_FILE', str(tmp_path / 'password'))
    for password in ('old', ' new ß '):
        (tmp_path / 'password').write_text(f'{password}\n', 'utf-8')
        assert environment() == ('me', password)


@pytest.mark.parametrize('names', [(), ('COUCHDB_USER',), ('COUCHDB_PASSWORD',), ('COUCHDB_PASSWORD_FILE',)])
def test_an_environment_without_it_says_what_is_missing(
    env: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, ...]
) -> None:
    (tmp_path / 'password').write_text(SECRET)
    for name in names:
        env.setenv(name, str(tmp_path / 'password'))
    with pytest.raises(ConfigurationError, match='COUCHDB_USER, and COUCHDB_PASSWORD or COUCHDB_PASSWORD_FILE'):
        Auth(Address(credentials='environment')).headers(never)


def test_a_file_that_is_away_is_waited_for(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv('COUCHDB_USER', 'me')
    env.setenv('COUCHDB_PASSWORD_FILE', str(tmp_path / 'none'))
    with pytest.raises(ServerUnavailable, match='none'):
        Auth(Address(credentials='environment')).headers(never)


# -- what people see


@pytest.mark.parametrize('auth', ['basic', 'cookie'])
def test_nothing_of_it_is_shown(auth: str) -> None:
    login = Auth(Address(user='me', password=SECRET, auth=auth))
    headers = login.headers(Sessions())
    for text in (repr(login), str(login), repr(headers), repr(login._given)):
        assert not any(word in text for word in (SECRET, *shown(headers).values()))
