"""A request on its way from a client to the socket, with the limits that its caller has set for the thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple


@dataclass(frozen=True)
class HTTPOptions:
    """How a client sends requests. Durations are seconds."""

    #: How long the response to a request may take.
    request_timeout: float = 8.0
    #: How long it may take to connect.
    connect_timeout: float = 4.0
    #: The most idle connections of a client to a node. More may be in use; those are closed after use.
    idle_connections: int = 16

    @property
    def seconds(self) -> float:
        """How long a request may take in all, if it is not large."""
        return self.connect_timeout + self.request_timeout


class Limits(NamedTuple):
    """The limits of all requests that a thread sends."""

    #: The monotonic time at which they end, see `time_limit`.
    until: float = inf
    #: For how many seconds they wait at most, before the requests of others; None: they are not urgent. See `urgent`.
    patience: float | None = None


_NO_LIMITS = Limits()

#: The limits of the current thread.
_limits: ContextVar[Limits] = ContextVar('limits', default=_NO_LIMITS)


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Let all requests that the current thread sends inside the `with` block end within `seconds`; None: no limit.

    They have the time limits of their clients as well, and an outer limit.
    """
    until, patience = _limits.get()
    token = _limits.set(Limits(min(until, inf if seconds is None else time.monotonic() + seconds), patience))
    try:
        yield
    finally:
        _limits.reset(token)


def seconds_left() -> float:
    """Return the seconds that `time_limit` leaves for requests of the current thread; infinity without a limit."""
    return _limits.get().until - time.monotonic()


@contextmanager
def urgent(seconds: float = inf) -> Iterator[None]:
    """Send requests of the current thread before those of others that wait: a lease or a message depends on them.

    They wait for `seconds` at most, and *raise* `ServerUnavailable` after that.
    """
    token = _limits.set(Limits(_limits.get().until, seconds))
    try:
        yield
    finally:
        _limits.reset(token)


@dataclass(frozen=True)
class Call:
    """One request. It may be sent several times: to another node, with another login, or after a pause.

    A large request has one more second than its `timeouts` for each 100 kB, see `couchdb.bounds`.
    """

    method: str
    #: Relative to the URL of the database, see also `is_of_server`.
    path: str
    #: The parameters of the URL, encoded, with the question mark.
    query: str = ''
    body: bytes | None = field(default=None, repr=False)
    #: Seconds to connect, and seconds to wait for the response, without the time for which the request waits its turn.
    timeouts: tuple[float, float] = (4.0, 8.0)
    #: Whether the path is relative to the URL of the server instead, because the request does not concern one database.
    is_of_server: bool = False
    #: The number of documents to write, or of queries, in the body.
    size: int = 1
    #: Whether the request may be sent again if the connection was cut before the response, as a read may.
    repeat: bool = False
    #: Whether the response is a longpoll, which may pause between two reads, and which the caller reads.
    longpoll: bool = False
    #: The bytes that the response may have in addition to `bounds.MAX_RESPONSE_BYTES`.
    extra_bytes: int = 0
    #: The limits that its caller has set.
    limits: Limits = field(default_factory=_limits.get)

    @property
    def seconds_left(self) -> float:
        """The seconds that its limits leave; infinity without a limit."""
        return self.limits.until - time.monotonic()
