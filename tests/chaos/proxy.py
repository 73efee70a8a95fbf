"""A TCP proxy on loopback that can cut, refuse, delay, hold back or replace traffic, and change the server's time."""

from __future__ import annotations

import itertools
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http import HTTPStatus
from typing import Any

__all__ = ['Answer', 'Proxy']

#: How long a client may take to close a connection after a response with `Connection: close`, in seconds.
_CLOSING = 2.0

#: The bytes passed on at a time while the rate is limited.
_PIECE = 8192

#: The size of the receive buffer of a proxy that begins with a limited rate, in bytes.
_BUFFER = 32_768


#: The header `Date` of a response. It always has the same length.
_DATE = re.compile(rb'(?<=\r\n)(Date: )([^\r]{29})(?=\r\n)', re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    """A response that a client receives instead of the server's."""

    status: int
    body: bytes = b'{"error":"chaos","reason":"by order"}'
    headers: tuple[tuple[str, str], ...] = ()
    #: Whether the server receives the request all the same, so that a write is stored and only its response is lost.
    asked: bool = False
    #: After how many seconds the server receives the request, when nobody waits for its response; 0: it never does.
    late: float = 0.0

    def encoded(self) -> bytes:
        """Return the response as bytes of HTTP."""
        head = [
            f'HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}',
            'Content-Type: application/json',
            f'Content-Length: {len(self.body)}',
            'Connection: close',
            *(f'{name}: {value}' for name, value in self.headers),
        ]
        return '\r\n'.join([*head, '', '']).encode() + self.body


class Proxy:
    """Forwards connections to `(host, port)`, perhaps at a limited rate; a context manager."""

    def __init__(self, host: str, port: int, rate: float | None = None) -> None:
        self._target = (host, port)
        self._listener: socket.socket | None = None
        #: Holds the port while connections are refused: no other process gets it.
        self._reservation = _bound(0)
        self.port: int = self._reservation.getsockname()[1]
        self._open = threading.Event()  # unset: bytes are neither read nor forwarded
        self._open.set()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lie: Callable[[bytes], Answer | None] = lambda request: None
        #: How long each chunk of a request or response is delayed, in seconds.
        self.delay = 0.0
        #: The rate of each connection in bytes per second; None: unlimited.
        self.rate = rate
        #: How many seconds the server's clock is ahead, as responses show it.
        self.ahead = 0.0
        #: The number of connections accepted, and of bytes passed on, so far.
        self.accepted = self.passed = 0
        self.restore()

    def cut(self) -> None:
        """Cut all connections; accept new ones."""
        for pair in list(self._pairs):
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def refuse(self) -> None:
        """Cut all connections and refuse new ones."""
        if (listener := self._listener) is not None:
            self._listener = None  # first: see `_serve`
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def restore(self) -> None:
        """Accept connections again on the same port."""
        self._listener = _bound(self.port)
        if self.rate is not None:  # a large buffer would hide from the sender how slow the link is
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._listener.listen(128)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def hang(self) -> None:
        """Accept everything and forward nothing."""
        self._open.clear()

    def go_on(self) -> None:
        """Forward again, including what was held back."""
        self._open.set()

    def forget(self) -> None:
        """Forward again on new connections. Those that were opened before stay silent for ever."""
        self._open = threading.Event()
        self._open.set()

    def lie(self, answer: Answer, every: int = 1, database: str = '/') -> None:
        """Reply with this response to every `every`-th request, of those to a database whose name contains this."""
        numbers = itertools.count(1)
        self._lie = lambda request: (
            answer if database.encode() in request.split(b'\r\n')[0] and not next(numbers) % every else None
        )

    def be_honest(self) -> None:
        """Forward the server's responses again."""
        self._lie = lambda request: None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(here, listener), daemon=True).start()

    def _serve(self, here: socket.socket, listener: socket.socket) -> None:
        try:
            with here, socket.create_connection(self._target) as there:
                self._pairs.add((here, there))
                try:
                    if self._listener is listener:  # else connections were refused before `cut` knew of this one
                        self._relay(here, there)
                finally:
                    self._pairs.discard((here, there))
        except OSError:
            return

    def _relay(self, here: socket.socket, there: socket.socket) -> None:
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_open = self._open
        answer, asking = None, False  # a client sends no request before the response to the previous one
        with selectors.DefaultSelector() as selector:
            selector.register(here, selectors.EVENT_READ, there)
            selector.register(there, selectors.EVENT_READ, here)
            while True:
                for key, _ in selector.select():
                    is_open.wait()
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is here and not asking:
                        answer, asking = self._lie(data), True
                        if answer is not None and answer.late:
                            timer = threading.Timer(answer.late, self._deliver, (_whole(here, data),))
                            timer.daemon = True
                            timer.start()
                        if answer is not None and not answer.asked:
                            return _reply(here, answer)
                    elif key.fileobj is there and asking:
                        asking = False
                        data = _dated(data, self.ahead) if self.ahead else data
                        if answer is not None:
                            return _reply(here, answer)
                    if self.delay:
                        time.sleep(self.delay)
                    self._send(key.data, data)

    def _deliver(self, request: bytes) -> None:
        """Send the server a request for whose response nobody waits."""
        with suppress(OSError), socket.create_connection(self._target) as there:
            there.sendall(request)
            there.recv(65536)

    def _send(self, to: socket.socket, data: bytes) -> None:
        self.passed += len(data)
        while (rate := self.rate) is not None and data:
            piece, data = data[:_PIECE], data[_PIECE:]
            time.sleep(len(piece) / rate)
            to.sendall(piece)
        to.sendall(data)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._open.set()
        self.refuse()
        self._reservation.close()


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(('127.0.0.1', port))
    return bound


def _whole(here: socket.socket, data: bytes) -> bytes:
    """Return the whole request of which `data` was read."""
    while b'\r\n\r\n' not in data:
        data += here.recv(65536)
    head, _, body = data.partition(b'\r\n\r\n')
    length = re.search(rb'(?i)\r\ncontent-length: *(\d+)', head)
    while len(body) < (int(length[1]) if length else 0) and (more := here.recv(65536)):
        body += more
    return head + b'\r\n\r\n' + body


def _dated(answer: bytes, ahead: float) -> bytes:
    """Return the first bytes of a response with its `Date` moved by `ahead` seconds."""

    def later(match: re.Match[bytes]) -> bytes:
        date = parsedate_to_datetime(match[2].decode()) + timedelta(seconds=ahead)
        return match[1] + format_datetime(date, usegmt=True).encode()

    return _DATE.sub(later, answer, count=1)


def _reply(here: socket.socket, answer: Answer) -> None:
    here.sendall(answer.encoded())
    here.shutdown(socket.SHUT_WR)
    here.settimeout(_CLOSING)
    while here.recv(65536):  # closing a socket with unread data resets the connection, which loses the response
        pass
