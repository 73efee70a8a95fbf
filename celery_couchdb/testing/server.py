"""A CouchDB server for tests, and fresh databases on it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.embedded import EmbeddedServer
from kombu_couchdb.errors import DatabaseMissing, NotFound
from kombu_couchdb.queues.databases import broadcasts_of

#: How long a request of a test may take: long, so that tests do not fail only because the machine is busy.
_HTTP = HTTPOptions(180.0, 180.0)


class Server:
    """A CouchDB server with its URL, host, port, user and password.

    `url` is for example `http://user:password@host:5984`. `process` is the embedded server at this URL, or None if the
    tests did not start the server.
    """

    def __init__(self, url: str, process: EmbeddedServer | None = None) -> None:
        parts = urlsplit(url)
        self.url, self.process = url, process
        self.tls = parts.scheme == 'https'
        self.host, self.port = parts.hostname or 'localhost', parts.port or (443 if self.tls else 5984)
        self.user, self.password = unquote(parts.username or ''), unquote(parts.password or '')

    def couchdb_url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """Return the `couchdb://` URL of a database for a Celery configuration.

        `user` and `password` replace the server's own; with the user '' the URL names no user.
        """
        user, password = self.user if user is None else user, password or self.password
        credentials = f'{quote(user, safe="")}:{quote(password, safe="")}@' if user else ''
        host = f'[{self.host}]' if ':' in self.host else self.host
        return f'{"couchdbs" if self.tls else "couchdb"}://{credentials}{host}:{self.port}/{quote(database, safe="")}'

    def client(self, database: str, **address: Any) -> Client:
        """Return a client for a database on this server; `address` has other arguments of `Address`."""
        given = {'user': self.user or None, 'password': self.password, 'tls': self.tls, **address}
        return Client(Address(host=self.host, port=self.port, database=database, **given), _HTTP)

    def delete(self, database: str) -> None:
        """Delete a database, if it exists, and the broadcasts database that belongs to it."""
        client = self.client(database)
        for each in (client, broadcasts_of(client)):
            with closing(each), suppress(NotFound, DatabaseMissing):
                each.delete()

    @contextmanager
    def fresh_database(self) -> Iterator[str]:
        """Provide the name of a database that does not exist. If a test creates it, it is deleted at the end."""
        name = fresh_name()
        try:
            yield name
        finally:
            self.delete(name)


def fresh_name() -> str:
    """Return a random database name."""
    return f'test-{uuid.uuid4().hex[:12]}'


@contextmanager
def running_server() -> Iterator[Server]:
    """Provide the server in the environment variable `COUCHDB_URL`, or an embedded server.

    *Raises* `EmbeddedServerError` if the embedded server cannot start.
    """
    if url := os.environ.get('COUCHDB_URL'):
        yield Server(url)
    else:
        with EmbeddedServer() as process:
            yield Server(process.url, process)
