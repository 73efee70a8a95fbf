"""Connections and apps for the tests, which are closed after the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery
from click.testing import Result
from kombu import Connection

from celery_couchdb.testing import Server
from celery_couchdb.unique import UniqueTask
from kombu_couchdb.admin import dead
from kombu_couchdb.consumer import worker_hooks
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import DatabaseMissing, NotFound
from kombu_couchdb.leases import leader
from kombu_couchdb.queues.databases import broadcasts_name, broadcasts_of
from tests.conftest import PATIENCE, PATIENT, PATIENT_BROKER, wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, Request, command_of, end, record_requests, release_all

if TYPE_CHECKING:  # the optional rooms are imported by their fixtures: tests/acceptance/test_rooms.py removes them
    from celery_couchdb.contrib.beat import CouchDBScheduler, Schedules
    from celery_couchdb.contrib.parcels.mover import Mover
    from tests.web import Browser

Run = Callable[..., Result]

#: A function that opens a connection to the test's database; its arguments are transport options.
Connect = Callable[..., Connection]


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    """See `Connect`."""
    opened: list[Connection] = []

    def connect(**options: Any) -> Connection:
        opened.append(PatientConnection(url, transport_options=options))
        return opened[-1]

    yield connect
    release_all(opened)


@pytest.fixture
def connection(connect: Connect, client: Client) -> Connection:
    """A connection to the test's database, which exists."""
    return connect()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, database: str) -> list[Request]:
    """The requests to the test's database, in order. Tests clear the list to start counting."""
    return record_requests(monkeypatch, database)


@pytest.fixture
def broadcasts(client: Client) -> Client:
    """A client for the broadcasts database of the test's database, which the first broadcast or consumer creates."""
    return broadcasts_of(client)


@pytest.fixture
def sent_broadcasts(monkeypatch: pytest.MonkeyPatch, database: str) -> list[Request]:
    """The requests to the broadcasts database, in order."""
    return record_requests(monkeypatch, broadcasts_name(database))


@pytest.fixture
def app(server: Server, database: str, client: Client) -> Iterator[Celery]:
    """An app that stores its results in a second database."""
    results = f'{database}-results'
    app = Celery('jobs', set_as_current=False, broker=server.couchdb_url(database), backend=server.couchdb_url(results))
    app.conf.update(broker_transport_options=PATIENT_BROKER, result_backend_transport_options=PATIENT)
    app.connection_for_write().ensure_connection(max_retries=1)
    yield app
    end(app)
    try:
        server.client(results).delete()
    except (NotFound, DatabaseMissing):
        pass


@pytest.fixture
def run(app: Celery) -> Run:
    """A function that runs a command like `celery -A app couchdb`."""
    return command_of(app)


#: A function that serves the page of the app, and returns a browser for it; its arguments are those of `create_app`.
Open = Callable[..., 'Browser']


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_page(app: Celery, stack: ExitStack) -> Open:
    """See `Open`."""
    from celery_couchdb.web import create_app
    from tests.web import Browser, served

    def open_page(**settings: Any) -> Browser:
        return Browser(stack.enter_context(served(create_app(app, **settings))))

    return open_page


#: A function that serves the page of another app, and returns a browser whose user, by default the administrator, has
#: logged in; further arguments are those of `create_app`.
OpenApp = Callable[..., 'Browser']


@pytest.fixture
def open_app(server: Server, stack: ExitStack) -> OpenApp:
    """See `OpenApp`."""
    from celery_couchdb.web import create_app
    from tests.web import Browser, served

    def open_app(app: Celery, user: str = server.user, password: str = server.password, **settings: Any) -> Browser:
        browser = Browser(stack.enter_context(served(create_app(app, **settings))))
        browser.log_in(user, password)
        return browser

    return open_app


