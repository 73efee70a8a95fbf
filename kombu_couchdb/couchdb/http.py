"""HTTP requests to the nodes of a cluster: to the current node, and to the next one if it does not respond.

Every node of a CouchDB cluster accepts all reads and writes of the cluster's databases.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from itertools import accumulate
from math import isnan
from typing import Any, TypedDict
from urllib.parse import quote, urlencode

import requests
from kombu.utils.json import JSONEncoder
from requests.adapters import HTTPAdapter

from .. import errors
from ..log import get_logger
from . import failures
from .address import Address
from .auth import REFUSED, Auth, Headers
from .bounds import MIN_BYTES_PER_SECOND, ORDINARY, BoundedAdapter, Bounds, Upload, response_bounds, seconds_left
from .clock import ServerClock, uptime
from .fork_safety import Shared, reset_in_child
from .pacing import Pace, Turn, units_of

logger = get_logger(__name__)

#: The maximum number of idle connections to a node. More may be in use; those are closed after use.
_MAX_IDLE_CONNECTIONS = 16

#: From this size in bytes on, a request body is sent in blocks, so that the timeout applies to each block: urllib3
#: applies it to the whole body if it is sent in one piece.
_SEND_IN_BLOCKS_FROM_BYTES = 64_000

#: JSON nested in more levels than this is not decoded. No document of this project has so many, and Python's decoder
#: recurses, while CouchDB stores any number.
_MAX_LEVELS = 200

#: Stands in the place of what is nested too deeply.
TOO_DEEP = '\0nested too deeply\0'

#: What begins or ends a level, and strings, which may contain the same characters.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]')

#: The upper bounds of the buckets of `Latency`, in seconds. One more bucket has everything above.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_HEADERS = {'Accept': 'application/json', 'Content-Type': 'application/json', 'User-Agent': 'celery-couchdb'}


class Snapshot(TypedDict):
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

    def note(self, seconds: float) -> None:
        """Add a request that got a response."""
        with self._lock:
            self._counts[bisect_left(_BUCKETS, seconds)] += 1
            self._seconds += seconds

    def note_failure(self) -> None:
        """Add a request that got no response."""
        with self._lock:
            self._failed += 1

    def snapshot(self) -> Snapshot:
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


class Node:
    """Requests to one node. Thread-safe; a forked child opens its own connections.

    `timeouts` are the seconds to connect and the seconds to wait for a response. A large request has one more second
    for each 100 kB, because its bytes may still be in transit after the operating system has accepted them. The same
    applies to sending the request and to reading a large response, see `couchdb.bounds`.
    """

    def __init__(self, address: Address, clock: ServerClock, timeouts: tuple[float, float]) -> None:
        self.address, self.timeouts, self.auth = address, timeouts, Auth.of(address)
        self.pace = Pace.of(address.server, has_limits=address.auth == 'iam')
        self._clock, self._has_responded = clock, False
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Discard connections and lock in a forked child: they belong to the parent."""
        self._lock = threading.Lock()
        self._pid = 0
        #: The monotonic time before which no request is sent, see the header `Retry-After`.
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
        size: int = 1,
    ) -> requests.Response:
        """Send a request and return the response. The body of a longpoll response (see `bounds`) is not read.

        `path` is relative to the URL of the database; None means the root of the server. `data` is the request body,
        and `size` the number of documents to write or of queries in it. `read_timeout` replaces the time limit for the
        response, in seconds. It does not include the time for which the request waits, see `couchdb.pacing`.

        *Raises* the errors of `kombu_couchdb.errors`. Neither the errors nor their causes nor the frames of their
        tracebacks contain the password or the session cookie.
        """
        url = (self.address.server + '/' if path is None else self.address.url + path) + query
        for is_last in (False, True):  # CouchDB has not executed a request that it refuses so, and it can be repeated
            auth_headers, found = self._exchange_in_turn(method, path, size, url, data, read_timeout, bounds)
            if isinstance(found, errors.CouchDBError):
                raise found
            response = found
            if response.status_code not in REFUSED or not self.auth.renew(auth_headers, response, is_last=is_last):
                break
        self.auth.observe(auth_headers, response)
        if (error := self._error(response, len(data or b''))) is not None:
            del found, response  # it may contain a session cookie
            raise error
        return response

    def _error(self, response: requests.Response, size: int) -> errors.CouchDBError | None:
        """Return the error for a response, or None; `size` is the size of the request body in bytes."""
        # If nodes of a cluster are down, the status of _bulk_docs may be 500 with the usual list of results.
        if response.status_code >= 400 and not (response.status_code == 500 and response.content[:1] == b'['):
            return failures.from_status(response, self.address.url, self.auth.who, size)
        if 300 <= response.status_code < 400:
            return errors.NotCouchDB(f'{self.address.server} redirects to another address; use that one in the URL')
        return None

    def close(self) -> None:
        """Close idle connections. Later requests open new ones."""
        with self._lock:
            if self._pid == os.getpid():
                self._adapter.close()
            self._pid = 0

    def _post_session(self, data: bytes) -> requests.Response | errors.CouchDBError:
        return self._exchange('POST', f'{self.address.server}/_session', Headers(), data)

    def _exchange_in_turn(
        self,
        method: str,
        path: str | None,
        size: int,
        url: str,
        data: bytes | None,
        read_timeout: float | None,
        bounds: Bounds,
    ) -> tuple[Headers, requests.Response | errors.CouchDBError]:
        """Send a request, at its turn if the service has limits, and again while the service refuses it for them.

        Return the authentication headers and what `_exchange` returned last.
        """
        found: requests.Response | errors.CouchDBError | None = None
        auth_headers = Headers()
        turn = Turn(*units_of(method, path, size)) if self.pace.has_limits else None
        while turn is None or self.pace.wait(turn, seconds_left()):
            auth_headers = self.auth.headers(self._post_session)  # after the wait: a token may end meanwhile
            found = self._exchange(method, url, auth_headers, data, read_timeout, bounds)
            if isinstance(found, errors.CouchDBError):
                break
            if found.status_code != 429:
                if turn is not None:
                    self.pace.accepted(turn)
                break
            turn = turn or Turn(*units_of(method, path, size))
            pause = _retry_after_seconds(found.headers.get('Retry-After'), self._clock.now())
            self.pace.refused(turn, min(pause, self.timeouts[1]))
        return auth_headers, self._out_of_time() if found is None else found

    def _out_of_time(self) -> errors.CouchDBError:
        return errors.ServerUnavailable(f'{self.address.url}: no response within the time limit of the caller')

    def _exchange(
        self,
        method: str,
        url: str,
        auth_headers: Headers,
        data: bytes | None,
        read_timeout: float | None = None,
        bounds: Bounds = ORDINARY,
    ) -> requests.Response | errors.CouchDBError:
        """Send a request and return the response, with any status, or the error.

        The caller raises the error: the frame of this method contains the authentication headers.
        """
        adapter, settings = self._connected()
        if (pause := min(self._not_before - time.monotonic(), seconds_left())) > 0:
            time.sleep(pause)
        size = len(data or b'')
        transfer_seconds = size // MIN_BYTES_PER_SECOND
        if (left := seconds_left()) <= 0:
            return self._out_of_time()
        timeout = (min(left, self.timeouts[0]), min(left, (read_timeout or self.timeouts[1]) + transfer_seconds))
        prepared = requests.PreparedRequest()
        prepared.method, prepared.url = method, url
        if data and size > _SEND_IN_BLOCKS_FROM_BYTES:
            # A new file-like object for each attempt: a repeated request starts from its first byte.
            prepared.body = Upload(data, min(left, sum(self.timeouts) + transfer_seconds))  # type: ignore[assignment]
        else:
            prepared.body = data
        prepared.headers = {**_HEADERS}  # type: ignore[assignment]
        auth_headers.add_to(prepared.headers)
        if data is not None or method in ('PUT', 'POST'):
            prepared.headers['Content-Length'] = str(size)
        begun, sent = time.monotonic(), uptime()
        try:
            with response_bounds(bounds):
                response = adapter.send(prepared, stream=bounds.longpoll, timeout=timeout, **settings)
            if (coding := response.headers.get('Content-Encoding', 'identity')).lower() != 'identity':
                # The request does not accept compression, and a few hundred kB may decompress to a GB.
                response.close()
                return errors.BrokenAnswer(
                    f'{self.address.url}: the response is compressed ({coding!a:.40}); configure the proxy '
                    f'in front of CouchDB to respect the header Accept-Encoding'
                )
            if not bounds.longpoll or response.status_code >= 400:
                response.content  # noqa: B018 - read the body, so that the connection returns to the pool
        # The errors of requests are OSErrors. urllib3 raises a ValueError for an invalid host.
        except (OSError, ValueError) as exc:
            if not bounds.longpoll:
                LATENCY.note_failure()
            if isinstance(exc, requests.Timeout):
                self.close()  # a network that has forgotten this connection has forgotten the idle ones, too
            return failures.from_transport(exc, self.address.url, known=self._has_responded)
        if not bounds.longpoll:
            LATENCY.note(time.monotonic() - begun)
        self._has_responded = True
        response.request = None  # type: ignore[assignment]  # it contains the authentication headers
        self._clock.observe(response.headers.get('Date'), sent, uptime())
        if response.status_code == 503:
            # All threads pause as long as the server asks, but not longer than the time limit for a response.
            pause = _retry_after_seconds(response.headers.get('Retry-After'), self._clock.now())
            self._not_before = max(self._not_before, time.monotonic() + min(pause, self.timeouts[1]))
        return response

    def _connected(self) -> tuple[HTTPAdapter, dict[str, Any]]:
        """Return this process's connection pools and the environment's settings for proxies and certificates."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    # Session.send() would read the environment and process cookies for each request.
                    session = requests.Session()
                    found = session.merge_environment_settings(
                        self.address.url, {}, False, self.address.verify, self.address.cert
                    )
                    self._settings = {name: found[name] for name in ('verify', 'cert', 'proxies')}
                    self._adapter = BoundedAdapter(pool_connections=2, pool_maxsize=_MAX_IDLE_CONNECTIONS)
                    self._pid = os.getpid()
        return self._adapter, self._settings


#: By the servers of a list of nodes, a list with the index of the current one. All clients of a process share it, so
#: that a new connection does not wait for a node that did not respond to another one.
_current_nodes: Shared[tuple[str, ...], list[int]] = Shared({})


class Http:
    """Requests to the nodes of one database. Thread-safe. *Every* method raises the errors of `kombu_couchdb.errors`.

    `timeouts` are the seconds to connect and the seconds to wait for a response.
    """

    def __init__(self, address: Address, clock: ServerClock, timeouts: tuple[float, float]) -> None:
        self.nodes = [Node(node, clock, timeouts) for node in (address, *address.others)]
        self._current = _current_nodes.of(tuple(node.address.server for node in self.nodes), lambda: [0])

    @property
    def current(self) -> Node:
        """The node that gets the next request; the same for all clients of this process with the same list."""
        return self.nodes[self._current[0]]

    def switch_from(self, node: Node) -> None:
        """Make the next node the current one, unless another thread has switched from `node` already."""
        if len(self.nodes) > 1 and self.current is node:
            self._current[0] = (self.nodes.index(node) + 1) % len(self.nodes)
            logger.info('%s is unavailable; sending requests to %s', node.address.url, self.current.address.url)

    def send(
        self,
        method: str,
        path: str | None,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        *,
        read_timeout: float | None = None,
        repeat: bool = False,
        bounds: Bounds = ORDINARY,
        size: int = 1,
    ) -> requests.Response:
        """Send a request, as `Node.send` does, and return the response; `body` is JSON or an object.

        `size` is the number of documents in JSON.

        With `repeat`, for reads, the request is sent again if the connection was cut before the response: once, or once
        to each other node. A server or proxy may close an idle connection at the moment at which the client uses it
        again.
        """
        if isinstance(body, dict) and 'queries' in body:
            size = len(body['queries'])
        data = body if body is None or isinstance(body, bytes) else encoded(body)
        query = _query(params)
        attempts = max(2, len(self.nodes)) if repeat else 1
        while True:
            attempts -= 1
            node = self.current
            try:
                return node.send(method, path, query, data, read_timeout, bounds=bounds, size=size)
            except errors.ServerUnavailable as exc:
                self.switch_from(node)
                if not attempts or not exc.was_cut:
                    raise

    def exchange(self, method: str, path: str | None, *args: Any, **settings: Any) -> tuple[bytes, int]:
        """Send a request, as `send` does, and return body and status of the response.

        The caller does not get the response, which may contain a session cookie: recorded tracebacks show the variables
        of their frames.
        """
        response = self.send(method, path, *args, **settings)
        return response.content, response.status_code

    def close(self) -> None:
        """Close idle connections to all nodes. Later requests open new ones."""
        for node in self.nodes:
            node.close()


def _query(params: Mapping[str, Any] | None) -> str:
    if not params:
        return ''
    return '?' + urlencode({k: ('true' if v else 'false') if isinstance(v, bool) else v for k, v in params.items()})


def path_of(doc_id: str) -> str:
    """Return the path of a document, relative to the URL of its database."""
    # CouchDB redirects the request if the slash after _design is encoded.
    prefix, slash, name = doc_id.partition('/') if doc_id.startswith(('_design/', '_local/')) else ('', '', doc_id)
    # Clients, proxies and servers resolve '.' and '..' in a path unless the dots are encoded.
    quoted = name.replace('.', '%2E') if name in ('.', '..') else quote(name, safe='')
    return f'/{prefix}{slash}{quoted}'


def encoded(body: Any) -> bytes:
    """Return a body as JSON; *raises* `Unstorable` if it cannot be encoded."""
    try:
        return json.dumps(body, separators=(',', ':'), cls=JSONEncoder, ensure_ascii=False, allow_nan=False).encode(
            'utf-8'
        )
    except UnicodeEncodeError as exc:
        raise errors.Unstorable(
            'the document contains half of a surrogate pair, which cannot be encoded as UTF-8'
        ) from exc
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise errors.Unstorable(f'the document cannot be written as JSON: {exc}') from exc


def decoded(text: bytes) -> Any:
    """Return the value of a JSON text; if it is nested too deeply for Python, with `TOO_DEEP` for the inner levels.

    *Raises* `ValueError` if it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_without_inner_levels(text))


def _without_inner_levels(text: bytes) -> bytes:
    kept, level, start = list[bytes](), 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in (b'[', b'{'):
            level += 1
            if level == _MAX_LEVELS:
                kept += text[start : token.start()], json.dumps(TOO_DEEP).encode()
        elif token[0] in (b']', b'}'):
            if level == _MAX_LEVELS:
                start = token.end()
            level -= 1
    return b''.join(kept) + (text[start:] if level < _MAX_LEVELS else b'')


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
