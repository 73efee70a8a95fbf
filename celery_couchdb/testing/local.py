"""A pytest plugin that makes `celery_setup` use CouchDB without Docker. The worker is a process.

pytest-celery's fixtures for the worker apply: its class, app, tasks, signals, command and environment.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .containers import LocalWorkerContainer
from .nodes import CouchDBTestBackend, CouchDBTestBroker

pytest_plugins = ['celery_couchdb.testing']


@pytest.fixture
def celery_broker(celery_local_couchdb_broker: CouchDBTestBroker) -> CouchDBTestBroker:
    """Use CouchDB instead of pytest-celery's brokers."""
    return celery_local_couchdb_broker


@pytest.fixture
def celery_backend(celery_local_couchdb_backend: CouchDBTestBackend) -> CouchDBTestBackend:
    """Use CouchDB instead of pytest-celery's result backends."""
    return celery_local_couchdb_backend


@pytest.fixture
def default_worker_container_cls() -> type[LocalWorkerContainer]:
    """Use a process as the worker."""
    return LocalWorkerContainer


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: type[LocalWorkerContainer],
    default_worker_command: list[str],
    default_worker_env: dict[str, str],
    default_worker_initial_content: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LocalWorkerContainer]:
    """Provide a worker that is ready. Pytest shows its log if a test fails, as with a container."""
    worker = default_worker_container_cls.start(
        default_worker_command, default_worker_env, default_worker_initial_content, tmp_path_factory.mktemp('worker')
    )
    try:
        worker.ready()
        yield worker
    finally:
        worker.teardown()
