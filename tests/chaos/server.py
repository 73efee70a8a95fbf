"""The server, which can be stopped, killed and started again if its data persists."""

from __future__ import annotations

import shlex
import subprocess
import threading
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client

__all__ = ['Server']

#: How long a request of the suite itself may take, in seconds.
_PATIENCE = 60.0


@dataclass
class Server:
    """A server at a URL, and the commands that change its state; without commands it is not touched."""

    url: str
    starting: str | None = None
    stopping: str | None = None
    killing: str | None = None
    pausing: str | None = None
    resuming: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def parts(self) -> SplitResult:
        """The parts of the URL."""
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        """The host of the URL."""
        return self.parts.hostname or 'localhost'

    @property
    def port(self) -> int:
        """The port of the URL."""
        return self.parts.port or 5984

    def client(self, database: str) -> Client:
        """Return a client for a database, without a proxy."""
        return Client(
            Address(
                host=self.host,
                port=self.port,
                database=database,
                user=unquote(self.parts.username or '') or None,
                password=unquote(self.parts.password or '') or None,
            ),
            HTTPOptions(_PATIENCE, _PATIENCE),
        )

    def url_through(self, port: int, database: str) -> str:
        """Return the `couchdb://` URL of a database through the proxy at `port`."""
        login, at, _ = self.parts.netloc.rpartition('@')
        return f'couchdb://{login}{at}127.0.0.1:{port}/{database}'

    def start(self) -> None:
        """Start the server; *raises* `CalledProcessError`."""
        self._run(self.starting)

    def stop(self) -> None:
        """Stop the server; *raises* `CalledProcessError`."""
        self._run(self.stopping)

    def kill(self) -> None:
        """Kill the server; *raises* `CalledProcessError`."""
        self._run(self.killing)

    def pause(self) -> None:
        """Pause the server; *raises* `CalledProcessError`."""
        self._run(self.pausing)

    def resume(self) -> None:
        """Make a paused server continue; *raises* `CalledProcessError`."""
        self._run(self.resuming)

    def _run(self, command: str | None) -> None:
        assert command is not None
        subprocess.run(shlex.split(command), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
