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
from typing import Any

from kombu_couchdb.couchdb.auth import Auth
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, CouchDBError

from ..cli.clients import broker_of, results_of
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


class Accounts:
    """The accounts of one page, each once: its browsers share what is read. Thread-safe."""

    def __init__(self, app: Any, reader_role: str) -> None:
        self._app, self._reader_role = app, reader_role
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._known = weakref.WeakValueDictionary[str, Account]()
        self._attempts = Attempts()
        broker, results = broker_of(app, seconds=_SECONDS), results_of(app, seconds=_SECONDS)
        #: The account of the app's own user.
        self.own = Account(None, True, app, broker, results, Live(broker, results))

    def log_in(self, user: str, password: str) -> Account:
        """Return the account of a CouchDB user whose password CouchDB accepts.

        *Raises* `LoginRefused`, and the errors of `Client` if CouchDB does not respond.
        """
        if not user or not password:
            raise LoginRefused('Give the name and the password of a CouchDB user.')
        self._attempts.begin(user)
        try:
            broker = broker_of(self._app, (user, password), seconds=_SECONDS)
        except CouchDBError:
            raise LoginRefused('This user or password cannot be sent to CouchDB.') from None
        try:
            roles = _roles(broker, user)
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
        results = results_of(self._app, (user, password), seconds=_SECONDS)
        return self._shared(user, password, self._reader_role not in roles, broker, results)

    def _shared(self, user: str, password: str, may_act: bool, broker: Client, results: Client | None) -> Account:
        seal = hmac.digest(self._key, password.encode('utf-8', 'surrogatepass'), hashlib.sha256)
        with self._lock:
            known = self._known.get(user)
            if known and known.may_act is may_act and hmac.compare_digest(known.seal, seal):
                return known
            account = Account(user, may_act, self._app, broker, results, Live(broker, results), seal)
            self._known[user] = account
        # When the last session of the account has ended, no password of it is left in this process.
        weakref.finalize(account, _end, account.live, broker, results).atexit = False
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


def _roles(broker: Client, user: str) -> list[str]:
    """Return the roles of a user; *raises* `LoginRefused` if CouchDB does not accept its password."""
    try:
        context = broker.session()
    except AccessDenied:
        context = {'name': None}
    if context['name'] != user:
        raise LoginRefused('CouchDB does not accept this user and password.')
    roles: list[str] = context['roles']
    return roles


def _end(live: Live, broker: Client, results: Client | None) -> None:
    live.close()
    for client in filter(None, (broker, results)):
        _forget(client)


def _forget(client: Client) -> None:
    for address in (client.address, *client.address.others):
        Auth.forget(address)
