"""A pytest plugin that makes `celery_setup` use CouchDB and workers in containers.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import pytest

from .containers import CouchDBTestBackend, CouchDBTestBroker, CouchDBWorkerContainer

pytest_plugins = ['celery_couchdb.testing']


@pytest.fixture
def celery_broker(celery_couchdb_broker: CouchDBTestBroker) -> CouchDBTestBroker:
    """Use CouchDB instead of pytest-celery's brokers."""
    return celery_couchdb_broker


@pytest.fixture
def celery_backend(celery_couchdb_backend: CouchDBTestBackend) -> CouchDBTestBackend:
    """Use CouchDB instead of pytest-celery's result backends."""
    return celery_couchdb_backend


@pytest.fixture(scope='session')
def default_worker_container_session_cls() -> type[CouchDBWorkerContainer]:
    """Use an image with this package for the worker."""
    return CouchDBWorkerContainer


@pytest.fixture
def default_worker_container_cls(
    default_worker_container_session_cls: type[CouchDBWorkerContainer],
) -> type[CouchDBWorkerContainer]:
    """Use the same class for each container."""
    return default_worker_container_session_cls
