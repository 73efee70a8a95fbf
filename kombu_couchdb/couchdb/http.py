"""Requests over HTTP: the connections to one server, and JSON in bodies."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import quote, urlencode

import requests
from kombu.utils.json import JSONEncoder

from .. import errors
from . import failures
from .bounds import MIN_BYTES_PER_SECOND, BoundedAdapter, Upload
from .call import Call, HTTPOptions
from .fork_safety import reset_in_child

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

_HEADERS = {'Accept': 'application/json', 'Content-Type': 'application/json', 'User-Agent': 'celery-couchdb'}


class LoginHeaders:
    """The authentication headers of a request. `repr` does not show them, so that recorded tracebacks do not either."""

    __slots__ = ('_fields',)

    def __init__(self, fields: dict[str, str] | None = None) -> None:
        self._fields = fields or {}

    @property
    def is_session(self) -> bool:
        """Whether the headers contain a session cookie and not a password."""
        return 'Cookie' in self._fields

    def add_to(self, headers: MutableMapping[str, str]) -> None:
        """Add the headers to the headers of a request."""
        headers.update(self._fields)


class Connections:
    """The connections of one client to one node. Thread-safe; a forked child opens its own."""

    def __init__(
        self,
        server: str,
        database: str | None = None,
        verify: bool | str = True,
        cert: str | tuple[str, str] | None = None,
        idle: int = HTTPOptions.idle_connections,
    ) -> None:
        """`server` and `database` are the URLs of the node and of its database; `verify` and `cert` are of `Address`.

        At most `idle` connections stay open while no request is sent.
        """
        self.server, self.url, self._verify, self._cert = server, database or server, verify, cert
        self._idle = idle
        self._has_responded = False
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Discard connections and lock in a forked child: they belong to the parent."""
        self._lock = threading.Lock()
        self._pid = 0

    def close(self) -> None:
        """Close idle connections. Later requests open new ones."""
        with self._lock:
            if self._pid == os.getpid():
                self._adapter.close()
            self._pid = 0

    def exchange(self, call: Call, headers: LoginHeaders) -> requests.Response | errors.CouchDBError:
        """Send a request once and return the response, with any status, or the error.

        The caller raises the error: the frame of this method contains the authentication headers.
        """
        adapter, settings = self._connected()
        left, size = call.seconds_left, len(call.body or b'')
        if left <= 0:
            return errors.ServerUnavailable(f'{self.url}: no response within the time limit of the caller')
        transfer_seconds = size // MIN_BYTES_PER_SECOND
        timeout = min(left, call.timeouts[0]), min(left, call.timeouts[1] + transfer_seconds)
        prepared = requests.PreparedRequest()
        prepared.url = f'{self.server if call.is_of_server else self.url}{call.path}{call.query}'
        prepared.method, prepared.body = call.method, call.body
        if call.body and size > _SEND_IN_BLOCKS_FROM_BYTES:
            # A new file-like object for each attempt: a repeated request starts from its first byte.
            seconds = min(left, sum(call.timeouts) + transfer_seconds)
            prepared.body = Upload(call.body, seconds)  # type: ignore[assignment]
        prepared.headers = {**_HEADERS}  # type: ignore[assignment]
        headers.add_to(prepared.headers)
        if call.body is not None or call.method in ('PUT', 'POST'):
            prepared.headers['Content-Length'] = str(size)
        try:
            response = adapter.send_call(call, prepared, timeout=timeout, **settings)
            if (coding := response.headers.get('Content-Encoding', 'identity')).lower() != 'identity':
                # The request does not accept compression, and a few hundred kB may decompress to a GB.
                response.close()
                return errors.BrokenAnswer(
                    f'{self.url}: the response is compressed ({coding!a:.40}); configure the proxy '
                    f'in front of CouchDB to respect the header Accept-Encoding'
                )
            if not call.longpoll or response.status_code >= 400:
                response.content  # noqa: B018 - read the body, so that the connection returns to the pool
        # The errors of requests are OSErrors. urllib3 raises a ValueError for an invalid host.
        except (OSError, ValueError) as exc:
            if isinstance(exc, requests.Timeout):
                self.close()  # a network that has forgotten this connection has forgotten the idle ones, too
            return failures.from_transport(exc, self.url, known=self._has_responded)
        self._has_responded = True
        response.request = None  # type: ignore[assignment]  # it contains the authentication headers
        return response

    def _connected(self) -> tuple[BoundedAdapter, dict[str, Any]]:
        """Return this process's connection pools and the environment's settings for proxies and certificates."""
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    # Session.send() would read the environment and process cookies for each request.
                    session = requests.Session()
                    found = session.merge_environment_settings(self.server, {}, False, self._verify, self._cert)
                    self._settings = {name: found[name] for name in ('verify', 'cert', 'proxies')}
                    self._adapter = BoundedAdapter(pool_connections=2, pool_maxsize=self._idle)
                    self._pid = os.getpid()
        return self._adapter, self._settings


def query_of(params: Mapping[str, Any]) -> str:
    """Return parameters as a part of a URL, with the question mark."""
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
