"""Server: its nodes, one login, clock and pace, and the pauses that it asks for (`Retry-After`); all clients share it.

With the status 503 all threads of this process pause (`Server._exchange`), with 429 requests of one kind (`pacing`).

Every node of a CouchDB cluster accepts all reads and writes of the cluster's databases. A request goes to the current
node, and to the next one if that does not respond.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from itertools import accumulate
from math import inf, isnan
from typing import TypedDict

import requests

from .. import errors
from ..log import get_logger
from . import failures
from .address import Address
from .auth import REFUSED, Auth
from .call import Call
from .clock import ServerClock, uptime
from .fork_safety import Shared, reset_in_child
from .http import Connections, LoginHeaders
from .pacing import Pace, Turn

logger = get_logger(__name__)

#: The upper bounds of the buckets of `Latency`, in seconds. One more bucket has everything above.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class RequestCounts(TypedDict):
    """The requests that were sent since the process started."""

    #: Requests with a response, of any status.
    count: int
    #: The sum of their durations, from the first byte sent to the last byte received.
    seconds: float
    #: By upper bound in seconds, how many took at most that long.
    buckets: dict[str, int]
    #: Requests without a response, which are not counted above.
    failed: int


class Latency:
    """A histogram of CouchDB's response times, as Prometheus has them. Thread-safe; a forked child begins with none."""

    def __init__(self) -> None:
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Begin anew, with a new lock."""
        self._lock = threading.Lock()
        self._counts = [0] * (len(_BUCKETS) + 1)
        self._seconds, self._failed = 0.0, 0

    def count(self, seconds: float) -> None:
        """Add a request that got a response."""
        with self._lock:
            self._counts[bisect_left(_BUCKETS, seconds)] += 1
            self._seconds += seconds

    def note_failure(self) -> None:
        """Add a request that got no response."""
        with self._lock:
            self._failed += 1

    def snapshot(self) -> RequestCounts:
        """Return the numbers so far."""
        with self._lock:
            counts, seconds, failed = list(accumulate(self._counts)), self._seconds, self._failed
        names = [*(f'{bound:g}' for bound in _BUCKETS), '+Inf']
        return {
            'count': counts[-1],
            'seconds': round(seconds, 6),
            'buckets': dict(zip(names, counts, strict=True)),
            'failed': failed,
        }


#: Of all requests of this process, to any server and database, except waits for the changes feed.
LATENCY = Latency()


_NO_LOGIN = LoginHeaders()


class Node:
    """One node, with the user's login there."""

    def __init__(self, address: Address) -> None:
        self.address, self.auth = address, Auth(address)
        #: The monotonic time before which no request is sent, see the header `Retry-After`.
        self.not_before = -inf

    def reset(self) -> None:
        """Forget in a forked child what belongs to the parent."""
        self.auth.reset()
        self.not_before = -inf


