"""The pytest plugin with which `celery_setup` runs on CouchDB in containers, and so do its workers.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import pytest

from .containers import CouchDBWorkerContainer
from .nodes import CouchDBTestBackend, CouchDBTestBroker

pytest_plugins = ['celery_couchdb.testing']


@pytest.fixture
def celery_broker(celery_couchdb_broker: CouchDBTestBroker) -> CouchDBTestBroker:
    """CouchDB instead of all the brokers that pytest-celery knows."""
    return celery_couchdb_broker


@pytest.fixture
def celery_backend(celery_couchdb_backend: CouchDBTestBackend) -> CouchDBTestBackend:
    """CouchDB instead of all the result backends that pytest-celery knows."""
    return celery_couchdb_backend


@pytest.fixture(scope='session')
def default_worker_container_session_cls() -> type[CouchDBWorkerContainer]:
    """The worker's image has this package."""
    return CouchDBWorkerContainer


@pytest.fixture
def default_worker_container_cls(
    default_worker_container_session_cls: type[CouchDBWorkerContainer],
) -> type[CouchDBWorkerContainer]:
    """The same for what concerns one container."""
    return default_worker_container_session_cls
