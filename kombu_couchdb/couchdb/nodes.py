"""Requests to the nodes of a cluster: to one node, and while it does not answer to the next that the user has named.

Every node of a CouchDB cluster answers for all of it: what one was told, and what one holds, is the same on another.
"""

from __future__ import annotations

import os
import threading
import time
from email.utils import parsedate_to_datetime
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from .. import errors
from ..log import get_logger
from .address import Address
from .auth import Auth, Headers
from .bounds import ORDINARY, SLOWEST, BoundedAdapter, Bounds, Upload, answers_within
from .clock import ServerClock
from .fork_safety import Shared, reset_in_child

__all__ = ['Node', 'Nodes']

logger = get_logger(__name__)

#: Connections to a node kept open. More may be open at once; those above this are closed after use.
_POOL = 16

#: From so many bytes on, a request is sent in blocks, each under the time limit of a connection: urllib3 gives it to the whole of
#: what is sent in one piece.
_IN_BLOCKS = 64_000

_HEADERS = {'Accept': 'application/json', 'Content-Type': 'application/json', 'User-Agent': 'celery-couchdb'}


class Node:
    """Requests to one node. A child has connections of its own.

    `timeouts` are in seconds: to connect, and to be answered. A request of many bytes has more time to be answered, a second
    for each 100 kB of it: they may still be on their way when the last of them was handed to the system. So has an answer of
    many bytes, and sending them.
    """

    def __init__(self, address: Address, clock: ServerClock, timeouts: tuple[float, float]) -> None:
        self.address, self.timeouts, self.login = address, timeouts, Auth.of(address)
        self._clock, self._answered = clock, False
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Start over, after a fork: the connections are the parent's, and so may be who holds the lock."""
        self._lock = threading.Lock()
        self._pid = 0
        self._not_before = float('-inf')

    def send(
        self,
        method: str,
        path: str | None,
        query: str,
        data: bytes | None,
        read_timeout: float | None = None,
        *,
        bounds: Bounds = ORDINARY,
    ) -> requests.Response:
        """Send one request below the database (or, with path None, to the server's root) and return the answer.

        That of a longpoll (see `bounds`) is not read. *Raises* the errors of `kombu_couchdb.errors`, none of which has anything
        of the password or session in it, in what caused it, or in a frame of its traceback.
        """
        url = (self.address.server + '/' if path is None else self.address.url + path) + query
        for _ in range(2):  # 401 means that nothing was done: whatever it is may be sent again, by somebody else
            who = self.login.headers(self._post_session)
            found = self._exchange(method, url, who, data, read_timeout, bounds)
            if isinstance(found, errors.CouchDBError):
                raise found
            response = found
            if response.status_code not in (401, 403) or not self.login.renewed(who, response):
                break
        self.login.observe(who, response)
        if (error := self._error(response, len(data or b''))) is not None:
            del found, response  # it may prolong the session
            raise error
        return response

    def _error(self, response: requests.Response, size: int) -> errors.CouchDBError | None:
        """Return the error that an answer is, if it is one, to a request of so many bytes."""
        # _bulk_docs answers 500 with the usual list when some nodes of a cluster are down: the list tells more.
        if response.status_code >= 400 and not (response.status_code == 500 and response.content[:1] == b'['):
            return errors.from_status(response, self.address.url, self.login.user, size)
        if 300 <= response.status_code < 400:
            return errors.NotCouchDB(f'{self.address.server} redirects to another address; use that one in the URL')
        return None

    def close(self) -> None:
        """Close the idle connections; who goes on opens new ones."""
        with self._lock:
            if self._pid == os.getpid():
                self._adapter.close()
            self._pid = 0

    def _post_session(self, data: bytes) -> requests.Response | errors.CouchDBError:
        return self._exchange('POST', f'{self.address.server}/_session', Headers(), data)

    def _exchange(
        self,
        method: str,
        url: str,
        who: Headers,
        data: bytes | None,
        read_timeout: float | None = None,
        bounds: Bounds = ORDINARY,
    ) -> requests.Response | errors.CouchDBError:
        """Send one request and return its answer, whatever its status, or the error, for whoever has nothing to hide to raise."""
        adapter, settings = self._connected()
        if (patience := self._not_before - time.monotonic()) > 0:
            time.sleep(patience)
        size = len(data or b'')
        seconds = (read_timeout or self.timeouts[1]) + size // SLOWEST
        prepared = requests.PreparedRequest()
        prepared.method, prepared.url = method, url
        # A new file-like object each time: a request that is sent again is sent from its beginning.
        prepared.body = Upload(data, sum(self.timeouts) + size // SLOWEST) if data and size > _IN_BLOCKS else data  # type: ignore[assignment]
        prepared.headers = {**_HEADERS}  # type: ignore[assignment]
        who.add_to(prepared.headers)
        if data is not None or method in ('PUT', 'POST'):
            prepared.headers['Content-Length'] = str(size)
        sent = time.time()
        try:
            with answers_within(bounds):
                response = adapter.send(
                    prepared, stream=bounds.longpoll, timeout=(self.timeouts[0], seconds), **settings
                )
            if (coding := response.headers.get('Content-Encoding', 'identity')).lower() != 'identity':
                # Nobody asked for it, and some hundred kB of it may be a GB.
                response.close()
                return errors.BrokenAnswer(
                    f'{self.address.url}: the answer is compressed ({coding!a:.40}); configure the proxy '
                    f'before CouchDB to honour Accept-Encoding'
                )
            if not bounds.longpoll or response.status_code >= 400:
                response.content  # noqa: B018 - read the body, so that the connection returns to the pool
        except (
            OSError,
            ValueError,
        ) as exc:  # requests' errors are OSErrors; urllib3 has a ValueError for impossible hosts
            return errors.from_transport(exc, self.address.url, known=self._answered)
        self._answered = True
        response.request = None  # type: ignore[assignment]  # it has the headers
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
                        self.address.url, {}, False, self.address.verify, self.address.cert
                    )
                    self._settings = {name: found[name] for name in ('verify', 'cert', 'proxies')}
                    self._adapter = BoundedAdapter(pool_connections=2, pool_maxsize=_POOL)
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
            logger.info(
                '%s does not answer as it should; asking %s from now on', node.address.url, self.current.address.url
            )

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
