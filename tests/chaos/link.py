"""A slow network link: a TCP proxy on loopback with a limited rate in each direction, shared by all connections."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

__all__ = ['Link']

#: The size of one forwarded piece and of the socket buffers, in bytes. Larger buffers would hide how slow the link is.
_PIECE, _BUFFER = 4096, 32_768


class _Direction:
    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.passed = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def wait(self, size: int) -> None:
        """Wait until the link has time for `size` more bytes."""
        with self._lock:
            self.passed += size
            self._free = max(time.monotonic(), self._free) + size / self.rate
            free = self._free
        time.sleep(max(0.0, free - time.monotonic()))


class Link:
    """Forwards connections to `(host, port)` at `rate` bytes a second; a context manager.

    It listens at `own_port`; 0 means any free port.
    """

    def __init__(self, host: str, port: int, rate: float, own_port: int = 0) -> None:
        self._target = (host, port)
        self.up, self.down = _Direction(rate), _Direction(rate)
        self._ends: list[socket.socket] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(('127.0.0.1', own_port))
        self._listener.listen(128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(self._target)
            except OSError:
                here.close()
                continue
            there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self._ends += [here, there]
            for source, sink, direction in ((here, there, self.up), (there, here, self.down)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_pump, args=(source, sink, direction), daemon=True).start()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            _end(end)


def _pump(source: socket.socket, sink: socket.socket, direction: _Direction) -> None:
    try:
        while data := source.recv(_PIECE):
            direction.wait(len(data))
            sink.sendall(data)
    except OSError:
        pass
    _end(source)
    _end(sink)


def _end(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
    end.close()