@pytest.fixture
def admin(open_page: Open, server: Server, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """A browser whose user has logged in as the administrator. The page waits for a server with much else to do."""
    from celery_couchdb.web import accounts

    monkeypatch.setattr(accounts, '_SECONDS', PATIENCE)
    browser = open_page()
    assert browser.log_in(server.user, server.password).ok, browser.text
    return browser


def kill_all(inbox: Inbox, client: Client, count: int) -> None:
    """Receive and reject `count` messages, and wait until they are dead letters."""
    inbox.wait(count)
    for message in inbox.messages:
        message.reject()
    wait_for(lambda: dead.count(client) == count, 'the dead letters')


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module in which a worker registers its hooks, without any; what the test registers is forgotten."""
    monkeypatch.setattr(worker_hooks, '_hooks', {})
    return worker_hooks


def watched(app: Celery) -> set[str]:
    """Return the ids of the tasks for whose results something waits in this process."""
    return {doc_id.removeprefix('celery-task-meta-') for doc_id in app.backend.subscriber._watched.mailboxes}


@pytest.fixture
def report(app: Celery) -> Any:
    @app.task(name='report', base=UniqueTask, shared=False)
    def report(number: int) -> int:
        return number

    return report


@pytest.fixture
def parcels(server: Server) -> Iterator[Client]:
    """A client for a database of parcels, which is set up."""
    from tests.parcels import database_of_parcels

    with database_of_parcels(server) as client:
        yield client


@pytest.fixture
def mover_app(url: str, client: Client, parcels: Client, server: Server) -> Iterator[Celery]:
    """An app with a database of parcels, which accepts the task `add`, and with results."""
    with server.fresh_database() as results:
        app = Celery('mover', set_as_current=False, broker=url, backend=server.couchdb_url(results))
        app.conf.result_backend_transport_options = PATIENT
        app.conf.broker_transport_options = {
            **PATIENT_BROKER,
            'parcels': parcels.address.database,
            'parcels_accept': ['add'],
        }
        yield app
        app.pool.force_close_all()


@pytest.fixture
def mover(mover_app: Celery) -> Iterator[Callable[[], Mover]]:
    """A function that returns movers, each with a connection of its own."""
    from celery_couchdb.contrib.parcels.mover import Mover
    from tests.parcels import movers

    with movers(Mover) as make:
        yield partial(make, mover_app)


@pytest.fixture
def schedules(app: Celery) -> Iterator[Schedules]:
    from celery_couchdb.contrib.beat import Schedules

    schedules = Schedules(app)
    yield schedules
    schedules.client.close()


def until(scheduler: CouchDBScheduler, condition: Callable[[], Any], what: str = '') -> Any:
    """Call `tick` until the condition is true."""

    def ticked() -> Any:
        scheduler.tick()
        return condition()

    return wait_for(ticked, what)


def until_idle(scheduler: CouchDBScheduler, seconds: float) -> None:
    """Call `tick` until the scheduler leads, knows all entries, and nothing is due for so many seconds."""

    from celery_couchdb.contrib.beat.scheduler import DueTasks

    def is_idle() -> bool:
        duty = scheduler._led.duty if scheduler._led is not None else None
        return isinstance(duty, DueTasks) and not duty._stale and duty.next_in() > seconds

    until(scheduler, is_idle)


class Machine:
    """The monotonic clock of the leader of beats, which a test moves forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    from celery_couchdb.contrib.beat import scheduler

    machine = Machine()
    for module in (leader, scheduler):
        monkeypatch.setattr(module, 'time', machine)
    monkeypatch.setattr(leader, 'uptime', machine.monotonic)
    return machine


#: A function that creates a scheduler whose code has the given entries. It does nothing until `tick` is called.
Beat = Callable[..., 'CouchDBScheduler']


@pytest.fixture
def beat(app: Celery) -> Iterator[Beat]:
    """See `Beat`."""
    from celery_couchdb.contrib.beat import CouchDBScheduler

    app.conf.result_expires = None
    made: list[CouchDBScheduler] = []

    def beat(entries: dict[Any, Any] | None = None, **more: dict[str, Any]) -> CouchDBScheduler:
        app.conf.beat_schedule = {**(entries or {}), **more}
        made.append(CouchDBScheduler(app))
        made[-1].max_interval = 0.0  # do not wait in `tick`
        return made[-1]

    yield beat
    for one in made:
        one.close()


def entry_of(seconds: Any = 3600, **members: Any) -> dict[str, Any]:
    """Return an entry in the code of an app."""
    return {'task': 'add', 'schedule': seconds, **members}
