"""CouchDB and a worker as containers and nodes of pytest-celery, and their defaults, which a project can override."""

from __future__ import annotations

import os
import secrets
from typing import Any
from urllib.parse import quote

from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestContainer, CeleryWorkerContainer

from kombu_couchdb.couchdb.client import Client

from .server import Server

#: CouchDB's port.
COUCHDB_PORT = '5984/tcp'
#: The administrator. The password is random, because Docker opens the port to the network.
COUCHDB_ENV = {'COUCHDB_USER': 'celery', 'COUCHDB_PASSWORD': secrets.token_hex(16)}
#: The image's data folder, as a volume: the data survive a restart, and are deleted with the test.
COUCHDB_VOLUME = {'bind': '/opt/couchdb/data', 'mode': 'rw'}
#: How long a container may take to start, in seconds.
COUCHDB_CONTAINER_TIMEOUT = 60


class CouchDBContainer(CeleryTestContainer):
    """Apache CouchDB in a container of its official image. `vhost` is the database."""

    @property
    def client(self) -> Client:
        """A client for the database."""
        return self.server.client(self.vhost)

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """`url` for workers, `host_url` for the process of the test, and `hostname`, `port` and `vhost`."""
        return {**self.urls(self.vhost), 'hostname': self.hostname, 'port': self.port, 'vhost': self.vhost}

    def urls(self, database: str) -> dict[str, str]:
        """Return `url` and `host_url` of a database on this server; see `celeryconfig`."""
        inside = self._server_at(self.hostname, int(COUCHDB_PORT.partition('/')[0]))
        return {'url': inside.couchdb_url(database), 'host_url': self.server.couchdb_url(database)}

    @property
    def server(self) -> Server:
        """The server, with the address for the process of the test."""
        return self._server_at(*self._address)

    @property
    def hostname(self) -> str:
        """The server's host name for other containers."""
        return str(self.attrs['Config']['Hostname'])

    @property
    def port(self) -> int:
        """The server's port for the process of the test."""
        return self._address[1]

    @property
    def vhost(self) -> str:
        """The name of the database."""
        return 'celery'

    @property
    def ready_prompt(self) -> str | None:
        """The text that CouchDB logs when it accepts connections."""
        return 'Apache CouchDB has started on http'

    def version(self) -> str:
        """Return the server's version."""
        return str(self.client.welcome()['version'])

    def teardown(self) -> None:
        """Delete the database if the server runs, so that the next test on this server starts with an empty one."""
        self.reload()
        if self.status == 'running':
            self.server.delete(self.vhost)

    @classmethod
    def image(cls) -> str:
        """Return the name of the Docker image."""
        return 'couchdb:3.5'

    @classmethod
    def ports(cls) -> dict[str, Any]:
        """Return the port mapping: CouchDB's port to any free port of this machine."""
        return {COUCHDB_PORT: None}

    @classmethod
    def initial_env(cls) -> dict[str, str]:
        """Return the environment variables, with the administrator's name and password."""
        return COUCHDB_ENV

    @property
    def _address(self) -> tuple[str, int]:
        self._wait_port(COUCHDB_PORT)
        host, port = self.get_addr(COUCHDB_PORT)  # differs if the tests run in a container themselves
        return host, int(port)

    def _server_at(self, host: str, port: int) -> Server:
        user_and_password = ':'.join(quote(self.env[name], safe='') for name in ('COUCHDB_USER', 'COUCHDB_PASSWORD'))
        return Server(f'http://{user_and_password}@{host}:{port}')


class CouchDBWorkerContainer(CeleryWorkerContainer):
    """A worker in pytest-celery's container, with this package in its image."""

    @classmethod
    def pytest_celery_pkg(cls) -> str:
        """Return the package that `pip` installs into the image: `PYTEST_CELERY_PKG`, or the released package."""
        return os.environ.get('PYTEST_CELERY_PKG', 'celery-couchdb[testing]')


class _Node:
    container: Any

    def config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the container's `celeryconfig` updated with `kwargs`; `vhost` is another database on the server."""
        urls = self.container.urls(str(kwargs['vhost'])) if 'vhost' in kwargs else {}
        return {**self.container.celeryconfig, **kwargs, **urls}


class CouchDBTestBroker(_Node, CeleryTestBroker):
    """A CouchDB database as the broker."""

    def teardown(self) -> None:
        """Close the connections of the test's app, then delete the database."""
        if self.app:
            self.app.pool.force_close_all()
        super().teardown()


class CouchDBTestBackend(_Node, CeleryTestBackend):
    """A CouchDB database for results."""
