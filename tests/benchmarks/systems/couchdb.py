"""This project on CouchDB, and the raw limit: the same documents without kombu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from kombu_couchdb import design
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import CouchDBError, DatabaseMissing, NotFound

from .base import Place, System, fresh_name

__all__ = ['RAW_DESIGN', 'CouchDB', 'Raw']

#: The design document of the raw limit; it has only the view that the loop reads.
RAW_DESIGN = 'raw'


class CouchDB(System):
    """The transport and the result backend of this project."""

    name, title, server = 'couchdb', 'this project on CouchDB', 'CouchDB'
    default_port = 5984

    def client(self, database: str) -> Client:
        """Return a client for a database on this server."""
        parts = urlsplit(self.url)
        return Client(
            Address(
                host=self.host,
                port=self.port,
                database=database,
                user=unquote(parts.username or '') or None,
                password=unquote(parts.password or ''),
                tls=parts.scheme == 'https',
            ),
            HTTPOptions(request_timeout=60.0),
        )

    def url_of(self, scheme: str, database: str) -> str:
        """Return the URL of a database with this scheme; with an `s` if the server uses TLS."""
        parts = urlsplit(self.url)
        secure = 's' if parts.scheme == 'https' else ''
        login = f'{parts.username}:{parts.password or ""}@' if parts.username else ''
        return f'{scheme}{secure}://{login}{self.host}:{self.port}/{quote(database, safe="")}'

    def version(self) -> str:
        """Return the version of CouchDB."""
        greeting = self.client('any').welcome()
        return str(greeting.get('version', 'embedded'))

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Return a place with two new names; transport and backend create the databases."""
        name = fresh_name()
        try:
            yield Place(self.url_of('couchdb', name), 'bench', backend=self.url_of('couchdb', f'{name}-results'))
        finally:
            self._delete(name, f'{name}-broadcasts', f'{name}-results')

    def requests(self) -> int | None:
        """Return CouchDB's own count, which only administrators may read."""
        path = '/_node/_local/_stats/couchdb/httpd/requests'
        try:
            count: Any = self.client('any').request('GET', path, is_of_server=True)
        except CouchDBError:
            return None
        return int(count['value'])

    def _delete(self, *databases: str) -> None:
        for database in databases:
            try:
                self.client(database).delete()
            except (NotFound, DatabaseMissing):
                pass  # this measure did not create it


class Raw(CouchDB):
    """The simplest loop over HTTP that writes, reads and deletes such documents: the limit of CouchDB."""

    name, title = 'raw', 'bare CouchDB: the raw limit'

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Create a database with the view that the loop reads."""
        name = fresh_name()
        client = self.client(name)
        client.create()
        try:
            client.put(design.load('kombu_couchdb.design', RAW_DESIGN, {'waiting': '_count'}))
            yield Place(self.url_of('http', name), 'bench', raw=True)
        finally:
            self._delete(name)
