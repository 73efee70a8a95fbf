"""HTTP requests to one CouchDB database: JSON bodies, errors of `kombu_couchdb.errors`, failover between nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import requests
from kombu.utils.json import JSONEncoder

from .. import errors
from .address import Address
from .bounds import ORDINARY, Bounds
from .clock import ServerClock
from .nodes import Nodes
from .shapes import Shape, anything

__all__ = ['Http', 'encoded']


class Http:
    """Requests to one database. Thread-safe. *Every* method raises the errors of `kombu_couchdb.errors`.

    `request_timeout` and `connect_timeout` are seconds.
    """

    def __init__(self, address: Address, request_timeout: float = 8.0, connect_timeout: float = 4.0) -> None:
        self.address = address
        self._clock = ServerClock.of(one.server for one in (address, *address.others))
        #: The indexes that `building_index` need not report any more.
        self.built_indexes = set[str]()
        #: How often requests to views have failed, see `views.query`.
        self.failed_views = 0
        #: Seconds to connect, and seconds to wait for a response.
        self.timeouts = (connect_timeout, request_timeout)
        self._nodes = Nodes(address, self._clock, self.timeouts)

    @property
    def clock(self) -> ServerClock:
        """The server's time. Before its first use in a process, the server is asked for it, once."""
        if not self._clock.was_asked:
            with suppress(errors.CouchDBError):  # the local time counts until the server responds
                self._send('HEAD', None, None, None)
            self._clock.was_asked = True
        return self._clock

    @property
    def url(self) -> str:
        """The URL of the database on the current node, without user and password."""
        return self._nodes.current.address.url

    @property
    def node(self) -> Address:
        """The address of the current node."""
        return self._nodes.current.address

    @property
    def user(self) -> str | None:
        """The name of the user that sends the requests; None means anonymous."""
        return self._nodes.current.auth.user

    @property
    def has_other_nodes(self) -> bool:
        """Whether the address names several nodes, so that the request after a failed one goes to another node."""
        return len(self._nodes) > 1

    def switch_node(self) -> None:
        """Send later requests to another node, if there is one. For callers that find the current node partitioned."""
        self._nodes.switch_from(self._nodes.current)

    def close(self) -> None:
        """Close idle connections. Later requests open new ones."""
        self._nodes.close()

    #: Whether requests to views wait while CouchDB builds an index. Subclasses for people set it.
    waits_for_indexes = False

    def building_index(self, design: str, changes: int) -> None:
        """Report that CouchDB builds an index, which lacks so many changes; called again and again meanwhile."""

    def request(
        self,
        method: str,
        path: str | None,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        *,
        repeat: bool = False,
        shape: Shape = anything,
    ) -> Any:
        """Send a request and return the JSON of the response.

        `path` is relative to the URL of the database; None means the root of the server. With `repeat`, for reads, the
        request is sent again if the connection was cut before the response: once, or once to each other node. A server
        or proxy may close an idle connection at the moment at which the client uses it again.

        *Raises* `BrokenAnswer` if the response does not have the `shape`.
        """
        text, status = self._exchange(method, path, params, body, repeat=repeat)
        return self.decode(text, status, f'{method} {path or "/"}', shape)

    def get_within(self, path: str, timeout: float, *, shape: Shape) -> Any:
        """Return the JSON of the response to a `GET`, with a time limit of `timeout` seconds."""
        response = self._send('GET', path, None, None, timeout)
        return self.decode(response.content, response.status_code, f'GET {path}', shape)

    def content(self, path: str, params: Mapping[str, Any], size: int) -> bytes:
        """Return the bytes of an attachment, which has `size` bytes; *raises* `BrokenAnswer` for another size."""
        text, _ = self._exchange('GET', path, params, repeat=True, bounds=Bounds(extra_bytes=size))
        if len(text) != size:
            raise errors.BrokenAnswer(f'{self.address.url}: unexpected response to GET {path:.100}')
        return text

    def _exchange(
        self,
        method: str,
        path: str | None,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        *,
        repeat: bool = False,
        bounds: Bounds = ORDINARY,
    ) -> tuple[bytes, int]:
        """Send a request, as `request` does, and return the body and status of the response."""
        attempts = max(2, len(self._nodes)) if repeat else 1
        while True:
            attempts -= 1
            try:
                response = self._send(method, path, params, body, bounds=bounds)
                return response.content, response.status_code
            except errors.ServerUnavailable as exc:
                if not attempts or not exc.was_cut:
                    raise

    def decode(self, text: bytes, status: int = 200, request: str = 'a request', shape: Shape = anything) -> Any:
        """Return the JSON in the response `text` to a `request`, which error texts name.

        *Raises* `BrokenAnswer` if it is incomplete or does not have the `shape`, `NotCouchDB` if it is not JSON,
        `NestedTooDeeply` if a document in it exceeds Python's recursion limit.
        """
        try:
            found = json.loads(text)
        except RecursionError as exc:
            raise errors.NestedTooDeeply(f'{self.address.url}: a document is nested too deeply to be read') from exc
        except ValueError as exc:
            if text.lstrip()[:1] in (b'{', b'['):
                raise errors.BrokenAnswer(f'{self.address.url}: the response was cut off') from exc
            raise errors.NotCouchDB(
                f'{self.address.server} responds with status {status}, without JSON: not a CouchDB server; check host '
                f'and port'
            ) from exc
        if not shape(found):
            raise errors.BrokenAnswer(f'{self.address.url}: unexpected response to {request:.100}')
        return found

    def _send(
        self,
        method: str,
        path: str | None,
        params: Mapping[str, Any] | None,
        body: Any,
        read_timeout: float | None = None,
        *,
        bounds: Bounds = ORDINARY,
    ) -> requests.Response:
        node = self._nodes.current
        data = body if body is None or isinstance(body, bytes) else encoded(body)
        try:
            return node.send(method, path, _query(params), data, read_timeout, bounds=bounds)
        except errors.ServerUnavailable:
            self._nodes.switch_from(node)
            raise


def _query(params: Mapping[str, Any] | None) -> str:
    if not params:
        return ''
    return '?' + urlencode({k: ('true' if v else 'false') if isinstance(v, bool) else v for k, v in params.items()})


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
