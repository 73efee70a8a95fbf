"""A TCP proxy on loopback that can be cut, closed and made silent: a network that fails on demand."""

from __future__ import annotations

import selectors
import socket
import threading
from typing import Any


class Proxy:
    """Passes everything on to `(host, port)`; a context manager."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener: socket.socket | None = None
        self.port = 0
        self._open = threading.Event()  # unset: bytes are neither read nor passed on
        self._open.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        #: How many connections were accepted, in all.
        self.accepted = 0
        self.restore()

    def cut(self) -> None:
        """Cut all connections; new ones are accepted."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def refuse(self) -> None:
        """Cut all connections and refuse new ones."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.cut()

    def restore(self) -> None:
        """Accept connections again, at the same port."""
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(('127.0.0.1', self.port))
        self._listener.listen(128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def hang(self) -> None:
        """Accept everything, and pass nothing on."""
        self._open.clear()

    def go_on(self) -> None:
        """Pass on again, what was held back included."""
        self._open.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(here,), daemon=True).start()

    def _serve(self, here: socket.socket) -> None:
        with here, socket.create_connection(self._target) as there, selectors.DefaultSelector() as selector:
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((here, there))
            selector.register(here, selectors.EVENT_READ, there)
            selector.register(there, selectors.EVENT_READ, here)
            try:
                while True:
                    for key, _ in selector.select():
                        self._open.wait()
                        data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                        if not data:
                            return
                        key.data.sendall(data)
            except OSError:
                return

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._open.set()
        self.refuse()
