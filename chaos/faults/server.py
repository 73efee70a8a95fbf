"""Faults of the server."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping

from kombu_couchdb.admin.rotation import rotate
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client

from ..site import LEASE
from .base import WHILE, Fault

__all__ = ['DatabaseMoved', 'ServerKilled', 'ServerPaused', 'ServerStopped']

#: How long a move may take until it is killed, in seconds.
_MOVING_SECONDS = (0.5, 5.0)


class ServerFault(Fault):
    """A fault of the server, which affects all processes."""

    span = WHILE

    @property
    def locks(self) -> list[threading.Lock]:
        """The lock of the server."""
        return [self.site.server.lock]

    def heal(self) -> None:
        """Start the server again."""
        self.site.server.start()


class ServerStopped(ServerFault):
    """The server is stopped and started again."""

    name = 'server stopped'

    def begin(self, children: Mapping[str, int]) -> None:
        """Stop the server."""
        self.site.server.stop()


class ServerKilled(ServerFault):
    """The server is killed and started again."""

    name = 'server killed'

    def begin(self, children: Mapping[str, int]) -> None:
        """Kill the server."""
        self.site.server.kill()


class ServerPaused(ServerFault):
    """The server is paused: it accepts connections, and does not respond."""

    name = 'server paused'

    def begin(self, children: Mapping[str, int]) -> None:
        """Pause the server."""
        self.site.server.pause()

    def heal(self) -> None:
        """Resume the server."""
        self.site.server.resume()


class DatabaseMoved(ServerFault):
    """The database of the broker or of results is moved; the command is killed meanwhile, and run again."""

    name, span, interrupts = 'database moved', _MOVING_SECONDS, False

    def begin(self, children: Mapping[str, int]) -> None:
        """Start to move the database."""
        client = (self.site.client, self.site.result_client)[self.target % 2]
        self._address = client.address
        self._process = self._start()

    def heal(self) -> None:
        """Kill the command, and run it until the database is moved."""
        self._process.kill()
        self._process.join()
        again = self._start()
        again.join()
        if again.exitcode:
            raise RuntimeError(f'the command has ended with {again.exitcode}')

    def _start(self) -> multiprocessing.process.BaseProcess:
        process = multiprocessing.get_context('spawn').Process(target=_move, args=[self._address])
        process.start()
        return process


def _move(address: Address) -> None:
    rotate(Client(address, request_timeout=60.0), lambda *progress: None, age=2 * LEASE)
