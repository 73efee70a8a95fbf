"""Bounds of time and size for one request and its answer, where both pass: at the socket.

The time limit of a socket is one for each read. A server or proxy that sends a byte now and then, or `100 Continue` for ever,
would hold a thread as long as it likes. So an answer has a time for its head, however many pieces that comes in, and its body
has to arrive at some pace; a longpoll may be silent from one empty line to the next.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http.client import HTTPResponse
from ssl import SSLError
from typing import Any

from requests.adapters import HTTPAdapter

from ..errors import NO_HANDSHAKE, AnswerTooLarge

__all__ = ['LARGEST', 'ORDINARY', 'SLOWEST', 'Bounds', 'BoundedAdapter', 'Upload', 'answers_within']

#: The slowest link for which the time limit of a request allows, in bytes a second.
SLOWEST = 100_000

#: The largest answer in bytes, unless one is known to be larger: more than 30 documents as large as CouchDB takes them by
#: default, or 250 results of 1 MB. What is larger and read together can be read in parts.
LARGEST = 256_000_000


@dataclass(frozen=True)
class Bounds:
    """How an answer may come: whether it is a longpoll, and how many bytes more than `LARGEST` it may have."""

    longpoll: bool = False
    more: int = 0


#: Those of most requests.
ORDINARY = Bounds()

_bounds: ContextVar[Bounds] = ContextVar('bounds', default=ORDINARY)


@contextmanager
def answers_within(bounds: Bounds) -> Iterator[None]:
    """Give the requests that this thread sends meanwhile these bounds."""
    token = _bounds.set(bounds)
    try:
        yield
    finally:
        _bounds.reset(token)


class Upload(io.BytesIO):
    """The body of a large request, which is sent in blocks: all of them within `seconds`. *Raises* `TimeoutError`."""

    def __init__(self, data: bytes, seconds: float) -> None:
        super().__init__(data)
        self._until = time.monotonic() + seconds

    def read(self, size: int | None = -1) -> bytes:
        """Return the next block."""
        if time.monotonic() > self._until:
            raise TimeoutError('timed out')
        return super().read(size)


class _Source(io.RawIOBase):
    """Reads from a socket within bounds; *raises* `TimeoutError`, `AnswerTooLarge`.

    The time limit that the socket has at first is that for the head. A body may pause for as long in all, and each
    100 kB of it give back a second of that.
    """

    def __init__(self, raw: Any, sock: Any, bounds: Bounds) -> None:
        self._raw, self._sock, self._bounds = raw, sock, bounds
        self._most = self._left = sock.gettimeout()
        self._seen = time.monotonic()
        self._size = 0
        #: Whether the head has been read, and whether what follows may be silent from one read to the next.
        self.in_body = self.may_pause = False

    def readinto(self, buffer: Any) -> int | None:
        """Read what is there, after a wait if need be."""
        pace = 0.0
        if self.may_pause:
            self._left = self._most
        elif self._left is not None:
            now = time.monotonic()
            self._left, self._seen = self._left - (now - self._seen), now
            if self._left <= 0.0:
                raise TimeoutError('timed out')
            pace = 1 / SLOWEST if self.in_body else 0.0
        self._sock.settimeout(self._left)
        count: int | None = self._raw.readinto(buffer)
        self._size += count or 0
        if self._size > LARGEST + self._bounds.more:
            raise AnswerTooLarge
        if self._left is not None:
            self._left = min(self._most, self._left + (count or 0) * pace)
        return count

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def fileno(self) -> int:
        """Return the socket's."""
        return int(self._raw.fileno())

    def close(self) -> None:
        """Let go of the socket."""
        if not self.closed:
            self._raw.close()
        super().close()


class _Answer(HTTPResponse):
    """An answer that is read within the bounds of the thread that asked."""

    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._source = _Source(self.fp.detach(), sock, _bounds.get())
        self.fp = io.BufferedReader(self._source)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Read the head."""
        super().begin(*args, **kwargs)
        self._source.in_body = True
        self._source.may_pause = _bounds.get().longpoll and self.status < 400


def _bounded(pool: Any) -> Any:
    """Return a class of connection pools like this one, whose connections read answers within bounds."""
    connection = type('Bounded' + pool.ConnectionCls.__name__, (_Connection, pool.ConnectionCls), {})
    return type('Bounded' + pool.__name__, (pool,), {'ConnectionCls': connection})


class _Connection:
    response_class = _Answer

    def connect(self) -> None:
        """Connect; *raises* `SSLError` where nobody answers the TLS handshake: a server without TLS may wait for more."""
        try:
            super().connect()  # type: ignore[misc]
        except TimeoutError as exc:
            if getattr(self, '_tunnel_host', None) and 'handshake' not in str(exc):
                raise  # the proxy is silent
            raise SSLError(0, NO_HANDSHAKE) from None  # of one argument alone it makes a tuple


class BoundedAdapter(HTTPAdapter):
    """The connection pools of a client; each answer is read within the bounds of the thread that asked."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pools."""
        super().init_poolmanager(*args, **kwargs)
        _bound(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """Return the pools for a proxy."""
        known = proxy in self.proxy_manager
        manager = super().proxy_manager_for(proxy, **kwargs)
        if not known:
            _bound(manager)
        return manager


def _bound(manager: Any) -> None:
    manager.pool_classes_by_scheme = {scheme: _bounded(pool) for scheme, pool in manager.pool_classes_by_scheme.items()}
