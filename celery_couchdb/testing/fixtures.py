"""The fixtures: a server without Docker, and CouchDB in containers. The names are used nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_docker_tools import container, fxtr, volume

from .containers import COUCHDB_CONTAINER_TIMEOUT, COUCHDB_VOLUME, CouchDBContainer
from .nodes import CouchDBTestBackend, CouchDBTestBroker
from .server import Server, running_server

# -- without Docker


@pytest.fixture(scope='session')
def couchdb_server() -> Iterator[Server]:
    """The server for all tests of a session: the one in `COUCHDB_URL`, or an embedded server."""
    with running_server() as server:
        yield server


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
