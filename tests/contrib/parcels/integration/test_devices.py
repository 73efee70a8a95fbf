"""Devices: their setup, the list of them, and databases that two of them would share."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.devices import DEVICE, devices_of
from kombu_couchdb.contrib.parcels.stored_parcels import Parcels
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, DatabaseMissing
from tests.conftest import Users
from tests.integration.conftest import Run
from tests.support import command_of

#: A function that returns the name of a new user.
NewUser = Callable[[], str]


@pytest.fixture
def new_user(users: Users, apache_couchdb: bool) -> NewUser:
    """See `NewUser`. The embedded server has one user only, and does not know others."""

    def new_user() -> str:
        name = f'u{uuid.uuid4().hex[:12]}'
        if apache_couchdb:
            users(name, 'secret')
        return name

    return new_user


@pytest.fixture
def run(mover_app: Celery, client: Client, server: Server) -> Iterator[Run]:
    """A function that runs a command; the databases of devices are deleted after the test."""
    yield command_of(mover_app)
    for row in client.id_range(DEVICE, docs=True):
        server.delete(row['doc']['database'])


def set_up(run: Run, *devices: str) -> str:
    done = run('setup', *(f'--device={name}' for name in devices))
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def refused(run: Run, *devices: str) -> str:
    """Return why the setup of devices is refused."""
    done = run('setup', *(f'--device={name}' for name in devices))
    assert done.exit_code == 1, done.output
    return str(done.output)


def test_setup_is_idempotent(run: Run, parcels: Client, client: Client, server: Server, new_user: NewUser) -> None:
    one, two = new_user(), new_user()
    first = set_up(run, one, two)
    assert f'done     the workers move the parcels of {one}' in first
    assert server.password not in first
    databases = {name: f'{parcels.address.database}-{name}' for name in (one, two)}
    assert devices_of(client, parcels.address.database) == databases
    security = server.client(databases[one]).request('GET', '/_security')
    assert one in security['members']['names']
    assert two not in security['members']['names']
    docs = [client.get(f'broker:device:{name}') for name in databases]
    assert 'done' not in set_up(run, one, two)
    assert [client.get(f'broker:device:{name}') for name in databases] == docs


def test_device_has_rights_in_its_database_only(
    run: Run, parcels: Client, server: Server, new_user: NewUser, apache_couchdb: bool
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has no rights')
    one, two = new_user(), new_user()
    set_up(run, one, two)
    login = {'user': one, 'password': 'secret'}
    server.client(f'{parcels.address.database}-{one}', **login).put({'_id': 'order-1', 'task': 'add'})
    for database in (parcels.address.database, f'{parcels.address.database}-{two}'):
        with pytest.raises(AccessDenied):
            server.client(database, **login).put({'_id': 'order-1', 'task': 'add'})


def test_device_of_an_unknown_user(run: Run, parcels: Client, client: Client, apache_couchdb: bool) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has one user only')
    assert "there is no user 'nobody' yet: create it in CouchDB, as a document in _users" in refused(run, 'nobody')
    assert devices_of(client, parcels.address.database) == {}
    with pytest.raises(DatabaseMissing):
        parcels.beside(f'{parcels.address.database}-nobody').info()


def test_two_devices_do_not_share_a_database(
    run: Run, mover_app: Celery, parcels: Client, server: Server, new_user: NewUser, users: Users, apache_couchdb: bool
) -> None:
    """Where the name of the database of parcels ends, and that of the user begins, is not visible in the name."""
    name = new_user()
    if apache_couchdb:
        users(f'eu-{name}', 'secret')
    database = f'{parcels.address.database}-eu-{name}'
    mover_app.conf.broker_transport_options['parcels'] += '-eu'
    set_up(run, name)
    before = server.client(database).request('GET', '/_security')
    with server.fresh_database() as other:
        mover_app.conf.broker_url = server.couchdb_url(other)
        mover_app.conf.broker_transport_options['parcels'] = parcels.address.database
        assert f'{name!r} uses, is not the database of this device' in refused(run, f'eu-{name}')
    assert server.client(database).request('GET', '/_security') == before
    server.delete(f'{parcels.address.database}-eu')


def test_one_name_stands_for_one_device(run: Run, mover_app: Celery, parcels: Client, new_user: NewUser) -> None:
    name = new_user()
    set_up(run, name)
    mover_app.conf.broker_transport_options['parcels'] += '-2'
    assert f"the device {name!r} has the database '{parcels.address.database}-{name}'" in refused(run, name)


def test_database_of_the_app_is_not_given_to_a_device(
    run: Run, parcels: Client, server: Server, new_user: NewUser
) -> None:
    name = new_user()
    own = server.client(f'{parcels.address.database}-{name}')
    own.create()
    own.put(design.documents()[0])
    assert 'which the app uses otherwise, is not the database of this device' in refused(run, name)
    server.delete(own.address.database)


def test_malformed_documents_of_devices_are_ignored(client: Client) -> None:
    good = {'_id': 'broker:device:bob', 'type': 'Device', 'name': 'bob', 'database': 'parcels-bob', 'date': 1.0}
    wrong: list[dict[str, Any]] = [
        {'_id': 'broker:device:d1'},
        {'_id': 'broker:device:d2', 'type': 'Device'},
        {'_id': 'broker:device:d3', 'type': 'Queue', 'database': 'parcels-d3'},
        {'_id': 'broker:device:d4', 'type': 'Device', 'database': ['parcels-d4']},
        {'_id': 'broker:device:d5', 'type': 'Device', 'database': 'results'},
        {'_id': 'broker:device:D6', 'type': 'Device', 'database': 'parcels-D6'},
    ]
    client.bulk([good, *wrong])
    assert devices_of(client, 'parcels') == {'bob': 'parcels-bob'}


def test_list_of_devices(run: Run, parcels: Client, client: Client, server: Server, new_user: NewUser) -> None:
    assert run('parcels', 'devices').stdout == 'There are no devices.\n'
    one, two = sorted([new_user(), new_user()])
    set_up(run, one, two)
    databases = devices_of(client, parcels.address.database)
    doc = {'task': 'add', 'args': [1, 2]}
    server.client(databases[one]).bulk(
        [
            {**doc, '_id': 'waiting'},
            parcel.refused({**doc, '_id': 'refused'}, 'mistake', 5.0),
            parcel.receipt_of({**doc, '_id': 'moved'}, 'a', None, 5.0, 60.0),
            {'_id': 'note', 'type': 'Note'},
        ]
    )
    server.delete(databases[two])
    found = [json.loads(line) for line in run('parcels', 'devices', '--json').stdout.splitlines()]
    assert found[0] == {'device': one, 'database': databases[one], 'waiting': 1, 'refused': 1, 'moved': 1}
    assert 'does not exist' in found[1]['error']
    assert [line.split()[:5] for line in run('parcels', 'devices').stdout.splitlines()[1:2]] == [
        [one, databases[one], '1', '1', '1']
    ]


def test_parcels_of_a_device(run: Run, parcels: Client, client: Client, server: Server, new_user: NewUser) -> None:
    name = new_user()
    set_up(run, name)
    own = Parcels(server.client(devices_of(client, parcels.address.database)[name]))
    doc = parcel.refused({'_id': 'refused', 'task': 'add'}, 'mistake', 5.0)
    own.client.bulk([doc])
    assert run('parcels', 'list').output == 'There are no parcels.\n'
    assert 'mistake' in run('parcels', 'list', '--device', name).stdout
    assert json.loads(run('parcels', 'show', 'ref', '--device', name, '--json').stdout)['state'] == 'refused'
    assert run('parcels', 'replay', '--all', '--yes', '--device', name).stdout == '1 replayed.\n'
    assert [*own.ids('waiting')] == ['refused']
    assert run('parcels', 'drop', 'refused', '--yes', '--device', name).stdout == '1 dropped.\n'
    assert own.count('waiting') == 0
    assert run('parcels', 'list', '--device', 'nobody').stderr == "Error: there is no device 'nobody'\n"
