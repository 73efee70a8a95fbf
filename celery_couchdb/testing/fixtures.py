"""The fixtures: a server without Docker, and CouchDB in containers. The names are used nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_docker_tools import container, fxtr, volume

from .containers import (
    COUCHDB_CONTAINER_TIMEOUT,
    COUCHDB_VOLUME,
    CouchDBContainer,
    CouchDBTestBackend,
    CouchDBTestBroker,
)
from .server import Server, running_server

# -- without Docker


@pytest.fixture(scope='session')
def couchdb_server() -> Iterator[Server]:
    """The server for all tests of a session: the one in `COUCHDB_URL`, or an embedded server."""
    with running_server() as server:
        yield server


# -- with Docker


@pytest.fixture
def celery_couchdb_broker(default_couchdb_broker: CouchDBContainer) -> Iterator[CouchDBTestBroker]:
    """A broker in a container."""
    broker = CouchDBTestBroker(default_couchdb_broker)
    yield broker
    broker.teardown()


@pytest.fixture
def celery_couchdb_backend(default_couchdb_backend: CouchDBContainer) -> Iterator[CouchDBTestBackend]:
    """A result backend in a container."""
    backend = CouchDBTestBackend(default_couchdb_backend)
    yield backend
    backend.teardown()


@pytest.fixture
def _container_cls() -> type[CouchDBContainer]:
    """The class that defines image, ports and environment of a container."""
    return CouchDBContainer


def _from_class(role: str, method: str) -> Any:
    """Return the fixture for what a method of the class of a container returns."""

    @pytest.fixture
    def value(request: pytest.FixtureRequest) -> Any:
        return getattr(request.getfixturevalue(f'default_couchdb_{role}_cls'), method)()

    return value


def _container(role: str) -> Any:
    """Return the fixture for the container of the broker or of the result backend."""
    return container(
        image=f'{{default_couchdb_{role}_image}}',
        ports=fxtr(f'default_couchdb_{role}_ports'),
        environment=fxtr(f'default_couchdb_{role}_env'),
        network='{default_pytest_celery_network.name}',
        volumes={f'{{default_couchdb_{role}_volume.name}}': COUCHDB_VOLUME},
        wrapper_class=CouchDBContainer,
        timeout=COUCHDB_CONTAINER_TIMEOUT,
    )


default_couchdb_broker_cls = default_couchdb_backend_cls = _container_cls

default_couchdb_broker_image = _from_class('broker', 'image')
default_couchdb_broker_ports = _from_class('broker', 'ports')
default_couchdb_broker_env = _from_class('broker', 'initial_env')
default_couchdb_broker_volume = volume()
default_couchdb_broker = _container('broker')

default_couchdb_backend_image = _from_class('backend', 'image')
default_couchdb_backend_ports = _from_class('backend', 'ports')
default_couchdb_backend_env = _from_class('backend', 'initial_env')
default_couchdb_backend_volume = volume()
default_couchdb_backend = _container('backend')
