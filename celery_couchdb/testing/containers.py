"""CouchDB and a worker as pytest-celery's containers: with Docker, and as processes of this machine without it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import celery
from pytest_celery import CeleryTestContainer, CeleryWorkerContainer
from pytest_docker_tools.exceptions import ContainerFailed, TimeoutError

from kombu_couchdb.couchdb.client import Client

from . import inside
from .defaults import (
    COUCHDB_DATABASE,
    COUCHDB_ENV,
    COUCHDB_IMAGE,
    COUCHDB_PORT,
    COUCHDB_PORTS,
    COUCHDB_READY,
    WORKER_PACKAGE,
)
from .process import Process, ServerProcess
from .server import Server

__all__ = ['CouchDBContainer', 'CouchDBWorkerContainer', 'LocalCouchDBContainer', 'LocalWorkerContainer']

#: How long a worker may take until it is ready, in seconds, and how often its log is read.
_START_TIMEOUT, _INTERVAL = 180.0, 0.02


class CouchDBContainer(CeleryTestContainer):
    """Apache CouchDB in a container of its official image. `vhost` is the database."""

    @property
    def client(self) -> Client:
        """A client for the database."""
        return self.server.client(self.vhost)

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """`url` for workers, `host_url` for the test's own process, and `hostname`, `port` and `vhost`."""
        return {**self.urls(self.vhost), 'hostname': self.hostname, 'port': self.port, 'vhost': self.vhost}

    def urls(self, database: str) -> dict[str, str]:
        """Return `url` and `host_url` of any database on this server."""
        return {'url': self._inside.couchdb_url(database), 'host_url': self.server.couchdb_url(database)}

    @property
    def url(self) -> str:
        """The database's URL for other containers."""
        return self.urls(self.vhost)['url']

    @property
    def host_url(self) -> str:
        """The database's URL for this machine."""
        return self.urls(self.vhost)['host_url']

    @property
    def server(self) -> Server:
        """The server, as the tests reach it."""
        return self._at(*self._address)

    @property
    def hostname(self) -> str:
        """The name by which other containers know it."""
        return str(self.attrs['Config']['Hostname'])

    @property
    def port(self) -> int:
        """The port at which the tests reach it."""
        return self._address[1]

    @property
    def vhost(self) -> str:
        """The name of the database."""
        return COUCHDB_DATABASE

    @property
    def ready_prompt(self) -> str | None:
        """What CouchDB logs when it listens."""
        return COUCHDB_READY

    def version(self) -> str:
        """Return the version that the server tells."""
        return str(self.client.welcome()['version'])

    def teardown(self) -> None:
        """Delete the database, if the server runs: one that serves many tests is empty for the next."""
        self.reload()
        if self.status == 'running':
            self.server.delete(self.vhost)

    @classmethod
    def image(cls) -> str:
        """Return the image's name."""
        return COUCHDB_IMAGE

    @classmethod
    def ports(cls) -> dict[str, Any]:
        """Return the ports to be bound: any free one of this machine."""
        return COUCHDB_PORTS

    @classmethod
    def initial_env(cls) -> dict[str, str]:
        """Return the environment, which names the administrator and the password."""
        return COUCHDB_ENV

    @property
    def _address(self) -> tuple[str, int]:
        self._wait_port(COUCHDB_PORT)
        host, port = self.get_addr(COUCHDB_PORT)  # another one if the tests run in a container themselves
        return host, int(port)

    @property
    def _inside(self) -> Server:
        return self._at(self.hostname, int(COUCHDB_PORT.partition('/')[0]))

    def _at(self, host: str, port: int) -> Server:
        login = ':'.join(quote(self.env[name], safe='') for name in ('COUCHDB_USER', 'COUCHDB_PASSWORD'))
        return Server(f'http://{login}@{host}:{port}')


class LocalCouchDBContainer(CouchDBContainer):
    """A database on the server that `COUCHDB_URL` names, or on an embedded one, instead of a container."""

    def __init__(self, server: Server, database: str) -> None:
        super().__init__(ServerProcess(server))
        self._server, self._database = server, database

    @property
    def server(self) -> Server:
        """The server."""
        return self._server

    @property
    def hostname(self) -> str:
        """The server's host."""
        return self._server.host

    @property
    def port(self) -> int:
        """The server's port."""
        return self._server.port

    @property
    def vhost(self) -> str:
        """The name of the database."""
        return self._database

    @property
    def _inside(self) -> Server:
        return self._server

    def _wait_ready(self, timeout: int = 30) -> bool:
        self.client.welcome()
        return True


class CouchDBWorkerContainer(CeleryWorkerContainer):
    """pytest-celery's own worker in a container, whose image has this package, too."""

    @classmethod
    def pytest_celery_pkg(cls) -> str:
        """Return what `pip` installs into the image: `PYTEST_CELERY_PKG`, else the released package."""
        return os.environ.get('PYTEST_CELERY_PKG', WORKER_PACKAGE)


class LocalWorkerContainer(CeleryWorkerContainer):
    """A worker that runs as a process of this machine, in a folder instead of a volume."""

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], content: Mapping[str, bytes], folder: Path
    ) -> LocalWorkerContainer:
        """Write `content`, the text of files by their paths, into a folder, which is made, and start a worker there.

        It returns at once; `ready` waits.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        return cls(Process(command, environment, folder))

    @classmethod
    def version(cls) -> str:
        """Return the version of Celery that is installed here."""
        return str(celery.__version__)

    @classmethod
    def utils_module(cls) -> ModuleType:
        """Return what can be asked beside the worker."""
        return inside

    @property
    def pid(self) -> int:
        """The id of the worker's process."""
        return int(self._container.pid)

    def wait(self, timeout: float = _START_TIMEOUT) -> int:
        """Wait up to `timeout` seconds for the worker's end and return its exit status."""
        return int(self._container.wait(timeout)['StatusCode'])

    def terminate(self, timeout: float = _START_TIMEOUT) -> int:
        """Stop the worker warmly, within `timeout` seconds, and return its exit status."""
        self.kill('SIGTERM')
        return self.wait(timeout)

    def teardown(self) -> None:
        """Kill what is left of the worker."""
        self.kill('SIGKILL')

    def _wait_ready(self, timeout: float = _START_TIMEOUT) -> bool:
        # What it logged before a restart does not count; nor is it waited for once it has ended.
        deadline = time.monotonic() + timeout
        while self.ready_prompt.encode() not in self._container.latest_logs():
            if self.status == 'exited':
                raise ContainerFailed(
                    self, f'the worker {self.name} ended before it was ready; it logged:\n{self.logs()}'
                )
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f'the worker {self.name} was not ready within {timeout:g} s; it logged:\n{self.logs()}'
                )
            time.sleep(_INTERVAL)
        return True
