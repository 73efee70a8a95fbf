"""CouchDB and a worker as containers of pytest-celery: in Docker, or as processes on this machine."""

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

#: How long a worker may take to start or to stop, and the pause between two looks at its log.
_TIMEOUT_SECONDS, _PAUSE_SECONDS = 180.0, 0.02


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
        return {'url': self._internal_server.couchdb_url(database), 'host_url': self.server.couchdb_url(database)}

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
        return COUCHDB_DATABASE

    @property
    def ready_prompt(self) -> str | None:
        """The text that CouchDB logs when it accepts connections."""
        return COUCHDB_READY

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
        return COUCHDB_IMAGE

    @classmethod
    def ports(cls) -> dict[str, Any]:
        """Return the port mapping: CouchDB's port to any free port of this machine."""
        return COUCHDB_PORTS

    @classmethod
    def initial_env(cls) -> dict[str, str]:
        """Return the environment variables, with the administrator's name and password."""
        return COUCHDB_ENV

    @property
    def _address(self) -> tuple[str, int]:
        self._wait_port(COUCHDB_PORT)
        host, port = self.get_addr(COUCHDB_PORT)  # differs if the tests run in a container themselves
        return host, int(port)

    @property
    def _internal_server(self) -> Server:
        """The server, with the address for other containers."""
        return self._server_at(self.hostname, int(COUCHDB_PORT.partition('/')[0]))

    def _server_at(self, host: str, port: int) -> Server:
        user_and_password = ':'.join(quote(self.env[name], safe='') for name in ('COUCHDB_USER', 'COUCHDB_PASSWORD'))
        return Server(f'http://{user_and_password}@{host}:{port}')


class LocalCouchDBContainer(CouchDBContainer):
    """A database on the server in `COUCHDB_URL`, or on an embedded server, with the interface of a container."""

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
    def _internal_server(self) -> Server:
        return self._server

    def _wait_ready(self, timeout: int = 30) -> bool:
        self.client.welcome()
        return True


class CouchDBWorkerContainer(CeleryWorkerContainer):
    """A worker in pytest-celery's container, with this package in its image."""

    @classmethod
    def pytest_celery_pkg(cls) -> str:
        """Return the package that `pip` installs into the image: `PYTEST_CELERY_PKG`, or the released package."""
        return os.environ.get('PYTEST_CELERY_PKG', WORKER_PACKAGE)


class LocalWorkerContainer(CeleryWorkerContainer):
    """A worker that is a process on this machine, and has a folder instead of a volume."""

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], content: Mapping[str, bytes], folder: Path
    ) -> LocalWorkerContainer:
        """Create `folder`, write the files in `content` (text by relative path) into it, and start a worker there.

        This returns at once; `ready` waits until the worker is ready.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        return cls(Process(command, environment, folder))

    @classmethod
    def version(cls) -> str:
        """Return the installed version of Celery."""
        return str(celery.__version__)

    @classmethod
    def utils_module(cls) -> ModuleType:
        """Return the module that pytest-celery runs beside the worker to inspect its processes."""
        return inside

    @property
    def pid(self) -> int:
        """The id of the worker's process."""
        return int(self._container.pid)

    def wait(self, timeout: float = _TIMEOUT_SECONDS) -> int:
        """Wait until the worker ends and return its exit status.

        *Raises* `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        return int(self._container.wait(timeout)['StatusCode'])

    def terminate(self, timeout: float = _TIMEOUT_SECONDS) -> int:
        """Start a warm shutdown of the worker, wait until it ends, and return its exit status.

        *Raises* `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        self.kill('SIGTERM')
        return self.wait(timeout)

    def teardown(self) -> None:
        """Kill the worker and its child processes."""
        self.kill('SIGKILL')

    def _wait_ready(self, timeout: float = _TIMEOUT_SECONDS) -> bool:
        # Read only the log since the latest start, and do not wait for a worker that has ended.
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
            time.sleep(_PAUSE_SECONDS)
        return True
