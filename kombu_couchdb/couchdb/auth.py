"""Authentication headers: basic or session cookie, with passwords that may change while the process runs.

With `basic` the password goes with each request; with `cookie` it goes once, for a session that the server prolongs as long as it
is used. Both are as fast (measured on CouchDB 3.5, which remembers passwords that were right).

CouchDB locks a user for five minutes after five wrong passwords from one machine. So what was refused is not sent again for a
while, however often it is asked for; and where the password may change a session is better: to one that has ended CouchDB does
not count a wrong password. Whoever is locked is refused with the right password, too. That is an outage and ends by itself; what
is sent meanwhile does not make it longer.
"""

from __future__ import annotations

import copy
import json
import os
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import requests
from kombu.utils.imports import symbol_by_name

from .. import errors
from .address import Address
from .fork_safety import Shared, reset_in_child

__all__ = ['Headers', 'Auth', 'environment']

#: How long a password that was refused is not sent again, in seconds: two processes may do so and not lock their user.
_REST = 120.0

#: How long nothing is sent for a user that CouchDB has locked, in seconds: that costs the server next to nothing, but a line in
#: its log.
_LOCK_REST = 5.0

#: The part of a session's time that is used: a request takes its time, and one that comes too late is nobody's.
_USED = 0.9

#: How CouchDB and the embedded server say that it is the password, and not a right, that is wrong.
_WRONG = re.compile(r'Name or password is incorrect')

_COOKIE = re.compile(r'\bAuthSession="?([\w.~+/=-]+)', re.ASCII)
#: So many digits are more than anybody's lifetime; Python cannot wait for a number of hundreds of digits.
_MAX_AGE = re.compile(r'\bMax-Age=(\d{1,9})', re.IGNORECASE | re.ASCII)

#: Posts JSON to the server's `/_session` and returns the answer, whatever its status, or the error. It raises none: its frames
#: have the password.
Post = Callable[[bytes], 'requests.Response | errors.CouchDBError']


class Headers:
    """The headers that say who sends a request. Whoever records the variables of a traceback sees nothing of them."""

    __slots__ = ('_fields',)

    def __init__(self, **fields: str) -> None:
        self._fields = fields

    @property
    def is_session(self) -> bool:
        """Whether a session is named, and no password."""
        return 'Cookie' in self._fields

    def add_to(self, headers: MutableMapping[str, str]) -> None:
        """Add them to those of a request."""
        headers.update(self._fields)


@dataclass(frozen=True)
class _Pair:
    """User, None for nobody, and password."""

    user: str | None
    password: str = field(repr=False)

    @property
    def is_text(self) -> bool:
        """Whether it can be sent."""
        try:
            self.basic()
        except UnicodeEncodeError:  # it has the password in it
            return False
        return True

    def basic(self) -> str:
        """Return the value of `Authorization`."""
        return f'Basic {b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")}'

    def session(self) -> bytes:
        """Return what is posted for a session."""
        return json.dumps({'name': self.user, 'password': self.password}).encode()


