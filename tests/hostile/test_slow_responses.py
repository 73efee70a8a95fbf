"""Responses that arrive byte by byte: the consumer treats them as an outage, and continues."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.support import Inbox, publish


class Dripping(socketserver.ThreadingTCPServer):
    """A proxy that, while `dripping`, forwards responses byte by byte."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(('127.0.0.1', 0), _Handler)
        self.target = target
        self.drips = False


class _Handler(socketserver.BaseRequestHandler):
    server: Dripping

    def handle(self) -> None:
        with socket.create_connection(self.server.target) as there:
            threading.Thread(target=self._ask, args=(there,), daemon=True).start()
            try:
                while piece := there.recv(65_536):
                    for one in (bytes([byte]) for byte in piece) if self.server.drips else [piece]:
                        if self.server.drips:
                            time.sleep(0.05)
                        self.request.sendall(one)
            except OSError:
                pass  # the client has closed the connection

    def _ask(self, there: socket.socket) -> None:
        try:
            while piece := self.request.recv(65_536):
                there.sendall(piece)
            there.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@pytest.fixture
def dripping(server: Server) -> Iterator[Dripping]:
    with Dripping((server.host, server.port)) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        yield proxy
        proxy.drips = False
        proxy.shutdown()


def test_consumer_gives_up_slow_responses_after_the_request_timeout(
    server: Server, database: str, client: Client, dripping: Dripping, caplog: pytest.LogCaptureFixture
) -> None:
    """The time limit is for the whole response: a limit for each byte would block the thread that sends heartbeats."""
    url = server.couchdb_url(database).replace(f':{server.port}/', f':{dripping.server_address[1]}/')
    with Connection(url, transport_options={'request_timeout': 1.0}) as connection:
        inbox = Inbox(connection)
        publish(connection, 1)
        inbox.wait(1)
        dripping.drips = True
        with Connection(server.couchdb_url(database)) as other, caplog.at_level(logging.WARNING):
            publish(other, 2)
            told = 'request_timeout); trying again until it responds'
            inbox.drain_until(lambda: told in caplog.text, 'the log line about the time limit')
            dripping.drips = False
            inbox.drain_until(lambda: 2 in inbox.bodies, 'the message')
