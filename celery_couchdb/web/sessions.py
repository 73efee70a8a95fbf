"""Sessions of browsers and programs, in the memory of the process: they end with it.

A session ends 12 hours after it began, 30 minutes after its last request (an open page keeps it alive, because it is
live), when the token of its user ends or CouchDB does not accept the user any more, and when its user logs out.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .accounts import Account

#: For how long a session lasts, and for how long without a request or an open page, in seconds.
_MAX_SECONDS, _MAX_IDLE_SECONDS = 12 * 3600.0, 1800.0

#: The maximum number of sessions; the one that was idle for longest ends when there are more.
_MAX_SESSIONS = 10_000


@dataclass(eq=False)
class Session:
    """One browser, or one program, and its user."""

    account: Account
    #: Who acts, as the record of actions says.
    name: str
    #: Whether the user sent a password with each request; then there is no cookie, and nothing can be changed.
    is_program: bool = False
    #: The secret in the forms of this session: a request that changes something has it.
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    began_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    #: The number of open pages, which wait for changes.
    streams: int = 0
    ended: bool = False
    #: What the next page says first: what came of the last action.
    notices: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        now = time.monotonic()
        is_idle = not self.streams and now - self.used_at >= _MAX_IDLE_SECONDS
        return self.ended or is_idle or now - self.began_at >= _MAX_SECONDS or now >= self.account.ends

    def has_token(self, token: str) -> bool:
        """Tell whether this is the secret of the session's forms."""
        return hmac.compare_digest(self.token.encode(), token.encode('utf-8', 'replace'))

    @contextmanager
    def open_page(self) -> Iterator[None]:
        """Keep the session alive meanwhile."""
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1
            self.used_at = time.monotonic()


class Sessions:
    """The sessions of a page, by the secrets that browsers and programs send. Thread-safe."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}

    def find(self, secret: str) -> Session | None:
        """Return the session of this secret, and extend it; None if there is none, or if it has ended."""
        key = self._digest(secret)
        with self._lock:
            self._remove_ended()
            session = self._sessions.pop(key, None)
            if session is None:
                return None
            self._sessions[key] = session  # the last one now
            session.used_at = time.monotonic()
            return session

    def begin(self, session: Session, secret: str | None = None) -> str:
        """Keep a new session, and return its secret, a random one by default."""
        secret = secret or secrets.token_urlsafe(32)
        with self._lock:
            self._remove_ended()
            while len(self._sessions) >= _MAX_SESSIONS:
                self._sessions.pop(next(iter(self._sessions))).ended = True
            self._sessions[self._digest(secret)] = session
        return secret

    def end(self, session: Session) -> None:
        """End a session, as its user wishes."""
        session.ended = True
        with self._lock:
            self._sessions = {key: known for key, known in self._sessions.items() if known is not session}

    def _remove_ended(self) -> None:
        """Forget sessions that are over, and with them the passwords of their users."""
        for key in [key for key, known in self._sessions.items() if known.is_over]:
            self._sessions.pop(key).ended = True

    def _digest(self, secret: str) -> bytes:
        """Return the key of a session, of which nobody learns the secret."""
        return hmac.digest(self._key, secret.encode('utf-8', 'surrogatepass'), 'sha256')
