"""Authentication of requests: with a password, a session cookie, a bearer token, or as a proxy; all may change.

With `basic`, each request contains the password. With `cookie`, the client sends the password once to begin a session,
which CouchDB extends while it is in use. Both are equally fast (measured on CouchDB 3.5, which remembers correct
passwords).

CouchDB locks a user for five minutes after five wrong passwords from one machine. Therefore a client does not send a
refused password again for two minutes. If the password may change, a session is better: CouchDB does not count a
request with an expired session as a wrong password.

CouchDB refuses a locked user even with the correct password. The client treats a lock as an outage, because it ends
without intervention; requests during the lock do not extend it.

With `jwt`, the password is a token, which each request contains. With `iam`, it is an API key, which a `TokenServer`
exchanges for a token. Before a token ends, a thread asks the source for the next one, and meanwhile requests use the
old one. If the source has nothing new, they use the old one until CouchDB refuses it.

With `proxy`, the password proves to CouchDB that a proxy has authenticated the user.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from math import inf

import requests

from .. import errors
from ..log import get_logger
from . import credentials, failures
from .address import BEARER, SECRETS, TOKENS, Address
from .credentials import ANONYMOUS, REFUSED_SECONDS, Credentials
from .http import LoginHeaders
from .tokens import TokenServer, described

logger = get_logger(__name__)

#: The statuses of responses with which a server may refuse the credentials of a request.
REFUSED = (400, 401, 403)

#: Seconds before the client sends a request for a locked user again, or a refused token. Such a request costs CouchDB
#: little more than a line in its log.
_LOCKED_SECONDS = 5.0

#: The share of a session's lifetime that the client uses. CouchDB treats a request with an expired session as
#: anonymous, and a request needs time to arrive.
_USED_SHARE = 0.9

#: The share of a token's remaining lifetime after which the client asks for the next one.
_RENEWED_SHARE = 0.8

#: The minimum time between two questions for a token, in seconds. This machine's clock may say that a token has ended
#: that is still valid.
_MIN_SECONDS = 1.0

#: The reason in the responses of CouchDB and the embedded server if the password is wrong, and not a missing right.
_WRONG_PASSWORD = re.compile(r'Name or password is incorrect')

#: CouchDB's reasons if it does not accept a JSON Web Token. Most of them have the status 400.
_WRONG_TOKEN = re.compile(
    r'(exp|nbf|iat) not in (future|past)|Bad (HMAC|signature)|Unknown (kid|kty)|Malformed token|Not an object'
    r'|(Missing|Invalid) \w+ (claim|header parameter)|Token missing sub claim|not an? (RSA|EC) public key'
    r'|Not a valid key'
)

#: CouchDB's reasons for an anonymous request. If it had credentials, CouchDB has ignored them.
_IGNORED = re.compile(r'You are not authorized to access this db|Authentication required')

#: What reasons with status 401 of services that check tokens themselves have in common.
_ABOUT_TOKENS = re.compile(r'\btokens?\b', re.IGNORECASE)

#: CouchDB's reasons with status 401 if a right is missing.
_MISSING_RIGHT = re.compile(r'You are not a\b')

#: Why a gateway does not accept a token (RFC 6750).
_DESCRIPTION = re.compile(r'error_description="([ !#-~]{1,300})"')

#: What to check if CouchDB ignores the credentials.
_HANDLERS = {
    'jwt': 'does the option authentication_handlers of the server have jwt_authentication_handler?',
    'iam': 'does the server accept tokens of this token server?',
    'proxy': 'does the option authentication_handlers of the server have proxy_authentication_handler, and is the '
    "token the HMAC of the user's name?",
}

_COOKIE = re.compile(r'\bAuthSession="?([\w.~+/=-]+)', re.ASCII)
#: Nine digits are 31 years. Python cannot convert a number of hundreds of digits to a time.
_MAX_AGE = re.compile(r'\bMax-Age=(\d{1,9})', re.IGNORECASE | re.ASCII)

#: A function that posts JSON to `/_session` and returns the response, with any status, or the error. It does not raise
#: the error, because the frames of its traceback contain the password.
Post = Callable[[bytes], 'requests.Response | errors.CouchDBError']


def _headers_of(login: Credentials, address: Address) -> LoginHeaders:
    """Return the headers that contain credentials."""
    if login == ANONYMOUS:
        return LoginHeaders()
    if address.auth in BEARER:
        return LoginHeaders({'Authorization': f'Bearer {login.password}'})
    if address.auth == 'proxy':
        roles = {'X-Auth-CouchDB-Roles': ','.join(address.proxy_roles)} if address.proxy_roles else {}
        user = {'X-Auth-CouchDB-UserName': str(login.user), 'X-Auth-CouchDB-Token': login.password}
        return LoginHeaders({**user, **roles})
    encoded = b64encode(f'{login.user}:{login.password}'.encode()).decode('ascii')
    return LoginHeaders({'Authorization': f'Basic {encoded}'})


class Auth:
    """Authentication of one user at one node. Thread-safe; `couchdb.server` shares it between clients."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._tokens = TokenServer(address) if address.auth == 'iam' else None
        self._user = address.user
        #: Whether the name of the user may still be unknown.
        self._is_unread = bool(address.credentials) or address.auth in BEARER
        self._may_change = credentials.may_change(address) or self._tokens is not None
        #: The credentials in use, and the monotonic time since when.
        self._used, self._used_since = ANONYMOUS, -inf
        #: The credentials that CouchDB refused last, its reason, and the monotonic time until which they are not sent.
        self._refused: Credentials | None = None
        self._refused_reason = ''
        self._refused_until = 0.0
        #: The monotonic time of the last attempt to get new headers, and its error.
        self._last_attempt: tuple[float, errors.CouchDBError | None] = 0.0, None
        self._headers: LoginHeaders | None = None
        #: The monotonic times from which on the headers are not used, and from which on others are asked for.
        self._ends = self._renewed_at = inf
        self.reset()

    def reset(self) -> None:
        """Create a new lock in a forked child. The child uses the session or token of its parent."""
        self._lock = threading.Lock()
        if self._tokens:
            self._tokens.reset()

    @property
    def user(self) -> str | None:
        """The name of the user; None if it is not known, or if there is none. May ask the source, see `headers`."""
        if self._is_unread:
            with self._lock:
                self._name(self._read())
        return self._user

    @property
    def who(self) -> str | None:
        """The words for the user in error texts; None for anonymous requests. May ask the source, see `headers`."""
        if user := self.user:
            return f'user {user!r:.80}'
        return f'the {SECRETS[self._address.auth]}' if self._address.auth in BEARER else None

    def headers(self, post: Post) -> LoginHeaders:
        """Return the authentication headers for a request; begin a session, or get a token, if none is valid.

        `post` sends the request that begins a session.

        *Raises* `AccessDenied` if CouchDB refused the password and no source can supply another one;
        `ServerUnavailable` if CouchDB refused it and a source can, if that source fails, or while the user is locked;
        `ConfigurationError` if user or password are missing or cannot be sent; and the errors of the request that
        begins a session.
        """
        called_at = time.monotonic()
        with self._lock:
            now = time.monotonic()
            if self._headers is None or now > self._ends:
                failed_at, error = self._last_attempt
                if error is not None and failed_at > called_at:
                    # Another thread has tried while this one waited for the lock. With an attempt of its own, each
                    # thread would wait for the time limits of all threads before it.
                    raise copy.copy(error)
                self._discard_headers()
                self._authenticate(post)
            elif now > self._renewed_at:
                self._renewed_at = inf
                self._start_renewal()
            assert self._headers is not None
            return self._headers

    def renew(self, used: LoginHeaders, response: requests.Response, *, is_last: bool = False) -> bool:
        """Return whether to repeat a request, sent with the headers `used`, after a response with a refusing status.

        `REFUSED` has these statuses. CouchDB has not executed such a request. True: call `headers` again, it returns
        other headers. False: the credentials are not the reason, or the user lacks a right. With `is_last` the request
        is not repeated.

        *Raises* the errors of `headers` if no other credentials are available.
        """
        reason = failures.reason_of(response)
        with self._lock:
            if self._address.auth not in TOKENS:
                return self._renew_password(used, response.status_code, reason)
            is_refused = _refuses_token(response, reason)
            if found := _DESCRIPTION.search(response.headers.get('WWW-Authenticate', '')):
                reason = found[1]
            return self._renew_token(used, reason, is_refused, is_last)

    def observe(self, used: LoginHeaders, response: requests.Response) -> None:
        """Use the new cookie if the server extended the session in this response."""
        if 'Set-Cookie' in response.headers and used.is_session:
            with self._lock:
                if self._headers is used:
                    self._take_cookie(response)

    # -- The caller of these methods holds the lock.

    def _discard_headers(self) -> None:
        self._headers, self._ends, self._renewed_at = None, inf, inf

    def _authenticate(self, post: Post) -> None:
        """Get new headers."""
        error: errors.CouchDBError | None = None
        try:
            login = self._read_allowed()
            if self._address.auth == 'cookie' and login != ANONYMOUS:
                self._used = login
                error = self._begin_session(post, login)
            else:
                self._use(login)
        except errors.CouchDBError as exc:
            self._last_attempt = time.monotonic(), copy.copy(exc)  # a copy has no traceback
            raise
        self._last_attempt = time.monotonic(), copy.copy(error)
        if error is not None:
            raise error

    def _begin_session(self, post: Post, login: Credentials) -> errors.CouchDBError | None:
        """Begin a session and return None, or the error. The caller raises it, without the response in its frames."""
        response = post(json.dumps({'name': login.user, 'password': login.password}).encode())
        if isinstance(response, errors.CouchDBError):
            return response
        if response.status_code in (401, 403):
            self._note_refusal(login, failures.reason_of(response))
            return self._refusal()
        is_offered = response.status_code not in (404, 405, 501)
        if is_offered and response.status_code >= 400:
            return failures.from_status(response, self._address.server, f'user {login.user!r:.80}', 0)
        if not (is_offered and self._take_cookie(response)):
            return errors.NotCouchDB(f'{self._address.server} did not begin a session; use the option auth="basic"')
        return None

    def _take_cookie(self, response: requests.Response) -> bool:
        header = response.headers.get('Set-Cookie', '')
        if cookie := _COOKIE.search(header):
            age = _MAX_AGE.search(header)
            self._headers = LoginHeaders({'Cookie': f'AuthSession={cookie[1]}'})
            self._ends = time.monotonic() + int(age[1]) * _USED_SHARE if age else inf
        return bool(cookie)

    def _use(self, login: Credentials) -> None:
        """Send these credentials from now on."""
        self._name(login)
        self._used, self._used_since = login, time.monotonic()
        self._headers = _headers_of(login, self._address)
        is_kept = login.seconds is None or not self._may_change
        self._ends = inf if is_kept else self._used_since + max(_MIN_SECONDS, login.seconds or 0.0)
        self._plan_renewal()

    def _plan_renewal(self) -> None:
        now = time.monotonic()
        self._renewed_at = now + max(_MIN_SECONDS, (self._ends - now) * _RENEWED_SHARE)

    def _read(self, used: Credentials | None = None) -> Credentials:
        """Return the credentials, from their source if there is one; if possible other ones than `used`.

        This needs no lock.
        """
        if self._tokens:
            return self._tokens.token(used)
        login = credentials.read(self._address)
        return described(login.password, login.user) if self._address.auth == 'jwt' else login

    def _read_allowed(self, used: Credentials | None = None) -> Credentials:
        """Return the credentials; *raises* the error if CouchDB refused them recently."""
        login = self._read(used)
        self._name(login)
        if login == self._refused and time.monotonic() < self._refused_until:
            raise self._refusal()
        return login

    def _name(self, login: Credentials) -> None:
        self._user, self._is_unread = login.user, False

    def _renew_password(self, used: LoginHeaders, status: int, reason: str) -> bool:
        if self._headers is not used:
            return True  # another thread has replaced the headers
        if _WRONG_PASSWORD.search(reason) or failures.is_account_lock(reason):
            self._note_refusal(self._used, reason)
        elif status != 401 or not used.is_session:
            return False
        self._discard_headers()
        self._read_allowed()
        return True

    def _renew_token(self, used: LoginHeaders, reason: str, is_refused: bool | None, is_last: bool) -> bool:
        if is_refused is False:
            return False
        is_current = self._headers is used
        if is_refused:
            self._refused_reason = reason.rstrip('.')
        if is_refused and is_current:
            self._note_refusal(self._used, reason)
            self._discard_headers()
        if is_refused and (is_last or (is_current and not self._may_change)):
            raise self._refusal()
        if not is_current:
            return True
        # If it is not certain that the token is the reason, a new one does not help: the user lacks a right.
        is_new = time.monotonic() < self._used_since + _LOCKED_SECONDS
        if not is_refused and (is_new or is_last or not self._may_change):
            return False
        login = self._read_allowed(self._used)
        if login == self._used:
            return False
        self._use(login)
        return True

    # -- renewal before the end

    def _start_renewal(self) -> None:
        """Ask the source for the next token, in a thread: meanwhile requests use this one."""
        used = self._headers, self._used
        thread = threading.Thread(target=self._renew_early, args=used, name='celery-couchdb-token', daemon=True)
        with suppress(RuntimeError):  # no thread can be started when the interpreter ends
            thread.start()

    def _renew_early(self, headers: LoginHeaders, used: Credentials) -> None:
        login = used
        try:
            login = self._read(used)
        except errors.CouchDBError as exc:
            logger.warning('%s; the present token is used until it ends', exc)
        with self._lock:
            if self._headers is not headers:
                return  # another thread has replaced the token, which was refused or has ended
            if login == used:
                self._plan_renewal()
            else:
                self._use(login)

    # -- refusals

    def _note_refusal(self, login: Credentials, reason: str) -> None:
        is_short = self._address.auth in TOKENS or failures.is_account_lock(reason)
        self._refused, self._refused_reason = login, reason.rstrip('.')
        self._refused_until = time.monotonic() + (_LOCKED_SECONDS if is_short else REFUSED_SECONDS)

    def _refusal(self) -> errors.CouchDBError:
        server, auth, reason = self._address.server, self._address.auth, self._refused_reason
        who = f'user {self._user!r:.80}' if self._user else ''
        if failures.is_account_lock(reason):
            return errors.account_locked(server, who)
        seconds = max(0.0, self._refused_until - time.monotonic())
        if auth not in TOKENS:
            what, text = 'password', f'{server} refused {who or errors.NOBODY}: {reason}; '
            remedy = 'check the user, password and rights; '
        else:
            what, text = 'token', f'{server} refused the token{" of " * bool(who)}{who}: {reason}; '
            remedy = _HANDLERS[auth] if _IGNORED.search(reason) else 'replace it'
        pause = f'the same {what} is not sent again for {seconds:.0f} s'
        if self._may_change:
            return errors.ServerUnavailable(f'{text}{pause}, and the source of the {what} is asked for a new one')
        if what == 'token':
            return errors.AccessDenied(f'{text}{remedy}')
        return errors.AccessDenied(f'{text}{remedy}{pause}, because CouchDB locks users after wrong passwords')


def _refuses_token(response: requests.Response, reason: str) -> bool | None:
    """Tell whether a server has refused the token of a request; None if a right may be missing instead."""
    if _WRONG_TOKEN.match(reason):
        return True
    if response.status_code != 401 or _MISSING_RIGHT.match(reason):
        return False
    # A gateway asks for a token, or says nothing that CouchDB would say.
    asks = 'bearer' in response.headers.get('WWW-Authenticate', '').lower()
    is_about = _IGNORED.search(reason) or _ABOUT_TOKENS.search(reason) or not failures.body_of(response)
    return True if asks or is_about else None
