"""The server of the demo and its two databases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.embedded import EmbeddedServer, install
from kombu_couchdb.errors import AccessDenied, CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.queues.databases import broadcasts_name

from .interrupts import Interrupts
from .screen import Screen

#: The time limit of requests in seconds.
_TIMEOUT = 3.0


class DemoError(Exception):
    """The demo cannot go on; the text says why."""


class Databases:
    """Two databases on one server, for messages and for results; fresh ones if their name is not given."""

    def __init__(self, server: SplitResult, name: str = '') -> None:
        #: The URL of the server, with user and password.
        self.server = server
        self.name = name or f'demo-{uuid.uuid4().hex[:8]}'
        self.results = f'{self.name}-results'
        #: What could not be deleted, in sentences.
        self.left: list[str] = []
        self._created: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that give Celery the two URLs."""
        return {'CELERY_BROKER_URL': self._url(self.name), 'CELERY_RESULT_BACKEND': self._url(self.results)}

    def create(self) -> str:
        """Create both; return the server's product and address, without the password. *Raises* `CouchDBError`."""
        client = self._client(self.name)
        greeting = client.welcome()
        for name in (self.name, broadcasts_name(self.name), self.results):
            self._created.append(name)
            try:
                self._client(name).create()
            except AccessDenied:
                self._created.remove(name)
                raise
        product = f'CouchDB {greeting["version"]}' if 'couchdb' in greeting else 'the embedded server'
        return f'{product} at {client.address.server}'

    def delete(self) -> None:
        """Delete the created databases.

        Each twice: the embedded server may create a database anew for a request of a killed worker, which it received
        before the deletion.
        """
        for _ in range(2):
            self.left = [left for name in self._created if (left := self._deleted(name))]

    def _deleted(self, name: str) -> str:
        try:
            self._client(name).delete()
        except (NotFound, DatabaseMissing):
            pass
        except CouchDBError as exc:
            return f'database {name} is left behind ({exc})'
        return ''

    def _client(self, database: str) -> Client:
        address: dict[str, Any] = {
            'host': self.server.hostname,
            'port': self._port,
            'database': database,
            'tls': self._tls,
        }
        if self.server.username:
            address |= {'user': unquote(self.server.username), 'password': unquote(self.server.password or '')}
        return Client(Address(**address), HTTPOptions(_TIMEOUT, _TIMEOUT))

    def _url(self, database: str) -> str:
        login, at, _ = self.server.netloc.rpartition('@')
        user, _, password = login.partition(':')
        # Quoted again: Celery accepts fewer unquoted characters in a URL than other programs.
        login = ':'.join(quote(unquote(part), safe='') for part in (user, password)) if at else ''
        host = self.server.hostname or ''
        host = f'[{host}]' if ':' in host else host
        return f'couchdb{"s" if self._tls else ""}://{login}{at}{host}:{self._port}/{database}'

    @property
    def _tls(self) -> bool:
        return self.server.scheme == 'https'

    @property
    def _port(self) -> int:
        return self.server.port or (443 if self._tls else 5984)


@contextmanager
def databases(screen: Screen, interrupts: Interrupts) -> Iterator[Databases]:
    """Provide databases on the server in `COUCHDB_URL`, else on an embedded one; *raises* `DemoError`."""
    with ExitStack() as stack:
        url = os.environ.get('COUCHDB_URL')
        if not url:
            screen.show('starting the embedded server (the first time, npm installs it)')
            install()
            screen.restart()
            url = stack.enter_context(EmbeddedServer()).url
        own = Databases(_checked(url))
        stack.callback(own.delete)
        with interrupts.held():  # an interrupted request might create a database after the clean-up
            where = own.create()
        screen.say(f'Server:    {where}')
        screen.say(f'Databases: {own.name}, {own.results}; deleted at the end')
        yield own


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ('http', 'https') and parts.hostname and not parts.path.strip('/')
        usable = usable and parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:
        usable = False
    if not usable:  # the text must not show the password
        raise DemoError('COUCHDB_URL must look like http://user:password@host:5984, user and password percent-encoded')
    return parts
