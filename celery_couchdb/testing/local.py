"""The pytest plugin with which `celery_setup` runs on CouchDB without Docker, with a worker that is a process.

What pytest-celery's fixtures say of the worker holds: its class, app, tasks, signals, command and environment.
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
    """CouchDB instead of all the brokers that pytest-celery knows."""
    return celery_local_couchdb_broker


@pytest.fixture
def celery_backend(celery_local_couchdb_backend: CouchDBTestBackend) -> CouchDBTestBackend:
    """CouchDB instead of all the result backends that pytest-celery knows."""
    return celery_local_couchdb_backend


@pytest.fixture
def default_worker_container_cls() -> type[LocalWorkerContainer]:
    """The class of the worker: a process."""
    return LocalWorkerContainer


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: type[LocalWorkerContainer],
    default_worker_command: list[str],
    default_worker_env: dict[str, str],
    default_worker_initial_content: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LocalWorkerContainer]:
    """A worker that is ready. As with a container, pytest shows its log with a test that fails."""
    worker = default_worker_container_cls.start(
        default_worker_command, default_worker_env, default_worker_initial_content, tmp_path_factory.mktemp('worker')
    )
    try:
        worker.ready()
        yield worker
    finally:
        worker.teardown()
