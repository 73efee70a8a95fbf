"""Authentication headers: basic or session cookie, with passwords that may change while the process runs.

With `basic`, each request contains the password. With `cookie`, the client sends the password once to begin a session,
which CouchDB extends while it is in use. Both are equally fast (measured on CouchDB 3.5, which remembers correct
passwords).

CouchDB locks a user for five minutes after five wrong passwords from one machine. Therefore a client does not send a
refused password again for two minutes. If the password may change, a session is better: CouchDB does not count a
request with an expired session as a wrong password.

CouchDB refuses a locked user even with the correct password. The client treats a lock as an outage, because it ends
without intervention; requests during the lock do not extend it.
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
from . import failures
from .address import Address
from .fork_safety import Shared, reset_in_child

#: Seconds before the client sends a refused password again: two processes can do so without locking their user.
_REFUSED_SECONDS = 120.0

#: Seconds before the client sends a request for a locked user again. Such a request costs CouchDB little more than a
#: line in its log.
_LOCKED_SECONDS = 5.0

#: The share of a session's lifetime that the client uses. CouchDB treats a request with an expired session as
#: anonymous, and a request needs time to arrive.
_USED_SHARE = 0.9

#: The reason in the responses of CouchDB and the embedded server if the password is wrong, and not a missing right.
_WRONG_PASSWORD = re.compile(r'Name or password is incorrect')

_COOKIE = re.compile(r'\bAuthSession="?([\w.~+/=-]+)', re.ASCII)
#: Nine digits are 31 years. Python cannot convert a number of hundreds of digits to a time.
_MAX_AGE = re.compile(r'\bMax-Age=(\d{1,9})', re.IGNORECASE | re.ASCII)

#: A function that posts JSON to `/_session` and returns the response, with any status, or the error. It does not raise
#: the error, because the frames of its traceback contain the password.
Post = Callable[[bytes], 'requests.Response | errors.CouchDBError']


class Headers:
    """The authentication headers of a request. `repr` does not show them, so that recorded tracebacks do not either."""

    __slots__ = ('_fields',)

    def __init__(self, **fields: str) -> None:
        self._fields = fields

    @property
    def is_session(self) -> bool:
        """Whether the headers contain a session cookie and not a password."""
        return 'Cookie' in self._fields

    def add_to(self, headers: MutableMapping[str, str]) -> None:
        """Add the headers to the headers of a request."""
        headers.update(self._fields)


@dataclass(frozen=True)
class _Credentials:
    """User (None: anonymous) and password."""

    user: str | None
    password: str = field(repr=False)

    @property
    def is_encodable(self) -> bool:
        """Whether user and password can be encoded as UTF-8."""
        try:
            self.basic()
        except UnicodeEncodeError:  # not raised further: the exception contains the password
            return False
        return True

    def basic(self) -> str:
        """Return the value of the header `Authorization`."""
        return f'Basic {b64encode(f"{self.user}:{self.password}".encode()).decode("ascii")}'

    def session(self) -> bytes:
        """Return the body of the request that begins a session."""
        return json.dumps({'name': self.user, 'password': self.password}).encode()


class Auth:
    """Authentication of one user at one server, shared by all threads of a process."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._user = address.user
        #: The credentials that CouchDB refused last, its reason, and the monotonic time until which they are not sent.
        self._refused: _Credentials | None = None
        self._refused_reason = ''
        self._refused_until = 0.0
        #: The monotonic time of the last attempt to begin a session, and its error.
        self._last_attempt: tuple[float, errors.CouchDBError | None] = 0.0, None
        self._discard_headers()
        self.reset()
        reset_in_child(self)

    @classmethod
    def of(cls, address: Address) -> Auth:
        """Return this process's object for an address: clients of a server share sessions and refused passwords."""
        return _shared.of(_key(address), lambda: cls(address))

    @classmethod
    def forget(cls, address: Address) -> None:
        """Do not keep the object for an address: no client uses its password any more."""
        _shared.discard(_key(address))

    def reset(self) -> None:
        """Create a new lock in a forked child. The child uses the session of its parent."""
        self._lock = threading.Lock()

    @property
    def user(self) -> str | None:
        """The name of the user; None means anonymous. May ask the source of the credentials, see `headers`."""
        if self._user is None and self._address.credentials:
            with self._lock:
                self._read_credentials()
        return self._user

    def headers(self, post: Post) -> Headers:
        """Return the authentication headers for a request; begin a session if none is valid.

        `post` sends the request that begins a session.

        *Raises* `AccessDenied` if CouchDB refused the password and no source can supply another one;
        `ServerUnavailable` if CouchDB refused it and a source can, if that source fails, or while the user is locked;
        `ConfigurationError` if user or password are missing or cannot be encoded; and the errors of the request that
        begins a session.
        """
        called_at = time.monotonic()
        with self._lock:
            if self._headers is None or time.monotonic() > self._session_ends:
                failed_at, error = self._last_attempt
                if error is not None and failed_at > called_at:
                    # Another thread has tried while this one waited for the lock. With an attempt of its own, each
                    # thread would wait for the time limits of all threads before it.
                    raise copy.copy(error)
                self._discard_headers()
                self._authenticate(post)
            assert self._headers is not None
            return self._headers

    def renew(self, used: Headers, response: requests.Response) -> bool:
        """Return whether to repeat a request, sent with the headers `used`, after a response with status 401 or 403.

        CouchDB has not executed such a request. True: call `headers` again, it returns other headers. False: the user
        lacks a right.

        *Raises* the errors of `headers` if no other credentials are available.
        """
        with self._lock:
            if self._headers is not used:
                return True  # another thread has replaced the headers
            if _WRONG_PASSWORD.search(reason := failures.reason_of(response)) or failures.is_account_lock(reason):
                self._note_refusal(self._used_credentials, reason)
            elif response.status_code == 403 or not used.is_session:
                return False
            self._discard_headers()
            self._read_credentials()
            return True

    def observe(self, used: Headers, response: requests.Response) -> None:
        """Use the new cookie if the server extended the session in this response."""
        if 'Set-Cookie' in response.headers and used.is_session:
            with self._lock:
                if self._headers is used:
                    self._take_cookie(response)

    # -- The caller of these methods holds the lock.

    def _discard_headers(self) -> None:
        self._headers: Headers | None = None
        self._session_ends = float('inf')

    def _authenticate(self, post: Post) -> None:
        self._used_credentials = credentials = self._read_credentials()
        if credentials.user is None:
            self._headers = Headers()
        elif self._address.auth == 'basic':
            self._headers = Headers(Authorization=credentials.basic())
        else:
            error = self._begin_session(post, credentials)
            self._last_attempt = time.monotonic(), copy.copy(error)  # a copy has no traceback
            if error is not None:
                raise error

    def _begin_session(self, post: Post, credentials: _Credentials) -> errors.CouchDBError | None:
        """Begin a session and return None, or the error. The caller raises it, without the response in its frames."""
        response = post(credentials.session())
        if isinstance(response, errors.CouchDBError):
            return response
        if response.status_code in (401, 403):
            self._note_refusal(credentials, failures.reason_of(response))
            return self._refusal()
        if response.status_code >= 400:
            return failures.from_status(response, self._address.server, credentials.user, 0)
        if not self._take_cookie(response):
            return errors.NotCouchDB(f'{self._address.server} did not begin a session; use the option auth="basic"')
        return None

    def _take_cookie(self, response: requests.Response) -> bool:
        header = response.headers.get('Set-Cookie', '')
        if cookie := _COOKIE.search(header):
            age = _MAX_AGE.search(header)
            self._headers = Headers(Cookie=f'AuthSession={cookie[1]}')
            self._session_ends = time.monotonic() + int(age[1]) * _USED_SHARE if age else float('inf')
        return bool(cookie)

    def _read_credentials(self) -> _Credentials:
        """Return user and password, from their source if there is one; *raises* if CouchDB refused them recently."""
        address = self._address
        try:
            credentials = _Credentials(*(user_and_password(address) or (None, '')))
            self._user = credentials.user
        except errors.CouchDBError:
            raise
        except Exception as exc:
            raise errors.ServerUnavailable(
                f'{address.server}: the source of user and password failed: {type(exc).__name__}: {exc}'
            ) from exc
        if not credentials.is_encodable:
            raise errors.ConfigurationError('user or password cannot be encoded as UTF-8')
        if credentials == self._refused and time.monotonic() < self._refused_until:
            raise self._refusal()
        return credentials

    def _note_refusal(self, credentials: _Credentials, reason: str) -> None:
        seconds = _LOCKED_SECONDS if failures.is_account_lock(reason) else _REFUSED_SECONDS
        self._refused, self._refused_reason = credentials, reason.rstrip('.')
        self._refused_until = time.monotonic() + seconds

    def _refusal(self) -> errors.CouchDBError:
        if failures.is_account_lock(self._refused_reason):
            return errors.account_locked(self._address.server, self._user)
        text = f'{self._address.server} refused {errors.describe_user(self._user)}: {self._refused_reason}; '
        seconds = max(0.0, self._refused_until - time.monotonic())
        pause = f'the same password is not sent again for {seconds:.0f} s'
        if self._address.credentials or callable(self._address.password):
            return errors.ServerUnavailable(f'{text}{pause}, and the source of the password is asked for a new one')
        return errors.AccessDenied(
            f'{text}check the user, password and rights; {pause}, because CouchDB locks users after wrong passwords'
        )


