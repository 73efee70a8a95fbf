"""The fixtures: `celery_couchdb_…` with Docker, `celery_local_couchdb_…` without. The names are used nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_docker_tools import container, fxtr, volume

from .containers import CouchDBContainer, LocalCouchDBContainer
from .defaults import COUCHDB_CONTAINER_TIMEOUT, COUCHDB_VOLUME
from .nodes import CouchDBTestBackend, CouchDBTestBroker
from .server import Server, fresh_name, running_server

__all__ = [
    'celery_couchdb_backend',
    'celery_couchdb_broker',
    'celery_local_couchdb_backend',
    'celery_local_couchdb_broker',
    'couchdb_server',
    'default_couchdb_backend',
    'default_couchdb_backend_cls',
    'default_couchdb_backend_env',
    'default_couchdb_backend_image',
    'default_couchdb_backend_ports',
    'default_couchdb_backend_volume',
    'default_couchdb_broker',
    'default_couchdb_broker_cls',
    'default_couchdb_broker_env',
    'default_couchdb_broker_image',
    'default_couchdb_broker_ports',
    'default_couchdb_broker_volume',
    'default_local_couchdb_backend',
    'default_local_couchdb_broker',
]


# -- without Docker


@pytest.fixture(scope='session')
def couchdb_server() -> Iterator[Server]:
    """The server for all tests of a session: the one in `COUCHDB_URL`, or an embedded server."""
    with running_server() as server:
        yield server


@pytest.fixture
def default_local_couchdb_broker(couchdb_server: Server) -> LocalCouchDBContainer:
    """A fresh database for messages."""
    return _local(couchdb_server)


@pytest.fixture
def default_local_couchdb_backend(couchdb_server: Server) -> LocalCouchDBContainer:
    """A fresh database for results."""
    return _local(couchdb_server)


def _local(server: Server) -> LocalCouchDBContainer:
    container = LocalCouchDBContainer(server, fresh_name())
    if container.status == 'exited':
        container.restart()  # another test has killed it
    return container


@pytest.fixture
def celery_local_couchdb_broker(default_local_couchdb_broker: LocalCouchDBContainer) -> Iterator[CouchDBTestBroker]:
    """A broker without Docker. Its database is deleted after the test."""
    broker = CouchDBTestBroker(default_local_couchdb_broker)
    yield broker
    broker.teardown()


@pytest.fixture
def celery_local_couchdb_backend(default_local_couchdb_backend: LocalCouchDBContainer) -> Iterator[CouchDBTestBackend]:
    """A result backend without Docker. Its database is deleted after the test."""
    backend = CouchDBTestBackend(default_local_couchdb_backend)
    yield backend
    backend.teardown()


# -- with Docker: the broker


@pytest.fixture
def celery_couchdb_broker(default_couchdb_broker: CouchDBContainer) -> Iterator[CouchDBTestBroker]:
    """A broker in a container."""
    broker = CouchDBTestBroker(default_couchdb_broker)
    yield broker
    broker.teardown()


@pytest.fixture
def default_couchdb_broker_cls() -> type[CouchDBContainer]:
    """The class that defines image, ports and environment of the broker's container."""
    return CouchDBContainer


@pytest.fixture
def default_couchdb_broker_image(default_couchdb_broker_cls: type[CouchDBContainer]) -> str:
    """The image of the broker's container."""
    return default_couchdb_broker_cls.image()


@pytest.fixture
def default_couchdb_broker_ports(default_couchdb_broker_cls: type[CouchDBContainer]) -> dict[str, Any]:
    """The ports of the broker's container."""
    return default_couchdb_broker_cls.ports()


@pytest.fixture
def default_couchdb_broker_env(default_couchdb_broker_cls: type[CouchDBContainer]) -> dict[str, str]:
    """The environment of the broker's container."""
    return default_couchdb_broker_cls.initial_env()


default_couchdb_broker_volume = volume()

default_couchdb_broker = container(
    image='{default_couchdb_broker_image}',
    ports=fxtr('default_couchdb_broker_ports'),
    environment=fxtr('default_couchdb_broker_env'),
    network='{default_pytest_celery_network.name}',
    volumes={'{default_couchdb_broker_volume.name}': COUCHDB_VOLUME},
    wrapper_class=CouchDBContainer,
    timeout=COUCHDB_CONTAINER_TIMEOUT,
)


# -- with Docker: the result backend


@pytest.fixture
def celery_couchdb_backend(default_couchdb_backend: CouchDBContainer) -> Iterator[CouchDBTestBackend]:
    """A result backend in a container."""
    backend = CouchDBTestBackend(default_couchdb_backend)
    yield backend
    backend.teardown()


@pytest.fixture
def default_couchdb_backend_cls() -> type[CouchDBContainer]:
    """The class that defines image, ports and environment of the result backend's container."""
    return CouchDBContainer


@pytest.fixture
def default_couchdb_backend_image(default_couchdb_backend_cls: type[CouchDBContainer]) -> str:
    """The image of the result backend's container."""
    return default_couchdb_backend_cls.image()


@pytest.fixture
def default_couchdb_backend_ports(default_couchdb_backend_cls: type[CouchDBContainer]) -> dict[str, Any]:
    """The ports of the result backend's container."""
    return default_couchdb_backend_cls.ports()


@pytest.fixture
def default_couchdb_backend_env(default_couchdb_backend_cls: type[CouchDBContainer]) -> dict[str, str]:
    """The environment of the result backend's container."""
    return default_couchdb_backend_cls.initial_env()


default_couchdb_backend_volume = volume()

default_couchdb_backend = container(
    image='{default_couchdb_backend_image}',
    ports=fxtr('default_couchdb_backend_ports'),
    environment=fxtr('default_couchdb_backend_env'),
    network='{default_pytest_celery_network.name}',
    volumes={'{default_couchdb_backend_volume.name}': COUCHDB_VOLUME},
    wrapper_class=CouchDBContainer,
    timeout=COUCHDB_CONTAINER_TIMEOUT,
)
