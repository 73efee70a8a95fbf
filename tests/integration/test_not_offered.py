"""Commands and the page behind a managed service without some of CouchDB's endpoints for administrators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from celery import Celery
from click.testing import Result
from kombu import Connection

from celery_couchdb.testing import Server
from examples.managed.service import Service
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, NotOffered
from kombu_couchdb.queues.databases import ensure
from tests.conftest import PATIENT, PATIENT_BROKER
from tests.support import Inbox, command_of, end, publish, release_all

#: All endpoints that a service may lack.
ALL = '_purge|_compact|_view_cleanup|_revs_limit|_security|_membership|_node|_active_tasks|_users|_session'

#: The age of tombstones that are purged must be longer than the lease.
SHORT_LEASE = {'visibility_timeout': 0.5, 'request_timeout': 0.4, 'connect_timeout': 0.4}

#: Opens the service without these endpoints; they are refused with a status, 403 by default.
Open = Callable[..., Server]


@contextmanager
def service(server: Server, endpoints: str = ALL, status: int = 403) -> Iterator[Server]:
    pattern = re.compile(rf'\S+ (/[^/]+)?/({endpoints})(/.*)?')
    with Service(server.url, {}, not_offered=pattern, not_offered_status=status) as found:
        yield Server(found.url)


@pytest.fixture
def opened(server: Server, stack: ExitStack) -> Open:
    """See `Open`."""
    return lambda *args, **settings: stack.enter_context(service(server, *args, **settings))


@contextmanager
def app_on(service: Server, database: str, **options: Any) -> Iterator[Celery]:
    """Provide an app whose databases are on the service."""
    app = Celery(
        'jobs',
        set_as_current=False,
        broker=service.couchdb_url(database),
        backend=service.couchdb_url(f'{database}-results'),
    )
    app.conf.update(broker_transport_options={**PATIENT_BROKER, **options}, result_backend_transport_options=PATIENT)
    yield app
    end(app)


def succeeded(done: Result) -> str:
    assert (done.exit_code, done.stderr.count('Error')) == (0, 0), done.output
    return str(done.stdout)


def not_offered(output: str) -> list[str]:
    """Return which endpoints the service does not offer, as the output says."""
    return re.findall(r'does not offer (\w+): ', output)


@pytest.fixture
def databases(server: Server, stack: ExitStack) -> list[str]:
    """Databases that do not exist: of the broker, of results, of parcels, of a device and of two regions."""
    name = stack.enter_context(server.fresh_database())
    names = [name, *(f'{name}-{what}' for what in ('results', 'parcels', 'parcels-phone', 'eu', 'us'))]
    for each in names:
        stack.callback(server.delete, each)
    return names


@pytest.mark.parametrize('status', [403, 404, 405, 501])
def test_commands_say_once_what_is_missing_and_do_the_rest(
    opened: Open, databases: list[str], status: int, apache_couchdb: bool
) -> None:
    service = opened(status=status)
    broker, _, parcels, _, eu, us = databases
    regions = {'eu': service.couchdb_url(eu), 'us': service.couchdb_url(us)}
    with app_on(service, broker, parcels=parcels, region='eu', regions=regions) as app:
        run = command_of(app)
        shown = succeeded(run('setup', '--member', 'ann', '--device', 'phone'))
        assert 'done     _design/celery-v8 is up to date' in shown
        assert 'done     the workers move the parcels of phone' in shown
        assert shown.count('skipped  only administrators and members may read and write, among them ann\n') == 3
        assert f'among them {service.user}, phone\n' in shown or not service.user
        native = ['_revs_limit', '_security', '_users'] if apache_couchdb else ['_security']
        assert not_offered(shown) == native
        assert not_offered(succeeded(run('regions', 'setup', '--member', 'us'))) == [
            name for name in native if name != '_revs_limit'
        ]
        for command in (['check'], ['status'], ['regions', 'status'], ['parcels', 'list'], ['parcels', 'devices']):
            assert 'does not offer' not in succeeded(run(*command))
        if apache_couchdb:
            assert not_offered(succeeded(run('vacuum', '--yes'))) == ['_purge', '_view_cleanup', '_compact']


def test_database_is_created_and_used(opened: Open, databases: list[str]) -> None:
    connection = Connection(opened().couchdb_url(databases[0]))
    try:
        publish(connection, 'hello')
        assert Inbox(connection).wait(1) == ['hello']
    finally:
        release_all([connection])


# -- the vacuum


@pytest.fixture
def vacuum(opened: Open, client: Client, apache_couchdb: bool) -> Callable[[str], str]:
    """A function that deletes a message, runs a vacuum on a service without some endpoints, and returns its output."""
    if not apache_couchdb:
        pytest.skip('the embedded server keeps everything in memory and cannot purge')
    ensure(client, True)

    def vacuum(endpoints: str) -> str:
        message = {'_id': '0' * 30, 'type': 'WorkItem'}
        client.put({**message, '_rev': client.put(message), '_deleted': True})
        with app_on(opened(endpoints), client.address.database, **SHORT_LEASE) as app:
            return succeeded(command_of(app)('vacuum', '--yes', '--age', '0.6'))

    return vacuum


@pytest.mark.parametrize('endpoint', ['_purge', '_membership', '_active_tasks'])
def test_nothing_is_purged_without_what_makes_it_safe(
    vacuum: Callable[[str], str], client: Client, endpoint: str
) -> None:
    assert not_offered(vacuum(endpoint)) == [endpoint]
    assert client.info()['doc_del_count'] == 1


@pytest.mark.parametrize('endpoint', ['_view_cleanup', '_compact'])
def test_tombstones_are_purged_if_the_service_compacts_by_itself(
    vacuum: Callable[[str], str], client: Client, endpoint: str
) -> None:
    assert not_offered(vacuum(endpoint)) == [endpoint]
    assert client.info()['doc_del_count'] == 0


# -- rights


def test_missing_rights_are_told_apart(
    opened: Open, client: Client, member: dict[str, str], apache_couchdb: bool
) -> None:
    """A service also refuses what only this user may not do; an administrator is refused what nobody may do."""
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    client.request('PUT', '/_security', body={'members': {'names': [member['user']]}, 'admins': {'roles': ['_admin']}})
    service = opened('_security|_purge')
    for user, error in ((member, AccessDenied), ({}, NotOffered)):
        with pytest.raises(error):
            service.client(client.address.database, **user).request('GET', '/_security')
    with app_on(service, client.address.database) as app:
        admin = (service.user, service.password)
        app.conf.broker_url = service.couchdb_url(client.address.database, **member)
        run = command_of(app, COUCHDB_ADMIN_PASSWORD=admin[1])
        assert 'may not set up the database; name an administrator' in run('setup').stderr
        assert 'is no server administrator, and CouchDB lets nobody else purge' in run('vacuum', '--yes').stderr
        assert not_offered(succeeded(run('setup', '--admin', admin[0]))) == ['_security']


# -- the page


def test_page(opened: Open, client: Client, databases: list[str], stack: ExitStack) -> None:
    from celery_couchdb.web import create_app
    from tests.web import Browser, served

    app = stack.enter_context(app_on(opened(), databases[0]))
    succeeded(command_of(app)('setup'))
    browser = Browser(stack.enter_context(served(create_app(app, login=False))))
    assert browser.get('/system').status_code == 200
    assert databases[0] in browser.text
    browser = Browser(stack.enter_context(served(create_app(app))))
    browser.get('/login')
    browser.log_in('admin', 'secret')
    assert 'CouchDB does not offer _session: nobody can log in to the page; start it with' in browser.text