def user_and_password(address: Address) -> tuple[str, str] | None:
    """Return user and password of an address, from their source if there is one; None without a user.

    *Raises* `ConfigurationError` if the option `credentials` is wrong, and whatever the source raises.
    """
    if address.credentials:
        return from_source(address.credentials)
    password = address.password() if callable(address.password) else address.password
    return (address.user, password or '') if address.user else None


def environment() -> tuple[str, str]:
    """Return user and password from environment variables.

    `COUCHDB_USER` contains the user, and `COUCHDB_PASSWORD` the password. `COUCHDB_PASSWORD_FILE` contains instead the
    path of a file with the password, which is read at each call.

    *Raises* `ConfigurationError` if a variable is missing, `OSError` if the file cannot be read.
    """
    user, file = os.environ.get('COUCHDB_USER'), os.environ.get('COUCHDB_PASSWORD_FILE')
    if not user or not (file or 'COUCHDB_PASSWORD' in os.environ):
        raise errors.ConfigurationError(
            'credentials="environment" needs the environment variables COUCHDB_USER, and COUCHDB_PASSWORD or '
            'COUCHDB_PASSWORD_FILE'
        )
    return user, Path(file).read_text('utf-8').rstrip('\r\n') if file else os.environ['COUCHDB_PASSWORD']


def from_source(source: str) -> tuple[str, str]:
    """Return user and password from the function that the option `credentials` names."""
    try:
        found = environment if source == 'environment' else symbol_by_name(source)
    except (ImportError, AttributeError, ValueError) as exc:
        raise errors.ConfigurationError(
            f'credentials={source!r} does not name a function that can be imported: {exc}'
        ) from exc
    if callable(found):
        pair = found()
        if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
            return pair[0], pair[1]
        del pair  # recorded tracebacks show the variables of their frames
    raise errors.ConfigurationError(
        f'credentials={source!r} must name a function that returns two strings, user and password'
    )


def _key(address: Address) -> object:
    return (
        address.server,
        address.user,
        address.password,
        address.credentials,
        address.auth,
        address.verify,
        address.cert,
    )


_shared: Shared[object, Auth] = Shared({})
