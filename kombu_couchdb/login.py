"""Who a process is for a server: user and password, from the URL or from a source that may change them, as headers.

With `basic` the password goes with each request; with `cookie` it goes once, for a session that the server prolongs as long as it
is used. Both are as fast (measured on CouchDB 3.5, which remembers passwords that were right).

CouchDB locks a user for five minutes after five wrong passwords from one machine. So what was refused is not sent again for a
while, however often it is asked for; and where the password may change a session is better: to one that has ended CouchDB does
not count a wrong password.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path

import requests
from kombu.utils.imports import symbol_by_name

from . import errors
from .address import Address
from .forks import Shared, reset_in_child

__all__ = ['Login', 'environment']

#: How long a password that was refused is not sent again, in seconds: two processes may do so and not lock their user.
_REST = 120.0

#: The part of a session's time that is used: a request takes its time, and one that comes too late is nobody's.
_USED = 0.9

#: How CouchDB and the embedded server say that it is the password, and not a right, that is wrong.
_WRONG = re.compile(r'Name or password is incorrect|Account is temporarily locked')

_COOKIE = re.compile(r'\bAuthSession="?([\w.~+/=-]+)', re.ASCII)
_MAX_AGE = re.compile(r'\bMax-Age=(\d+)', re.IGNORECASE)

#: Posts JSON to the server's `/_session` and returns the answer, whatever its status.
Post = Callable[[bytes], requests.Response]


class Login:
    """One user of one server, for all threads of a process."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._user = address.user
        #: What was refused last, why, and until when it is not sent again.
        self._refused: tuple[str | None, str] | None = None
        self._reason = ''
        self._rests_until = 0.0
        self._forget()
        self.reset()
        reset_in_child(self)

    @classmethod
    def of(cls, address: Address) -> Login:
        """Return the one of this process: all clients of a server share a session, and what is known of a wrong password."""
        key = (address.server, address.user, address.password, address.credentials, address.auth, address.verify, address.cert)
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

    def headers(self, post: Post) -> Mapping[str, str]:
        """Return the headers that say who sends a request; the first thread that needs a session begins it.

        *Raises* `AccessDenied`, or `ServerUnavailable` where user and password come from a source: they may change.
        """
        with self._lock:
            if self._headers is None or time.monotonic() > self._ends:
                self._forget()
                self._enter(post)
            assert self._headers is not None
            return self._headers

    def renewed(self, used: Mapping[str, str], response: requests.Response) -> bool:
        """Tell whether a request that was refused with 401 or 403, and so was not done, may be sent again with other headers.

        *Raises* what `headers` raises, if there is nothing better to send.
        """
        with self._lock:
            if self._headers is not used:
                return True  # another thread was refused before
            if _WRONG.search(reason := errors.reason_of(response)):
                self._refuse(self._given, reason)
            elif response.status_code == 403 or 'Cookie' not in used:
                return False
            self._forget()
            self._ask()
            return True

    def observe(self, used: Mapping[str, str], response: requests.Response) -> None:
        """Take over the session that the server prolonged."""
        if 'Set-Cookie' in response.headers and 'Cookie' in used:
            with self._lock:
                if self._headers is used:
                    self._take_cookie(response)

    # -- with the lock

    def _forget(self) -> None:
        self._headers: Mapping[str, str] | None = None
        self._ends = float('inf')

    def _enter(self, post: Post) -> None:
        self._given = user, password = self._ask()
        if user is None:
            self._headers = {}
        elif self._address.auth == 'basic':
            self._headers = {'Authorization': f'Basic {b64encode(f"{user}:{password}".encode()).decode("ascii")}'}
        else:
            response = post(json.dumps({'name': user, 'password': password}).encode())
            if response.status_code in (401, 403):
                self._refuse(self._given, errors.reason_of(response))
                raise self._refusal()
            if response.status_code >= 400:
                raise errors.from_status(response, self._address.server, user, 0)
            if not self._take_cookie(response):
                raise errors.NotCouchDB(f'{self._address.server} begins no session; use auth="basic"')

    def _take_cookie(self, response: requests.Response) -> bool:
        told = response.headers.get('Set-Cookie', '')
        if cookie := _COOKIE.search(told):
            age = _MAX_AGE.search(told)
            self._headers = {'Cookie': f'AuthSession={cookie[1]}'}
            self._ends = time.monotonic() + int(age[1]) * _USED if age else float('inf')
        return bool(cookie)

    def _ask(self) -> tuple[str | None, str]:
        """Return user and password; *raises* if they were refused a short time ago."""
        address = self._address
        try:
            if address.credentials:
                self._user, password = _pair(address.credentials)
            else:
                password = address.password() if callable(address.password) else address.password or ''
        except errors.CouchDBError:
            raise
        except Exception as exc:
            raise errors.ServerUnavailable(
                f'{address.server}: the source of user and password failed: {type(exc).__name__}: {exc}') from exc
        try:
            f'{self._user}:{password}'.encode()
        except UnicodeEncodeError:  # it has a part of the password in it
            raise errors.ConfigurationError('user or password has bytes in it that are no UTF-8') from None
        if (self._user, password) == self._refused and time.monotonic() < self._rests_until:
            raise self._refusal()
        return self._user, password

    def _refuse(self, given: tuple[str | None, str], reason: str) -> None:
        self._refused, self._reason, self._rests_until = given, reason.rstrip('.'), time.monotonic() + _REST

    def _refusal(self) -> errors.CouchDBError:
        text = f'{self._address.server} refused {errors.who(self._user)}: {self._reason}; '
        rest = f'the same password is not sent again for {max(0.0, self._rests_until - time.monotonic()):.0f} s'
        if self._address.credentials or callable(self._address.password):
            return errors.ServerUnavailable(f'{text}{rest}, and its source is asked for another one')
        return errors.AccessDenied(f'{text}check the user, password and rights; {rest}, lest CouchDB lock the user')


_shared: Shared[object, Login] = Shared({})


def environment() -> tuple[str, str]:
    """Return user and password from `COUCHDB_USER`, and `COUCHDB_PASSWORD` or the file that `COUCHDB_PASSWORD_FILE` names.

    *Raises* `ConfigurationError`, `OSError`.
    """
    user, file = os.environ.get('COUCHDB_USER'), os.environ.get('COUCHDB_PASSWORD_FILE')
    password = Path(file).read_text('utf-8').rstrip('\r\n') if file else os.environ.get('COUCHDB_PASSWORD')
    if not user or password is None:
        raise errors.ConfigurationError('credentials="environment" needs COUCHDB_USER, and COUCHDB_PASSWORD or '
                                        'COUCHDB_PASSWORD_FILE, in the environment')
    return user, password


def _pair(source: str) -> tuple[str, str]:
    try:
        found = environment if source == 'environment' else symbol_by_name(source)
    except (ImportError, AttributeError, ValueError) as exc:
        raise errors.ConfigurationError(f'credentials={source!r} names no function that can be imported: {exc}') from exc
    pair = found() if callable(found) else None
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise errors.ConfigurationError(f'credentials={source!r} must name a function that returns two texts, user and password')
    return pair[0], pair[1]
