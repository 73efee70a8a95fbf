"""Requests to one CouchDB database: JSON in, JSON out, every error one of ours. May be used from many threads."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    """Requests to one database. Times are seconds; *every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, address: Address, request_timeout: float = 8.0, connect_timeout: float = 4.0) -> None:
        self.address = address
        self.clock = ServerClock.of(one.server for one in (address, *address.others))
        #: To connect, and to be answered.
        self.timeouts = (connect_timeout, request_timeout)
        #: How many nodes keep each document, as far as anybody has asked; 1 where the server is no cluster.
        self.replicas = 1
        self._informed = False
        self._nodes = Nodes(address, self.clock, self.timeouts)

    @property
    def url(self) -> str:
        """The URL of the database on the node that is asked now, without user and password."""
        return self._nodes.current.address.url

    @property
    def node(self) -> Address:
        """The address of the node that is asked now."""
        return self._nodes.current.address

    @property
    def user(self) -> str | None:
        """Who sends the requests; None is nobody."""
        return self._nodes.current.login.user

    @property
    def has_other_nodes(self) -> bool:
        """Whether the address names several: the next request after one that was not answered goes to another."""
        return len(self._nodes) > 1

    def leave_node(self) -> None:
        """Ask another node from now on, if the address names one: this one seems to be cut off from the others."""
        self._nodes.leave(self._nodes.current)

    def close(self) -> None:
        """Close the idle connections; it can still be used."""
        self._nodes.close()

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
        """Send one request below the database (or, with path None, to the server's root) and return its JSON.

        *Raises* `BrokenAnswer` if that has another `shape`.

        With `repeat`, for reads, a connection that was cut before the answer is tried once more, or once with each other node:
        a server or proxy may close an idle connection at the very moment it is used again.
        """
        text, status = self._exchange(method, path, params, body, repeat=repeat)
        return self.decode(text, status, f'{method} {path or "/"}', shape)

    def content(self, path: str, params: Mapping[str, Any], size: int) -> bytes:
        """Return what is below the database as the bytes it has; *raises* `BrokenAnswer` if they are not of this size."""
        text, _ = self._exchange('GET', path, params, repeat=True, bounds=Bounds(more=size))
        if len(text) != size:
            raise errors.BrokenAnswer(f'{self.address.url}: a broken answer to GET {path:.100}')
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
        """Send one request, as `request` does, and return its answer and status."""
        left = max(2, len(self._nodes)) if repeat else 1
        while True:
            left -= 1
            try:
                response = self._send(method, path, params, body, bounds=bounds)
                return response.content, response.status_code
            except errors.ServerUnavailable as exc:
                if not left or not exc.was_cut:
                    raise

    def decode(self, text: bytes, status: int = 200, request: str = 'a request', shape: Shape = anything) -> Any:
        """Return the JSON in the answer to a `request`; *raises* `BrokenAnswer` if it was cut, `NotCouchDB` if it is none."""
        try:
            answer = json.loads(text)
        except RecursionError as exc:
            raise errors.NestedTooDeeply(f'{self.address.url}: a document is nested too deeply to be read') from exc
        except ValueError as exc:
            if text.lstrip()[:1] in (b'{', b'['):
                raise errors.BrokenAnswer(f'{self.address.url}: the answer was cut off') from exc
            raise errors.NotCouchDB(
                f'{self.address.server} answers {status} without JSON: not a CouchDB server; check host and port'
            ) from exc
        if not shape(answer):
            raise errors.BrokenAnswer(f'{self.address.url}: a broken answer to {request:.100}')
        return answer

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
            self._nodes.leave(node)
            raise


def _query(params: Mapping[str, Any] | None) -> str:
    if not params:
        return ''
    return '?' + urlencode({k: ('true' if v else 'false') if isinstance(v, bool) else v for k, v in params.items()})


def encoded(body: Any) -> bytes:
    """Return a body as JSON; *raises* `Unstorable` if it cannot be written so."""
    try:
        return json.dumps(body, separators=(',', ':'), cls=JSONEncoder, ensure_ascii=False, allow_nan=False).encode(
            'utf-8'
        )
    except UnicodeEncodeError as exc:
        raise errors.Unstorable('what is to be stored has text in it that is none: half of a surrogate pair') from exc
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise errors.Unstorable(f'what is to be stored cannot be written as JSON: {exc}') from exc
