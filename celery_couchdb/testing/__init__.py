"""A pytest-celery vendor: CouchDB as the broker and the result backend in the tests of an app.

It is a pytest plugin. Name one of these modules in `pytest_plugins` of your top `conftest.py`:

`celery_couchdb.testing`
    adds fixtures, among them a server without Docker, and changes nothing else;
`celery_couchdb.testing.docker`
    makes `celery_setup` use CouchDB and workers in containers.

No other module of `celery_couchdb` imports this package, and no entry point loads it. It has no assertions, so a
`conftest.py` may import it before pytest rewrites assertions: PYTEST_DONT_REWRITE
"""

try:
    import pytest_celery  # noqa: F401
except ModuleNotFoundError as exc:
    raise ImportError('celery_couchdb.testing needs pytest-celery: pip install "celery-couchdb[testing]"') from exc

from .containers import CouchDBContainer, CouchDBTestBackend, CouchDBTestBroker, CouchDBWorkerContainer
from .fixtures import *  # noqa: F403  pytest finds them here
from .server import Server, running_server

__all__ = [
    'CouchDBContainer',
    'CouchDBTestBackend',
    'CouchDBTestBroker',
    'CouchDBWorkerContainer',
    'Server',
    'running_server',
]