class Server:
    """A server, or the nodes of a cluster, with one login. Thread-safe.

    All clients of a process with the same list of nodes and the same login share an object: a new connection neither
    logs in again nor waits for a node that did not respond to another one. A forked child begins with what its parent
    knew.
    """

    def __init__(self, address: Address) -> None:
        self.nodes = [Node(node) for node in (address, *address.others)]
        self.clock = ServerClock()
        #: The pace of requests; None until the server has refused one for its limits, see `couchdb.pacing`.
        self.pace = Pace(address.server, is_careful=True) if address.auth == 'iam' else None
        self._lock = threading.Lock()
        #: The index of the node that gets the next request.
        self.current = 0
        reset_in_child(self)

    @classmethod
    def of(cls, address: Address) -> Server:
        """Return this process's object for the server and login of an address."""
        key = address.beside('all')
        return _servers.of(key, lambda: cls(key))

    @classmethod
    def forget(cls, address: Address) -> None:
        """Do not keep the object for an address: no client uses its password any more."""
        _servers.discard(address.beside('all'))

    def reset(self) -> None:
        """Forget in a forked child what belongs to threads of the parent."""
        self._lock = threading.Lock()
        if self.pace is not None:
            self.pace.reset()
        for node in self.nodes:
            node.reset()

    @property
    def node(self) -> Node:
        """The node that gets the next request."""
        return self.nodes[self.current]

    def switch_from(self, index: int) -> None:
        """Make the next node the current one, unless another thread has switched from this one already."""
        if len(self.nodes) > 1 and self.current == index:
            self.current = (index + 1) % len(self.nodes)
            before, now = self.nodes[index].address.server, self.node.address.server
            logger.info('%s is unavailable; sending requests to %s', before, now)

    def send(self, call: Call, connections: Sequence[Connections]) -> requests.Response:
        """Send a request and return the response, with the client's connections to each node.

        *Raises* the errors of `kombu_couchdb.errors`. Neither the errors nor their causes nor the frames of their
        tracebacks contain the password or the session cookie.

        A server or proxy may close an idle connection at the moment at which the client uses it again. Then a request
        that may be repeated is sent again: once, or once to each other node.
        """
        attempts = max(2, len(self.nodes)) if call.repeat else 1
        while True:
            attempts -= 1
            index = self.current
            try:
                return self._send(call, self.nodes[index], connections[index])
            except errors.ServerUnavailable as exc:
                self.switch_from(index)
                if not attempts or not exc.was_cut:
                    raise

    def _send(self, call: Call, node: Node, connections: Connections) -> requests.Response:
        """Send a request to a node, and again after a refusal: CouchDB has not executed it, and it can be repeated.

        A service that has limits gets it at its turn, until it accepts it. Other credentials are tried once.
        """
        found: requests.Response | errors.CouchDBError | None = None
        headers, is_last = _NO_LOGIN, False
        pace, turn = self.pace, None if self.pace is None else Turn.of(call)
        while pace is None or turn is None or pace.wait(turn, call.seconds_left):
            headers = node.auth.headers(lambda data: self._exchange(_session(data, call), node, connections, _NO_LOGIN))
            found = self._exchange(call, node, connections, headers)
            if isinstance(found, errors.CouchDBError):
                break
            if found.status_code == 429:
                pace, turn = pace or self._paced(), turn or Turn.of(call)
                pace.refused(turn, self._pause_after(found, call))
                continue
            if pace is not None and turn is not None:
                pace.accepted(turn)
            is_refused = found.status_code in REFUSED and node.auth.renew(headers, found, is_last=is_last)
            if is_last or not is_refused:
                break
            is_last = True
        if found is None:
            found = errors.ServerUnavailable(f'{connections.url}: no response within the time limit of the caller')
        if isinstance(found, errors.CouchDBError):
            raise found
        node.auth.observe(headers, found)
        if error := self._error(found, call, node, connections.url):
            del found  # it may contain a session cookie
            raise error
        return found

    def _paced(self) -> Pace:
        with self._lock:
            self.pace = self.pace or Pace(self.nodes[0].address.server)
            return self.pace

    def _error(self, response: requests.Response, call: Call, node: Node, url: str) -> errors.CouchDBError | None:
        """Return the error for a response, or None; `url` is that of the database."""
        status = response.status_code
        # If nodes of a cluster are down, the status of _bulk_docs may be 500 with the usual list of results.
        if status < 300 or (status == 500 and response.content[:1] == b'['):
            return None
        if status < 400:
            return errors.NotCouchDB(f'{node.address.server} redirects to another address; use that one in the URL')
        return failures.from_status(response, url, node.auth.who, len(call.body or b''))

    def _exchange(
        self, call: Call, node: Node, connections: Connections, headers: LoginHeaders
    ) -> requests.Response | errors.CouchDBError:
        """Send a request once and return the response, with any status, or the error; note what it says of the server.

        The caller raises the error: the frame of this method contains the response.
        """
        begun, sent = time.monotonic(), uptime()
        if (pause := node.not_before - begun) > 0:
            time.sleep(max(0.0, min(pause, call.seconds_left)))
            begun, sent = time.monotonic(), uptime()
        found = connections.exchange(call, headers)
        if isinstance(found, errors.CouchDBError):
            if not call.longpoll:
                LATENCY.note_failure()
            return found
        if not call.longpoll:
            LATENCY.count(time.monotonic() - begun)
        self.clock.observe(found.headers.get('Date'), sent, uptime())
        if found.status_code == 503:
            # All threads pause as long as the server asks.
            node.not_before = max(node.not_before, time.monotonic() + self._pause_after(found, call))
        return found

    def _pause_after(self, response: requests.Response, call: Call) -> float:
        """Return the seconds for which a response asks, but not more than the time limit for a response.

        The thread that writes heartbeats pauses, too: a longer pause could cost it its lease.
        """
        return min(_retry_after_seconds(response.headers.get('Retry-After'), self.clock.now()), call.timeouts[1])


def _session(data: bytes, call: Call) -> Call:
    """Return the request that begins a session."""
    return Call('POST', '/_session', body=data, timeouts=call.timeouts, is_of_server=True)


def _retry_after_seconds(retry_after: str | None, now: float) -> float:
    """Return the seconds in a `Retry-After` header: a number, or the date minus `now`; 0 if it is neither.

    urllib3's `Retry.parse_retry_after` would compare a date with the local clock, which may be wrong, and raises
    several errors for values that are neither.
    """
    try:
        seconds = float(retry_after or 0)
        return 0.0 if isnan(seconds) else seconds  # a pause until `nan` would be none for all threads
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(str(retry_after)).timestamp() - now
    except (TypeError, ValueError, OverflowError):
        return 0.0


#: The objects of this process.
_servers: Shared[Address, Server] = Shared({})
