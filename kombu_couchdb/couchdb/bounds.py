"""Limits of time and size for one request and its response, enforced at the socket.

The timeout of a socket applies to each read. A server or proxy that sends one byte now and then, or `100 Continue`
without end, could block a thread for any time. Therefore the head of a response has one time limit for all reads
together, and its body must arrive at a minimum rate. A longpoll may pause between two of its empty lines.
"""

from __future__ import annotations

import io
import time
from contextvars import ContextVar
from http.client import HTTPResponse
from ssl import SSLError
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from ..errors import AnswerTooLarge
from .call import Call
from .failures import NO_HANDSHAKE
from .fork_safety import close_in_child

#: The minimum rate at which requests and responses must be transferred, in bytes per second.
MIN_BYTES_PER_SECOND = 100_000

#: The maximum size of a response in bytes, unless its size is known beforehand: more than 30 documents of CouchDB's
#: default maximum size, or 250 results of 1 MB. The client reads more documents than that in several requests.
MAX_RESPONSE_BYTES = 256_000_000


#: The request that the current thread sends: urllib3 makes the response without any argument of ours.
_sent: ContextVar[Call] = ContextVar('sent')


class Upload(io.BytesIO):
    """The body of a large request, sent in blocks; `read` *raises* `TimeoutError` after `seconds`."""

    def __init__(self, data: bytes, seconds: float) -> None:
        super().__init__(data)
        self._until = time.monotonic() + seconds

    def read(self, size: int | None = -1) -> bytes:
        """Return the next block."""
        if time.monotonic() > self._until:
            raise TimeoutError('timed out')
        return super().read(size)


class _BoundedReader(io.RawIOBase):
    """Reads a response from a socket; *raises* `TimeoutError` and `AnswerTooLarge` if it exceeds its bounds.

    The time limit for the whole head is the timeout that the socket has at the beginning. For the body there remains
    the time that the head did not use, plus one second for each 100 kB received, but never more than that timeout.
    """

    def __init__(self, raw: Any, sock: Any, call: Call) -> None:
        self._raw, self._sock, self._call = raw, sock, call
        self._timeout = self._seconds_left = sock.gettimeout()
        self._last_read = time.monotonic()
        self._size = 0
        #: Whether the head has been read, and whether the body may pause for the full timeout before each read.
        self.in_body = self.may_pause = False

    def readinto(self, buffer: Any) -> int | None:
        """Read available bytes into the buffer, and wait for some if there are none; return their number."""
        seconds_per_byte = 0.0
        if self.may_pause:
            self._seconds_left = self._timeout
        elif self._seconds_left is not None:
            now = time.monotonic()
            self._seconds_left, self._last_read = self._seconds_left - (now - self._last_read), now
            if self._seconds_left <= 0.0:
                raise TimeoutError('timed out')
            seconds_per_byte = 1 / MIN_BYTES_PER_SECOND if self.in_body else 0.0
        self._sock.settimeout(self._seconds_left)
        count: int | None = self._raw.readinto(buffer)
        self._size += count or 0
        if self._size > MAX_RESPONSE_BYTES + self._call.extra_bytes:
            raise AnswerTooLarge
        if self._seconds_left is not None:
            self._seconds_left = min(self._timeout, self._seconds_left + (count or 0) * seconds_per_byte)
        return count

    def readable(self) -> bool:
        """Return True, as `io.BufferedReader` requires."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return int(self._raw.fileno())

    def close(self) -> None:
        """Close the socket's file object."""
        if not self.closed:
            self._raw.close()
        super().close()


class _BoundedResponse(HTTPResponse):
    """The response to the request that the current thread sends, with its bounds."""

    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._reader = _BoundedReader(self.fp.detach(), sock, _sent.get())
        self.fp = io.BufferedReader(self._reader)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Read the head of the response."""
        super().begin(*args, **kwargs)
        self._reader.in_body = True
        self._reader.may_pause = _sent.get().longpoll and self.status < 400


def _bounded_pool_class(pool: Any) -> Any:
    """Return a subclass of urllib3's connection pool `pool` whose responses are bounded."""
    connection = type('Bounded' + pool.ConnectionCls.__name__, (_BoundedConnection, pool.ConnectionCls), {})
    return type('Bounded' + pool.__name__, (pool,), {'ConnectionCls': connection})


class _BoundedConnection:
    response_class = _BoundedResponse

    def connect(self) -> None:
        """Connect; *raises* `SSLError` if the server does not respond to the TLS handshake.

        A server without TLS waits for the rest of the request instead of refusing it.
        """
        try:
            super().connect()  # type: ignore[misc]
        except TimeoutError as exc:
            if getattr(self, '_tunnel_host', None) and 'handshake' not in str(exc):
                raise  # the proxy does not respond
            raise SSLError(0, NO_HANDSHAKE) from None  # with one argument only, str() of the error is a tuple
        sock = self.sock  # type: ignore[attr-defined]
        close_in_child(getattr(sock, 'socket', sock))  # TLS through a proxy with TLS wraps a socket


class BoundedAdapter(HTTPAdapter):
    """Connection pools of a client whose responses are bounded."""

    def send_call(self, call: Call, request: requests.PreparedRequest, **settings: Any) -> requests.Response:
        """Send a request and return the response. The body of a longpoll is not read."""
        token = _sent.set(call)
        try:
            return self.send(request, stream=call.longpoll, **settings)
        finally:
            _sent.reset(token)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Create the pool manager."""
        super().init_poolmanager(*args, **kwargs)
        _use_bounded_pools(self.poolmanager)

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """Return the pool manager for a proxy."""
        known = proxy in self.proxy_manager
        manager = super().proxy_manager_for(proxy, **kwargs)
        if not known:
            _use_bounded_pools(manager)
        return manager


def _use_bounded_pools(manager: Any) -> None:
    pools = manager.pool_classes_by_scheme
    manager.pool_classes_by_scheme = {scheme: _bounded_pool_class(pool) for scheme, pool in pools.items()}
