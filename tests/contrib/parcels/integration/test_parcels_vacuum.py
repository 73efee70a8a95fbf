"""The vacuum of parcels: nothing that was purged may let a task run again."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from celery import Celery

from celery_couchdb.testing import Server
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.devices import DEVICE
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from tests.device import Device
from tests.integration.conftest import Run
from tests.parcels import store_nested
from tests.support import command_of


@pytest.fixture
def run(mover_app: Celery, apache_couchdb: bool) -> Run:
    if not apache_couchdb:
        pytest.skip('the embedded server cannot purge')
    parcels = mover_app.conf.broker_transport_options['parcels']
    # The age of tombstones that are purged must be longer than the lease.
    mover_app.conf.broker_transport_options = {'parcels': parcels, 'visibility_timeout': 0.5}
    return command_of(mover_app)


def create_and_delete(client: Client, *ids: str) -> None:
    results = client.bulk([{'_id': doc_id} for doc_id in ids])
    client.bulk([{'_id': result.id, '_rev': result.rev, '_deleted': True} for result in results])


def vacuum(run: Run) -> str:
    """Purge what was deleted until now, and return what the command prints."""
    done = run('vacuum', '--yes', '--age', '0.6')
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def deleted(client: Client) -> set[str]:
    """Return the ids of the deleted documents that the database knows."""
    changes = client.request('GET', '/_changes')['results']
    return {change['id'] for change in changes if change.get('deleted')}


@pytest.fixture
def device(parcels: Client, client: Client) -> Client:
    """The database of a device."""
    name = f'{parcels.address.database}-bob'
    client.put({'_id': f'{DEVICE}bob', 'type': 'Device', 'name': 'bob', 'database': name, 'date': 1.0})
    own = client.beside(name)
    own.create()
    return own


def test_messages_whose_parcels_or_receipts_are_there_are_not_forgotten(
    run: Run, client: Client, parcels: Client, device: Client
) -> None:
    """A leader that was killed, or a device that was offline, would let them run again."""
    parcels.bulk([{'_id': 'waiting', 'task': 'add'}, {'_id': 'receipt', 'type': 'Receipt', 'done': 5.0}])
    device.bulk([{'_id': 'waiting', 'task': 'add'}, {'_id': 'receipt', 'type': 'Receipt'}])
    kept = {
        parcel.moved_id(source.address.database, name)
        for source in (parcels, device)
        for name in ('waiting', 'receipt')
    }
    copied = f'{min(kept)}-1'  # in a second queue
    create_and_delete(client, *kept, copied, parcel.moved_id(parcels.address.database, 'gone'), uuid.uuid4().hex[:30])
    assert f'{device.address.database}: the database of a device is being compacted' in vacuum(run)
    assert deleted(client) == {*kept, copied}
    device.delete()


def test_all_messages_of_parcels_are_kept_if_a_database_cannot_be_read(
    run: Run, client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*sources: object) -> None:
        raise ServerUnavailable('no answer')

    monkeypatch.setattr('celery_couchdb.contrib.parcels.cli.moving', unreadable)
    message = parcel.moved_id(parcels.address.database, 'gone')
    create_and_delete(client, message, uuid.uuid4().hex[:30])
    assert 'tombstones of messages that were parcels were left for another run: no answer' in vacuum(run)
    assert deleted(client) == {message}


def test_deep_parcel_does_not_disturb_the_vacuum(run: Run, parcels: Client) -> None:
    """No JavaScript reads parcels, and CouchDB keeps no note of purges because of that."""
    store_nested(parcels, 'deep', 30_000)
    create_and_delete(parcels, f'p:{uuid.uuid4().hex[:30]}', 'p:eu:a:1')
    assert 'keeps a note' not in vacuum(run)
    assert deleted(parcels) == set()


def test_replicated_parcels_are_not_purged(run: Run, server: Server, parcels: Client, tmp_path: Path) -> None:
    """A device that has not seen the deletion must not bring the parcel back."""
    parcels.put({'_id': 'p:us:a:1', 'task': 'add'})
    device = Device(tmp_path / 'device', f'{server.url}/{parcels.address.database}')
    assert device.call('pull')['written'] > 0
    parcels.put({**parcels.get('p:us:a:1'), '_deleted': True})
    assert f'{parcels.address.database}: devices or servers replicate this database, so no tombstones ' in vacuum(run)
    assert device.call('push', {'since': 0, 'checkpoint': False})['failed'] == 0
    assert parcels.get_or_none('p:us:a:1') is None
    device.close()