class Auth:
    """One user of one server, for all threads of a process."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._user = address.user
        #: What was refused last, why, and until when it is not sent again.
        self._refused: _Pair | None = None
        self._reason = ''
        self._rests_until = 0.0
        #: When a session was begun last, and why it was not.
        self._failure: tuple[float, errors.CouchDBError | None] = 0.0, None
        self._forget()
        self.reset()
        reset_in_child(self)

    @classmethod
    def of(cls, address: Address) -> Auth:
        """Return the one of this process: all clients of a server share a session, and what is known of a wrong password."""
        key = (
            address.server,
            address.user,
            address.password,
            address.credentials,
            address.auth,
            address.verify,
            address.cert,
        )
        return _shared.of(key, lambda: cls(address))

    def reset(self) -> None:
        """Start over, after a fork, with a lock that nobody holds; a session is the child's as well."""
        self._lock = threading.Lock()

    @property
    def user(self) -> str | None:
        """Who this is, as far as is known; None is nobody."""
        if self._user is None and self._address.credentials:
            with self._lock:
                self._ask()
        return self._user

    def headers(self, post: Post) -> Headers:
        """Return the headers that say who sends a request; the first thread that needs a session begins it.

        *Raises* `AccessDenied`; `ServerUnavailable` where user and password come from a source, which may change them, and while
        the user is locked.
        """
        asked = time.monotonic()
        with self._lock:
            if self._headers is None or time.monotonic() > self._ends:
                failed, error = self._failure
                if error is not None and failed > asked:
                    raise copy.copy(error)  # others tried while this one waited: it would wait for each of them in turn
                self._forget()
                self._enter(post)
            assert self._headers is not None
            return self._headers

    def renewed(self, used: Headers, response: requests.Response) -> bool:
        """Tell whether a request that was refused with 401 or 403, and so was not done, may be sent again with other headers.

        *Raises* what `headers` raises, if there is nothing better to send.
        """
        with self._lock:
            if self._headers is not used:
                return True  # another thread was refused before
            if _WRONG.search(reason := errors.reason_of(response)) or errors.is_account_lock(reason):
                self._refuse(self._given, reason)
            elif response.status_code == 403 or not used.is_session:
                return False
            self._forget()
            self._ask()
            return True

    def observe(self, used: Headers, response: requests.Response) -> None:
        """Take over the session that the server prolonged."""
        if 'Set-Cookie' in response.headers and used.is_session:
            with self._lock:
                if self._headers is used:
                    self._take_cookie(response)

    # -- with the lock

    def _forget(self) -> None:
        self._headers: Headers | None = None
        self._ends = float('inf')

    def _enter(self, post: Post) -> None:
        self._given = given = self._ask()
        if given.user is None:
            self._headers = Headers()
        elif self._address.auth == 'basic':
            self._headers = Headers(Authorization=given.basic())
        else:
            error = self._begin(post, given)
            self._failure = time.monotonic(), copy.copy(error)  # without the frames of who raises it
            if error is not None:
                raise error

    def _begin(self, post: Post, given: _Pair) -> errors.CouchDBError | None:
        """Begin a session, or return why there is none: it is raised where nobody sees the answer."""
        response = post(given.session())
        if isinstance(response, errors.CouchDBError):
            return response
        if response.status_code in (401, 403):
            self._refuse(given, errors.reason_of(response))
            return self._refusal()
        if response.status_code >= 400:
            return errors.from_status(response, self._address.server, given.user, 0)
        if not self._take_cookie(response):
            return errors.NotCouchDB(f'{self._address.server} begins no session; use auth="basic"')
        return None

    def _take_cookie(self, response: requests.Response) -> bool:
        told = response.headers.get('Set-Cookie', '')
        if cookie := _COOKIE.search(told):
            age = _MAX_AGE.search(told)
            self._headers = Headers(Cookie=f'AuthSession={cookie[1]}')
            self._ends = time.monotonic() + int(age[1]) * _USED if age else float('inf')
        return bool(cookie)

    def _ask(self) -> _Pair:
        """Return user and password; *raises* if they were refused a short time ago."""
        address = self._address
        try:
            if address.credentials:
                pair = _Pair(*_pair(address.credentials))
                self._user = pair.user
            else:
                pair = _Pair(self._user, address.password() if callable(address.password) else address.password or '')
        except errors.CouchDBError:
            raise
        except Exception as exc:
            raise errors.ServerUnavailable(
                f'{address.server}: the source of user and password failed: {type(exc).__name__}: {exc}'
            ) from exc
        if not pair.is_text:
            raise errors.ConfigurationError('user or password has bytes in it that are no UTF-8')
        if pair == self._refused and time.monotonic() < self._rests_until:
            raise self._refusal()
        return pair

    def _refuse(self, given: _Pair, reason: str) -> None:
        rest = _LOCK_REST if errors.is_account_lock(reason) else _REST
        self._refused, self._reason, self._rests_until = given, reason.rstrip('.'), time.monotonic() + rest

    def _refusal(self) -> errors.CouchDBError:
        if errors.is_account_lock(self._reason):
            return errors.account_locked(self._address.server, self._user)
        text = f'{self._address.server} refused {errors.describe_user(self._user)}: {self._reason}; '
        rest = f'the same password is not sent again for {max(0.0, self._rests_until - time.monotonic()):.0f} s'
        if self._address.credentials or callable(self._address.password):
            return errors.ServerUnavailable(f'{text}{rest}, and its source is asked for another one')
        return errors.AccessDenied(f'{text}check the user, password and rights; {rest}, lest CouchDB lock the user')


_shared: Shared[object, Auth] = Shared({})


def environment() -> tuple[str, str]:
    """Return user and password from `COUCHDB_USER`, and `COUCHDB_PASSWORD` or the file that `COUCHDB_PASSWORD_FILE` names.

    *Raises* `ConfigurationError`, `OSError`.
    """
    user, file = os.environ.get('COUCHDB_USER'), os.environ.get('COUCHDB_PASSWORD_FILE')
    if not user or not (file or 'COUCHDB_PASSWORD' in os.environ):
        raise errors.ConfigurationError(
            'credentials="environment" needs COUCHDB_USER, and COUCHDB_PASSWORD or '
            'COUCHDB_PASSWORD_FILE, in the environment'
        )
    return user, Path(file).read_text('utf-8').rstrip('\r\n') if file else os.environ['COUCHDB_PASSWORD']


def _pair(source: str) -> tuple[str, str]:
    try:
        found = environment if source == 'environment' else symbol_by_name(source)
    except (ImportError, AttributeError, ValueError) as exc:
        raise errors.ConfigurationError(
            f'credentials={source!r} names no function that can be imported: {exc}'
        ) from exc
    if callable(found):
        pair = found()
        if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
            return pair[0], pair[1]
        del pair  # whoever records the variables of a traceback shall not see it
    raise errors.ConfigurationError(
        f'credentials={source!r} must name a function that returns two texts, user and password'
    )
