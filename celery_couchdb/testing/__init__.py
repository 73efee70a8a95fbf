"""A vendor for pytest-celery: CouchDB as the broker and the result backend of an app's tests, with Docker or without.

It is a pytest plugin, which a project's top `conftest.py` asks for by `pytest_plugins`:

`celery_couchdb.testing`
    only adds fixtures;
`celery_couchdb.testing.local`
    has pytest-celery's `celery_setup` run on CouchDB, with a worker as a process, without Docker;
`celery_couchdb.testing.docker`
    has it run on CouchDB in containers.

Nothing else in `celery_couchdb` imports this, and no entry point loads it. It asserts nothing, and so a `conftest.py` may import
it before pytest does: PYTEST_DONT_REWRITE
"""

try:
    import pytest_celery  # noqa: F401
except ModuleNotFoundError as exc:
    raise ImportError('celery_couchdb.testing needs pytest-celery: pip install "celery-couchdb[testing]"') from exc

from .containers import CouchDBContainer, CouchDBWorkerContainer, LocalCouchDBContainer, LocalWorkerContainer
from .fixtures import *  # noqa: F403  pytest finds them here
from .nodes import CouchDBTestBackend, CouchDBTestBroker
from .server import Server, running_server

__all__ = [
    'CouchDBContainer',
    'CouchDBTestBackend',
    'CouchDBTestBroker',
    'CouchDBWorkerContainer',
    'LocalCouchDBContainer',
    'LocalWorkerContainer',
    'Server',
    'running_server',
]
