"""Faults of the server."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from .base import WHILE, Fault

__all__ = ['ServerKilled', 'ServerPaused', 'ServerStopped']


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
