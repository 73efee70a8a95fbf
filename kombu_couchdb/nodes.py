"""Which node of a cluster is asked: that of the address and, while it does not answer, the next of those that the user has named.

Every node of a CouchDB cluster answers for all of it: what one was told, and what one holds, is the same on another.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from . import errors
from .address import Address
from .clock import ServerClock
from .forks import Shared, reset_in_child
from .log import get_logger
from .login import Login

__all__ = ['Node', 'Nodes']

logger = get_logger(__name__)

#: Connections to a node kept open. More may be open at once; those above this are closed after use.
_POOL = 16

#: From so many bytes on, a request is sent in blocks, each under the time limit of a connection: urllib3 gives it to the whole of
#: what is sent in one piece.
_IN_BLOCKS = 64_000

#: The slowest link for which the time limit of a request allows, in bytes a second.
_SLOWEST = 100_000

_HEADERS = {'Accept': 'application/json', 'Content-Type': 'application/json', 'User-Agent': 'celery-couchdb'}


class Node:
    """Requests to one node. A child has connections of its own.

    `timeouts` are in seconds: to connect, and to be answered. A request of many bytes has more time to be answered, a second
    for each 100 kB of it: they may still be on their way when the last of them was handed to the system.
    """

    def __init__(self, address: Address, clock: ServerClock, timeouts: tuple[float, float]) -> None:
        self.address, self.timeouts, self.login = address, timeouts, Login.of(address)
        self._clock = clock
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Start over, after a fork: the connections are the parent's, and so may be who holds the lock."""
        self._lock = threading.Lock()
        self._pid = 0
        self._not_before = float('-inf')

    def send(self, method: str, path: str | None, query: str, data: bytes | None, read_timeout: float | None = None,
             *, stream: bool = False) -> requests.Response:
        """Send one request below the database (or, with path None, to the server's root) and return the answer.

        *Raises* the errors of `kombu_couchdb.errors`.
        """
        url = (self.address.server + '/' if path is None else self.address.url + path) + query
        for _ in range(2):  # 401 means that nothing was done: whatever it is may be sent again, by somebody else
            who = self.login.headers(self._post_session)
            response = self._exchange(method, url, who, data, read_timeout, stream=stream)
            if response.status_code not in (401, 403) or not self.login.renewed(who, response):
                break
        self.login.observe(who, response)
        # _bulk_docs answers 500 with the usual list when some nodes of a cluster are down: the list tells more.
        if response.status_code >= 400 and not (response.status_code == 500 and response.content[:1] == b'['):
            raise errors.from_status(response, self.address.url, self.login.user, len(data or b''))
        if 300 <= response.status_code < 400:
            raise errors.NotCouchDB(f'{self.address.server} redirects to another address; use that one in the URL')
        return response

    def close(self) -> None:
        """Close the idle connections; who goes on opens new ones."""
        with self._lock:
            if self._pid == os.getpid():
                self._adapter.close()
            self._pid = 0

    def _post_session(self, data: bytes) -> requests.Response:
        return self._exchange('POST', f'{self.address.server}/_session', {}, data)

    def _exchange(self, method: str, url: str, who: Mapping[str, str], data: bytes | None, read_timeout: float | None = None,
                  *, stream: bool = False) -> requests.Response:
        """Send one request and return its answer, whatever its status."""
        prepared = requests.PreparedRequest()
        prepared.method, prepared.url = method, url
        # A new file-like object each time: a request that is sent again is sent from its beginning.
        prepared.body = io.BytesIO(data) if data is not None and len(data) > _IN_BLOCKS else data  # type: ignore[assignment]
        prepared.headers = {**_HEADERS, **who}  # type: ignore[assignment]
        if data is not None or method in ('PUT', 'POST'):
            prepared.headers['Content-Length'] = str(len(data or b''))
        timeout = (self.timeouts[0], (read_timeout or self.timeouts[1]) + len(data or b'') // _SLOWEST)
        adapter, settings = self._connected()
        if (patience := self._not_before - time.monotonic()) > 0:
            time.sleep(patience)
        sent = time.time()
        try:
            response = adapter.send(prepared, stream=stream, timeout=timeout, **settings)
            if not stream or response.status_code >= 400:
                response.content  # noqa: B018 - read the body, so that the connection returns to the pool
        except (OSError, ValueError) as exc:  # requests' errors are OSErrors; urllib3 has a ValueError for impossible hosts
            raise errors.from_transport(exc, self.address.url) from exc
        self._clock.observe(response.headers.get('Date'), sent, time.time())
        if response.status_code in (429, 503):
            # A server that asks for patience has it from all threads, but no longer than one that does not answer at all.
            patience = _patience(response.headers.get('Retry-After'), self._clock.now())
            self._not_before = time.monotonic() + min(patience, self.timeouts[1])
        return response

    def _connected(self) -> tuple[HTTPAdapter, dict[str, Any]]:
        """Return the connection pool of this process and what the environment says of proxies and certificates."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    # Session.send() would read the environment and the cookies for every request: once is enough.
                    session = requests.Session()
                    found = session.merge_environment_settings(
                        self.address.url, {}, False, self.address.verify, self.address.cert)
                    self._settings = {name: found[name] for name in ('verify', 'cert', 'proxies')}
                    self._adapter = HTTPAdapter(pool_connections=2, pool_maxsize=_POOL)
                    self._pid = os.getpid()
        return self._adapter, self._settings


class _Choice:
    """Which of the nodes in a list is asked, by its place."""

    def __init__(self) -> None:
        self.place = 0


#: By the servers in a list: who connects anew does not ask first, and wait for, a node that others in this process have left.
_choices: Shared[tuple[str, ...], _Choice] = Shared({})


class Nodes:
    """The nodes on which one database can be reached. Thread-safe."""

    def __init__(self, address: Address, clock: ServerClock, timeouts: tuple[float, float]) -> None:
        self._nodes = [Node(one, clock, timeouts) for one in (address, *address.others)]
        self._choice = _choices.of(tuple(node.address.server for node in self._nodes), _Choice)

    @property
    def current(self) -> Node:
        """The node that is asked now: all that name the same list in this process ask the same."""
        return self._nodes[self._choice.place]

    def __len__(self) -> int:
        return len(self._nodes)

    def leave(self, node: Node) -> None:
        """Ask the next node from now on, unless another thread has left this one already."""
        if len(self._nodes) > 1 and self.current is node:
            self._choice.place = (self._nodes.index(node) + 1) % len(self._nodes)
            logger.info('%s does not answer as it should; asking %s from now on', node.address.url, self.current.address.url)

    def close(self) -> None:
        """Close the idle connections to all nodes."""
        for node in self._nodes:
            node.close()


def _patience(retry_after: str | None, now: float) -> float:
    """Return how many seconds a `Retry-After` header asks for: it has a number of them, or a date."""
    try:
        return float(retry_after or 0)
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(str(retry_after)).timestamp() - now
    except (TypeError, ValueError, OverflowError):
        return 0.0
