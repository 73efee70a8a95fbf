"""The CouchDB server of the tests: the one at `COUCHDB_URL` if that is set, else an embedded server."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import quote

import pytest
import requests
from hypothesis import HealthCheck, Phase, settings

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.leases.lease import set_worker
from tests import patience

pytest_plugins = ['celery_couchdb.testing']

T = TypeVar('T')

# Random examples: few by default, the same in each run, however long they take. `HOSTILE_EXAMPLES=1000` sets their
# number, and each run has other ones.
_MANY = os.environ.get('HOSTILE_EXAMPLES')

settings.register_profile(
    'tests',
    derandomize=not _MANY,
    max_examples=int(_MANY or 25),
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if _MANY else [])],
    suppress_health_check=list(HealthCheck),
)
settings.load_profile('tests')

# Coverage measures the processes of pytest-xdist, but no programs that tests start: it would slow them down.
if 'PYTEST_XDIST_WORKER' in os.environ:
    os.environ.pop('COVERAGE_PROCESS_CONFIG', None)

# A shell starts background jobs with SIGINT ignored. The processes that tests start would inherit this, and could not
# be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: How long a test waits for an expected event, in seconds.
PATIENCE = patience.PATIENCE

#: Options for tests that are not about time limits, because a server on a busy machine may respond late. The lease of a
#: consumer must be longer than the time limit of a request; for a shorter lease see `PatientConnection`.
PATIENT = {'request_timeout': PATIENCE, 'connect_timeout': PATIENCE}
PATIENT_BROKER = {**PATIENT, 'visibility_timeout': 2 * PATIENCE}

#: Options of a worker that a test kills: a short lease, and the longest time limits that it allows.
SHORT_LEASE = {'visibility_timeout': 4.0, 'request_timeout': 3.9, 'connect_timeout': 3.9}


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out the modules and tests, which stay: it takes 0.15 s for them each time."""
    gc.collect()
    gc.freeze()


def wait_for(condition: Callable[[], T], what: str = '', timeout: float = PATIENCE) -> T:
    """Return the first true value of `condition()`; fail the test if there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f'waited {timeout:g} s for {what or condition}')
        time.sleep(0.02)
    return value


@pytest.fixture(autouse=True)
def no_consumer_left() -> Iterator[None]:
    """Wait until all consumers have ended.

    A consumer that outlives its test disturbs later tests that count requests or log lines.
    """
    yield
    wait_for(
        lambda: (
            not any(
                thread.name.startswith('couchdb-') and not thread.name.endswith('-feed')
                for thread in threading.enumerate()
            )
        ),
        'all consumer threads to end',
    )
    set_worker(None)  # the test may have run a worker in this process


@pytest.fixture(scope='session')
def server(couchdb_server: Server) -> Server:
    """The server that all tests share; each test has databases of its own."""
    return couchdb_server


@pytest.fixture(scope='session')
def apache_couchdb(server: Server) -> bool:
    """Whether the server is Apache CouchDB, which has users and other features that the embedded server lacks."""
    return 'couchdb' in server.client('any').welcome()


class Users:
    """Ordinary users of an Apache CouchDB server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._made: dict[str, str] = {}

    def __call__(self, name: str, password: str, *roles: str) -> None:
        """Create a user, or replace the password and roles of one created before."""
        path = self._server.url + f'/_users/{quote(f"org.couchdb.user:{name}", safe="")}'
        doc = {'name': name, 'password': password, 'roles': roles, 'type': 'user'}
        if name in self._made:
            doc['_rev'] = requests.get(path, timeout=PATIENCE).json()['_rev']
        answer = requests.put(path, timeout=PATIENCE, json=doc)
        assert answer.status_code == 201, answer.text
        self._made[name] = path

    def delete(self) -> None:
        """Delete the users that were created."""
        for path in self._made.values():
            rev = requests.get(path, timeout=PATIENCE).json()['_rev']
            requests.delete(path, params={'rev': rev}, timeout=PATIENCE)


@pytest.fixture
def users(server: Server) -> Iterator[Users]:
    """A function that creates users, who are deleted after the test. Needs Apache CouchDB."""
    users = Users(server)
    yield users
    users.delete()


@pytest.fixture
def member(users: Users, apache_couchdb: bool) -> dict[str, str]:
    """The `user` and `password` of a user without any rights. Needs Apache CouchDB."""
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    login = {'user': f'member-{uuid.uuid4().hex[:12]}', 'password': f'secret-{uuid.uuid4().hex}'}
    users(login['user'], login['password'])
    return login


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """The name of a database for this test alone. It is deleted after the test, whether or not the test created it."""
    with server.fresh_database() as name:
        yield name


@pytest.fixture
def client(server: Server, database: str) -> Iterator[Client]:
    """A client for the test's database, which exists."""
    client = server.client(database)
    client.create()
    yield client
    client.close()


@pytest.fixture
def url(server: Server, database: str) -> str:
    """The `couchdb://` URL of the test's database."""
    return server.couchdb_url(database)
