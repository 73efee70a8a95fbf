"""The CouchDB users of the page: each has clients of its own, so that it sees and does what CouchDB allows it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Any

from kombu_couchdb.couchdb.address import BEARER, SECRETS
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import finalize
from kombu_couchdb.couchdb.server import Server
from kombu_couchdb.couchdb.tokens import described
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError, ServerUnavailable
from kombu_couchdb.log import get_logger

from ..cli.clients import Login, broker_of, results_of
from .live import Live

logger = get_logger(__name__)

#: The time limit of a request to CouchDB, in seconds.
_SECONDS = 10.0

#: How many wrong passwords of one user are tried within this time, in seconds. CouchDB locks a user for five minutes
#: after five of them from one machine, whether right ones come between them or not (measured on CouchDB 3.5), and
#: workers on it would be locked out with their user.
_MAX_FAILURES, _FAILURE_SECONDS = 3, 300.0

#: The number of counters of wrong passwords. Names share them, so that names which somebody makes up need no memory.
_COUNTERS = 1000

#: The maximum length of a name, and of a password or token, in characters.
_MAX_CHARACTERS = 8000

#: The roles of a user are read again after this time, in seconds.
_ROLES_SECONDS = 60.0


class LoginRefused(Exception):
    """Somebody cannot log in; the text says why, in one sentence."""


@dataclass(eq=False)
class Account:
    """A CouchDB user, with clients for the databases of broker and results."""

    #: The CouchDB user; None for that of the app.
    user: str | None
    #: Whether its roles allow it to change anything, as they were read last.
    may_act: bool
    app: Any
    broker: Client
    results: Client | None
    live: Live
    #: Tells whether a password is the one of this account, without the password.
    seal: bytes = b''
    #: The monotonic time at which its sessions end: with its token, or when CouchDB does not accept the user any more.
    ends: float = inf
    #: The monotonic time at which its roles were read.
    read_at: float = field(default_factory=time.monotonic)


class Accounts:
    """The accounts of one page, each once: its browsers share what is read. Thread-safe."""

    def __init__(self, app: Any, reader_role: str) -> None:
        self._app, self._reader_role = app, reader_role
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._known = weakref.WeakValueDictionary[str, Account]()
        broker, results = broker_of(app, seconds=_SECONDS), results_of(app, seconds=_SECONDS)
        auth = broker.address.auth
        #: Whether users log in with a token, which has their name.
        self.by_token = auth in BEARER
        #: What they log in with beside their name.
        self.secret = SECRETS[auth] if self.by_token else 'password'
        #: The account of the app's own user.
        self.own = Account(None, True, app, broker, results, Live(broker, results))

    def log_in(self, user: str, password: str) -> Account:
        """Return the account of a CouchDB user whose password CouchDB accepts; a token has the name of the user.

        *Raises* `LoginRefused`, and the errors of `Client` if CouchDB does not respond.
        """
        if not password or not (user or self.by_token):
            raise LoginRefused(f'Give {"" if self.by_token else "the name and "}the {self.secret} of a CouchDB user.')
        # HTTP Basic cuts a name at its first colon: CouchDB would count a wrong password of the user before it.
        if ':' in user or max(len(user), len(password)) > _MAX_CHARACTERS:
            raise LoginRefused(
                f'The name of a CouchDB user has no colon, and neither it nor the {self.secret} has more than '
                f'{_MAX_CHARACTERS:,} characters.'
            )
        login = Login(None if self.by_token else user, password.strip() if self.by_token else password, self.by_token)
        try:
            broker = broker_of(self._app, login, seconds=_SECONDS)
        except CouchDBError:
            raise LoginRefused(f'This user or {self.secret} cannot be sent to CouchDB.') from None
        try:
            return self._account(broker, login)
        except BaseException as exc:
            _forget(broker)  # nothing of the password stays in memory
            if not isinstance(exc, CouchDBError):
                raise
            error = exc
        logger.warning('a login to the page failed: %s', str(error))  # without its frames, which have the password
        if isinstance(error, ServerUnavailable):
            raise ServerUnavailable('CouchDB does not respond just now; the log of the page says more')
        raise type(error)(_public(error, broker))

    def read_roles(self, account: Account) -> None:
        """Read the roles of a user again if they were read a minute ago or earlier.

        All its sessions end if CouchDB does not accept its password or token any more. If CouchDB does not respond, the
        roles stay as they are for one minute more.
        """
        now = time.monotonic()
        if account.user is None or now < account.read_at + _ROLES_SECONDS:
            return
        account.read_at = now
        try:
            _, roles = _identity(account.broker, account.user, self.secret)
        except LoginRefused:
            account.ends = now
        except CouchDBError as exc:
            logger.warning('the roles of the user %r cannot be read again: %s', account.user, str(exc))
        else:
            account.may_act = self._reader_role not in roles

    def _account(self, broker: Client, login: Login) -> Account:
        with nullcontext() if login.user is None else _counters[hash(login.user) % _COUNTERS].attempt():
            user, roles = _identity(broker, login.user, self.secret)
        try:
            broker.info()
        except AccessDenied:
            raise LoginRefused(
                f'The user {user} is no member of the database {broker.address.database}; an administrator can '
                'change that with "couchdb setup".'
            ) from None
        results = results_of(self._app, login, seconds=_SECONDS)
        return self._shared(user, login.password, self._reader_role not in roles, broker, results)

    def _shared(self, user: str, password: str, may_act: bool, broker: Client, results: Client | None) -> Account:
        seconds = described(password, None).seconds if broker.address.auth == 'jwt' else None
        ends = inf if seconds is None else time.monotonic() + seconds
        seal = hmac.digest(self._key, password.encode('utf-8', 'surrogatepass'), hashlib.sha256)
        with self._lock:
            known = self._known.get(user)
            if known and hmac.compare_digest(known.seal, seal):
                known.may_act, known.read_at = may_act, time.monotonic()
                return known
            account = Account(user, may_act, self._app, broker, results, Live(broker, results), seal, ends)
            self._known[user] = account
        # When the last session of the account has ended, no password of it is left in this process.
        finalize(account, _end, account.live, broker, results).atexit = False
        return account


class WrongPasswords:
    """Counts the wrong passwords of a user in the last minutes, and has one password tried at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The monotonic times of the last ones, the oldest first.
        self._dates: list[float] = []

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Wait until no other password of the user is tried; then try one: `LoginRefused` means that it is wrong.

        Other errors do not count: CouchDB did not say whether the password is right. *Raises* `LoginRefused` after too
        many wrong ones, and `ServerUnavailable` if the attempts before this one do not end.
        """
        self._check()
        if not self._lock.acquire(timeout=_SECONDS):
            raise ServerUnavailable('CouchDB does not say whether the passwords before this one are right')
        try:
            self._check()
            try:
                yield
            except LoginRefused:
                self._dates = [*self._dates, time.monotonic()][-_MAX_FAILURES:]
                raise
        finally:
            self._lock.release()

    def _check(self) -> None:
        dates, now = self._dates, time.monotonic()
        if len(dates) == _MAX_FAILURES and (left := dates[0] + _FAILURE_SECONDS - now) > 0:
            minutes = int(left / 60) + 1
            raise LoginRefused(
                f'Too many wrong passwords for this user; try again in {minutes} minute{"s" * (minutes > 1)}.'
            )


#: The counters of this process, for all its pages: to CouchDB they are one machine.
_counters = [WrongPasswords() for _ in range(_COUNTERS)]


def _identity(broker: Client, user: str | None, secret: str) -> tuple[str, list[str]]:
    """Return name and roles of a user, or of whom a token names (None).

    *Raises* `LoginRefused` if CouchDB does not accept the password or token.
    """
    try:
        context = broker.session()
    except CouchDBError as exc:
        if broker.address.auth in BEARER and isinstance(exc, (AccessDenied, ConfigurationError)):
            raise LoginRefused(f'{_public(exc, broker)}.') from None
        if not isinstance(exc, AccessDenied):
            raise
        context = {'name': None}
    if not context['name'] or context['name'] != (user or context['name']):
        raise LoginRefused(f'CouchDB does not accept this {secret if user is None else "user and password"}.')
    return context['name'], context['roles']


def _public(error: CouchDBError, broker: Client) -> str:
    """Return the text of an error for somebody who has not logged in: without the address of CouchDB."""
    text = str(error)
    for node in (broker.address, *broker.address.others):
        text = text.replace(node.server, 'CouchDB')
    return text


def _end(live: Live, broker: Client, results: Client | None) -> None:
    live.close()
    for client in filter(None, (broker, results)):
        _forget(client)


def _forget(client: Client) -> None:
    Server.forget(client.address)
