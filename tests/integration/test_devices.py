"""Databases of devices: setup on Apache CouchDB, and names that two devices would share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from celery_couchdb.testing import Server
from celery_couchdb.testing.server import fresh_name
from kombu_couchdb import design
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.parcels.devices import compact_devices, device_plan
from tests.conftest import wait_for


@pytest.fixture
def name(server: Server, apache_couchdb: bool) -> Iterator[str]:
    """The beginning of the names of databases; the databases and their replications are deleted at the end."""
    if not apache_couchdb:
        pytest.skip('the embedded server has no database _replicator')
    name = fresh_name()
    yield name
    clean_up(server, name)


def clean_up(server: Server, name: str) -> None:
    root = Client(server.client(name).address.root)
    keys = {'startkey': json.dumps(f'celery-{name}'), 'endkey': json.dumps(f'celery-{name}\ufff0')}
    for row in root.request('GET', '/_replicator/_all_docs', keys)['rows']:
        root.request('DELETE', f'/_replicator/{row["id"]}', {'rev': row['value']['rev']})
    for database in root.request('GET', '/_all_dbs'):
        if database.startswith(name):
            server.delete(database)


def set_up(server: Server, parcels: str, device: str) -> list[str]:
    """Set a device up, and return the goals of the steps that had something to do."""
    client = server.client(parcels)
    done = []
    for step in device_plan(client, client.address, device)[1]:
        if step.do:
            step.do()
            done.append(step.goal)
    return done


def test_setup_is_idempotent_and_shows_no_password(server: Server, name: str) -> None:
    goals = set_up(server, name, 'bob')
    assert 'parcels of bob are replicated from this database' in goals
    assert server.password not in repr(goals)
    assert set_up(server, name, 'bob') == []


def test_two_devices_do_not_share_a_database(server: Server, name: str) -> None:
    set_up(server, name, 'eu-bob')
    security = server.client(f'{name}-eu-bob').request('GET', '/_security')
    with pytest.raises(ConfigurationError, match="-eu-bob belongs to the device 'eu-bob' of the database of parcels"):
        set_up(server, f'{name}-eu', 'bob')
    assert server.client(f'{name}-eu-bob').request('GET', '/_security') == security
    assert set_up(server, name, 'eu-bob') == []


def test_replication_of_others_is_not_replaced(server: Server, name: str) -> None:
    set_up(server, f'{name}-from-a', 'b')
    with pytest.raises(
        ConfigurationError, match=f'the replication celery-{name}-from-a-from-b connects other databases'
    ):
        set_up(server, name, 'a-from-b')


def test_device_exchanges_only_documents_with_its_own_name(server: Server, name: str) -> None:
    """The name of one device may be the end of another's."""
    set_up(server, name, 'alice')
    parcels, alice = server.client(name), server.client(f'{name}-alice')
    parcels.create()
    parcels.bulk([{'_id': 'malice:1'}, {'_id': 'x alice:1'}, {'_id': 'alice-2:1'}, {'_id': 'alice:1'}])
    alice.bulk([{'_id': 'malice:2'}, {'_id': 'x alice:2'}, {'_id': 'alice-2:2'}, {'_id': 'alice:2'}])

    def ids(client: Client) -> set[str]:
        return {row['id'] for row in client.id_range('')}

    wait_for(lambda: 'alice:1' in ids(alice) and 'alice:2' in ids(parcels), 'the replications')
    # The replications read the changes in their order. The last change is behind all others.
    for number, (source, target) in enumerate([(parcels, alice), (alice, parcels)], 3):
        for shard in range(20):
            source.put({'_id': f'alice:{number}-{shard}'})
        wait_for(lambda t=target, n=number: {f'alice:{n}-{s}' for s in range(20)} <= ids(t), 'the rest')  # type: ignore[misc]
    for client, number in ((parcels, 1), (alice, 2)):
        foreign = {doc_id for doc_id in ids(client) if not doc_id.startswith('alice:')}
        assert foreign == {f'malice:{number}', f'x alice:{number}', f'alice-2:{number}'}


def test_database_of_the_app_is_not_given_to_a_device(server: Server, name: str) -> None:
    client = server.client(f'{name}-broker')
    client.create()
    client.put(design.documents()[0])
    with pytest.raises(ConfigurationError, match=f'{name}-broker is not the database of a device'):
        set_up(server, name, 'broker')


def test_databases_of_devices_are_compacted(server: Server, name: str) -> None:
    set_up(server, name, 'eu-bob')
    set_up(server, f'{name}-eu', 'alice')
    device = server.client(f'{name}-eu-bob')
    rev = device.put({'_id': 'large'})
    for _ in range(10):
        rev = device.put({'_id': 'large', '_rev': rev, 'text': os.urandom(50_000).hex()})  # CouchDB compresses files
    size = device.info()['sizes']['file']
    assert compact_devices(server.client(name)) == [f'{name}-eu-bob']
    wait_for(lambda: device.info()['sizes']['file'] < size / 2, 'the compaction')
    server.delete(f'{name}-eu-bob')
    assert compact_devices(server.client(name)) == []


def test_database_of_somebody_else_is_not_compacted(server: Server, name: str) -> None:
    set_up(server, f'{name}-from-a', 'b')  # the id of its replication looks like that of a device named a-from-b
    server.client(f'{name}-a-from-b').create()
    assert compact_devices(server.client(name)) == []
    assert compact_devices(server.client(f'{name}-from-a')) == [f'{name}-from-a-b']
