"""Readings for scrapes, and the HTTP server that exports them. Imports prometheus_client, which is optional."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kombu_couchdb.errors import CouchDBError

from .metric_families import Reading, families, up
from .tables import echo
from .time_limit import result_of, start

__all__ = ['Exporter', 'Server']

#: How long a client may take to send its request and to read the response, in seconds, beside the time of a reading.
_CLIENT_SECONDS = 10.0

#: The most clients at a time, each of which has a thread. The server closes the connections of others at once.
_MAX_CLIENTS = 20


class Exporter(Collector):
    """The metrics of readings that scrapes share. Thread-safe. `registry` exports them.

    `read` makes a reading and may raise `CouchDBError`. One that was made at most `keep` seconds ago is used again, and
    scrapes during a reading wait for it, but at most `timeout` seconds. So there is at most one reading at a time.
    """

    def __init__(self, read: Callable[[], Reading], queues: Collection[str], timeout: float, keep: float) -> None:
        self._read, self._queues, self.timeout, self._keep = read, queues, timeout, keep
        self._lock = threading.Lock()
        self._reading: Future[Reading] | None = None
        self._ended = float('-inf')
        self._responds = True
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; only `up`, with the value 0, if there is no reading."""
        try:
            reading = self.read()
        except CouchDBError as exc:
            self._note(exc)
            yield up(False)
        else:
            self._note(None)
            yield up(True)
            yield from families(reading, self._queues)

    def describe(self) -> list[Metric]:
        """Return no names, so that the registration makes no reading."""
        return []

    def read(self) -> Reading:
        """Return a reading that is recent enough; *raises* the errors of `read`, and `ServerUnavailable`."""
        with self._lock:
            if self._reading is None or (self._reading.done() and time.monotonic() - self._ended >= self._keep):
                self._reading = start(self._make)
            reading = self._reading
        return result_of(reading, self.timeout)

    def _make(self) -> Reading:
        try:
            return self._read()
        finally:
            self._ended = time.monotonic()

    def _note(self, problem: CouchDBError | None) -> None:
        """Print one line when CouchDB stops responding, and one when it responds again."""
        with self._lock:
            changed, self._responds = self._responds is not (problem is None), problem is None
        if changed:
            echo(f'Error: {problem}' if problem else 'CouchDB responds again', err=True)


class Server(ThreadingMixIn, WSGIServer):
    """Serves an exporter's metrics under every path, each request in a thread. *Raises* `OSError` if it cannot listen.

    `address` is a host, '' for every interface, and a port, 0 for any free one.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], exporter: Exporter) -> None:
        host, port = address
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, where = found[0]
        super().__init__(where[:2], _Handler)  # type: ignore[arg-type]
        self.set_app(make_wsgi_app(exporter.registry))
        self._client_seconds = _CLIENT_SECONDS + exporter.timeout
        #: The monotonic time from which a client is cut off, by its connection.
        self._clients: dict[Any, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread, unless there are too many."""
        if len(self._clients) >= _MAX_CLIENTS:
            self.shutdown_request(request)
        else:
            self._clients[request] = time.monotonic() + self._client_seconds
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off the clients that take too long; the server calls this twice a second."""
        for request, until in self._clients.copy().items():
            if time.monotonic() >= until:
                with suppress(OSError):  # it is closed at this moment
                    request.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """The URL of the metrics."""
        host, port = map(str, self.socket.getsockname()[:2])
        return f'http://{f"[{host}]" if ":" in host else host}:{port}/metrics'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up or send nothing; print the traceback of other errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a line for each scrape would hide the others."""
