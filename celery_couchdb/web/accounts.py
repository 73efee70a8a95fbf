"""The CouchDB users of the page: each has clients of its own, so that it sees and does what CouchDB allows it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from math import inf
from typing import Any

from kombu_couchdb.couchdb.address import BEARER, SECRETS
from kombu_couchdb.couchdb.auth import Auth
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import finalize
from kombu_couchdb.couchdb.tokens import described
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError

from ..cli.clients import Login, broker_of, results_of
from .live import Live

#: The time limit of a request to CouchDB, in seconds.
_SECONDS = 10.0

#: How many wrong passwords of one user are tried within this time, in seconds. CouchDB locks a user for five minutes
#: after five of them from one machine, and workers on it would be locked out with their user.
_MAX_FAILURES, _FAILURE_SECONDS = 3, 300.0

#: The maximum number of user names whose failures are remembered.
_MAX_NAMES = 10_000


class LoginRefused(Exception):
    """Somebody cannot log in; the text says why, in one sentence."""


@dataclass(frozen=True)
class Account:
    """A CouchDB user, with clients for the databases of broker and results."""

    #: The CouchDB user; None for that of the app.
    user: str | None
    #: Whether its role allows it to change anything.
    may_act: bool
    app: Any
    broker: Client
    results: Client | None
    live: Live
    #: Tells whether a password is the one of this account, without the password.
    seal: bytes = b''
    #: The monotonic time at which the token of the user ends.
    ends: float = inf


class Accounts:
    """The accounts of one page, each once: its browsers share what is read. Thread-safe."""

    def __init__(self, app: Any, reader_role: str) -> None:
        self._app, self._reader_role = app, reader_role
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._known = weakref.WeakValueDictionary[str, Account]()
        self._attempts = Attempts()
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
        if not self.by_token:
            self._attempts.begin(user)
        login = Login(None if self.by_token else user, password.strip() if self.by_token else password, self.by_token)
        try:
            broker = broker_of(self._app, login, seconds=_SECONDS)
        except CouchDBError:
            raise LoginRefused(f'This user or {self.secret} cannot be sent to CouchDB.') from None
        try:
            user, roles = _identity(broker, login, self.secret)
        except LoginRefused:
            _forget(broker)
            raise
        except CouchDBError:
            self._attempts.undo(user)
            raise
        self._attempts.succeeded(user)
        try:
            broker.info()
        except AccessDenied:
            _forget(broker)
            raise LoginRefused(
                f'The user {user} is no member of the database {broker.address.database}; an administrator can '
                'change that with "couchdb setup".'
            ) from None
        results = results_of(self._app, login, seconds=_SECONDS)
        return self._shared(user, password, self._reader_role not in roles, broker, results)

    def _shared(self, user: str, password: str, may_act: bool, broker: Client, results: Client | None) -> Account:
        seconds = described(password, None).seconds if broker.address.auth == 'jwt' else None
        ends = inf if seconds is None else time.monotonic() + seconds
        seal = hmac.digest(self._key, password.encode('utf-8', 'surrogatepass'), hashlib.sha256)
        with self._lock:
            known = self._known.get(user)
            if known and known.may_act is may_act and hmac.compare_digest(known.seal, seal):
                return known
            account = Account(user, may_act, self._app, broker, results, Live(broker, results), seal, ends)
            self._known[user] = account
        # When the last session of the account has ended, no password of it is left in this process.
        finalize(account, _end, account.live, broker, results).atexit = False
        return account


class Attempts:
    """The logins of the last minutes that failed, by user name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[str, deque[float]] = defaultdict(deque)

    def begin(self, user: str) -> None:
        """Count an attempt; *raises* `LoginRefused` if there were too many."""
        now = time.monotonic()
        with self._lock:
            if len(self._begun) >= _MAX_NAMES:
                known = self._begun.items()
                recent = {name: times for name, times in known if times and now - times[-1] < _FAILURE_SECONDS}
                self._begun = defaultdict(deque, recent)
            times = self._begun[user]
            while times and now - times[0] >= _FAILURE_SECONDS:
                times.popleft()
            if len(times) >= _MAX_FAILURES:
                minutes = int((_FAILURE_SECONDS - now + times[0]) / 60) + 1
                raise LoginRefused(
                    f'Too many wrong passwords for this user; try again in {minutes} minute{"s" * (minutes > 1)}.'
                )
            times.append(now)

    def undo(self, user: str) -> None:
        """Do not count the last attempt: CouchDB did not say whether the password is right."""
        with self._lock:
            if times := self._begun.get(user):
                times.pop()

    def succeeded(self, user: str) -> None:
        """Forget the attempts of a user whose password was right."""
        with self._lock:
            self._begun.pop(user, None)


def _identity(broker: Client, login: Login, secret: str) -> tuple[str, list[str]]:
    """Return name and roles of a user; *raises* `LoginRefused` if CouchDB does not accept its password or token."""
    try:
        context = broker.session()
    except CouchDBError as exc:
        if login.is_token and isinstance(exc, (AccessDenied, ConfigurationError)):
            raise LoginRefused(f'{exc}.') from None
        if not isinstance(exc, AccessDenied):
            raise
        context = {'name': None}
    if not context['name'] or context['name'] != (login.user or context['name']):
        raise LoginRefused(f'CouchDB does not accept this {secret if login.is_token else "user and password"}.')
    return context['name'], context['roles']


def _end(live: Live, broker: Client, results: Client | None) -> None:
    live.close()
    for client in filter(None, (broker, results)):
        _forget(client)


def _forget(client: Client) -> None:
    for address in (client.address, *client.address.others):
        Auth.forget(address)
