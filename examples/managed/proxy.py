"""A proxy before a CouchDB that may answer requests itself. Each connection of a client has one to CouchDB."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote

__all__ = ['Proxy', 'Request', 'Response', 'refusal']

#: The largest request, in bytes.
MAX_REQUEST = 64 << 20

#: Names at the root of the server that are databases.
_DATABASES = ('_users', '_replicator', '_global_changes')

#: Headers that belong to one connection; the proxy writes its own.
_HOP = {'connection', 'keep-alive', 'transfer-encoding', 'content-length', 'host'}

#: An idle connection to CouchDB is not used again after so many seconds: the embedded server closes it after five.
_MAX_IDLE_SECONDS = 2.0


class Request(NamedTuple):
    """A request as the client sent it."""

    method: str
    #: Without the query.
    path: str
    query: str
    body: bytes
    headers: Message
    #: The port of the client's connection.
    port: int

    @property
    def database(self) -> str:
        """The name of the database, as it is in the path; '' for the server."""
        name = self.path.split('/')[1]
        return '' if name.startswith('_') and name not in _DATABASES else name

    @property
    def below(self) -> str:
        """The path below the database, or else that of the server."""
        return self.path[len(self.database) + 1 :] if self.database else self.path

    @property
    def place(self) -> str:
        """The kind of the path, without what identifies a document: `document`, `_bulk_docs`, `_view/ready`…"""
        names = self.below.strip('/').split('/')
        if names[0] == '_design' and len(names) > 2:
            return '/'.join(names[2:])
        if names[0] in ('_design', '_local'):
            return names[0]
        if self.below and names[0] and not names[0].startswith('_'):
            return 'document' if len(names) == 1 else 'attachment'
        return names[0] or ('database' if self.database else 'server')

    @property
    def size(self) -> int:
        """How many documents or queries the body of a request with several has."""
        if self.place == '_bulk_docs' or self.place.endswith('/queries'):
            content = json.loads(self.body)
            return len(content['docs' if self.place == '_bulk_docs' else 'queries'])
        return 1

    @property
    def identity(self) -> tuple[Any, ...]:
        """What is the same if the request is sent again.

        Several programs send equal requests without a body, and equal declarations: these are told apart by their
        connections.
        """
        is_common = not self.body or unquote(self.path).partition('/broker:')[1]
        return self.method, self.path, hashlib.sha256(self.body).hexdigest(), self.port if is_common else None


@dataclass
class Response:
    """A response of the service itself."""

    status: int
    content: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def refusal(status: int, error: str, reason: str, **headers: str) -> Response:
    """Return a response as CouchDB's errors are."""
    return Response(status, {'error': error, 'reason': reason}, headers)


class Proxy:
    """The proxy, on loopback; a context manager. `rule` returns a response, or None for what CouchDB answers.

    With `authorization`, requests reach CouchDB with this header instead of their own.
    """

    def __init__(
        self,
        couchdb: SplitResult,
        rule: Callable[[Request], Response | None],
        port: int = 0,
        authorization: str | None = None,
    ) -> None:
        self.rule = rule
        self._couchdb, self._authorization = couchdb, authorization
        self._server = _Server(('127.0.0.1', port), _Handler)
        self._server.proxy = self
        #: The port, which the operating system has chosen if none was given.
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def connection(self) -> HTTPConnection:
        """Return a new connection to CouchDB."""
        kind = HTTPSConnection if self._couchdb.scheme == 'https' else HTTPConnection
        return kind(self._couchdb.hostname or 'localhost', self._couchdb.port)

    def forwarded(self, headers: Message) -> dict[str, str]:
        """Return the headers of a request for CouchDB."""
        kept = {name: value for name, value in headers.items() if name.lower() not in _HOP}
        return kept if self._authorization is None else {**kept, 'Authorization': self._authorization}

    def close(self) -> None:
        """End, and cut all connections."""
        self._server.shutdown()
        self._server.server_close()
        for handler in list(self._server.handlers):
            handler.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """The threads of the service: one for each connection of a client."""

    daemon_threads, block_on_close, request_queue_size = True, False, 128
    proxy: Proxy

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handlers: set[_Handler] = set()


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, with one to CouchDB."""

    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm, wbufsize = True, -1
    server: _Server
    connection: socket.socket

    def setup(self) -> None:
        super().setup()
        self._couchdb, self._used = self.server.proxy.connection(), float('-inf')
        self.server.handlers.add(self)

    def finish(self) -> None:
        self.server.handlers.discard(self)
        self._couchdb.close()
        try:
            super().finish()
        except OSError:
            pass  # the client has gone

    def cut(self) -> None:
        """Close both connections, from another thread."""
        for end in (self.connection, self._couchdb.sock):
            try:
                if end is not None:
                    end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, HTTPException):
            self.close_connection = True  # the client, or CouchDB, has gone: the other one learns it in the same way

    def _serve(self) -> None:
        length = int(self.headers.get('Content-Length') or 0)
        if length > MAX_REQUEST:
            self.close_connection = True
            return self._respond(refusal(413, 'too_large', 'the request entity is too large', Connection='close'))
        path, _, query = self.path.partition('?')
        request = Request(self.command, path, query, self.rfile.read(length), self.headers, self.client_address[1])
        try:
            response = self.server.proxy.rule(request)
        except (ValueError, KeyError, TypeError, AttributeError):
            response = refusal(400, 'bad_request', 'the body is not what this endpoint takes')
        if response is not None:
            return self._respond(response)
        if time.monotonic() - self._used > _MAX_IDLE_SECONDS:
            self._couchdb.close()
        headers = self.server.proxy.forwarded(self.headers)
        self._couchdb.request(self.command, self.path, request.body or None, headers)
        self._forward(self._couchdb.getresponse(), request.place == '_changes')
        self._used = time.monotonic()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _respond(self, response: Response) -> None:
        content = json.dumps(response.content).encode() + b'\n'
        self.send_response(response.status)
        headers = {'Content-Type': 'application/json', 'Content-Length': str(len(content)), **response.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b'' if self.command == 'HEAD' else content)
        self.wfile.flush()

    def _forward(self, response: HTTPResponse, is_feed: bool) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        if is_feed:
            self.send_header('Transfer-Encoding', 'chunked')
            self.end_headers()
            self.wfile.flush()  # the client learns at once that the feed has begun
            piece = b'-'
            while piece:
                piece = response.read1(65536)
                self.wfile.write(b'%x\r\n%b\r\n' % (len(piece), piece))
                self.wfile.flush()
            response.close()  # `read1` does not if the response has a length, as those of the embedded server may
            return
        content = response.read()
        length = response.getheader('Content-Length') if self.command == 'HEAD' else None
        self.send_header('Content-Length', length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        """Log nothing."""
