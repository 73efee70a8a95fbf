"""The vacuum of a database of parcels: a device that was offline must not bring back what was purged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from celery_couchdb.parcels.mover import Mover
from celery_couchdb.testing import Server
from kombu_couchdb.admin.tombstones import is_replicated
from kombu_couchdb.admin.vacuum import vacuum
from kombu_couchdb.couchdb.client import Client
from tests.device import Device
from tests.support import items

from .conftest import command_of


def quiet(step: str, done: int, total: int) -> None:
    """Show no progress."""


@pytest.fixture
def device(server: Server, parcels: Client, tmp_path: Path, apache_couchdb: bool) -> Device:
    if not apache_couchdb:
        pytest.skip('the embedded server cannot purge')
    return Device(tmp_path / 'device', f'{server.url}/{parcels.address.database}')


def finish(client: Client) -> None:
    client.bulk([{'_id': item['_id'], '_rev': item['_rev'], '_deleted': True} for item in items(client)])


def send_and_finish(app: Celery, mover: Mover, client: Client, device: Device, parcels: Client) -> None:
    """Send a task with Celery through the database of parcels; the device has only seen the parcel."""
    publisher = Celery('publisher', set_as_current=False, broker=app.conf.broker_url.rpartition('/')[0])
    publisher.conf.broker_url += f'/{parcels.address.database}'
    publisher.send_task('add', (1, 2))
    publisher.pool.force_close_all()
    assert device.call('pull')['written'] > 0
    mover._stale = True
    mover.step()
    assert len(items(client)) == 1
    finish(client)


def test_replicated_parcels_are_not_purged(
    mover_app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client, device: Device
) -> None:
    one = mover()
    assert not is_replicated(parcels)
    send_and_finish(mover_app, one, client, device, parcels)
    vacuum(client, quiet, age=0)  # the broker's database does not know any more that the message existed
    done = command_of(mover_app)('vacuum', '--yes', '--no-wait')
    assert done.exit_code == 0, done.output
    assert (
        f'{parcels.address.database}: devices or servers replicate this database, so no tombstones were purged: '
        in (done.stdout)
    )
    assert device.call('push', {'since': 0, 'checkpoint': False})['failed'] == 0
    one._stale = True
    one.step()
    assert items(client) == []
    device.close()


def test_purge_would_bring_parcels_back(
    mover_app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client, device: Device
) -> None:
    """Without the check, the same steps run the task a second time."""
    one = mover()
    send_and_finish(mover_app, one, client, device, parcels)
    for database in (client, parcels):
        assert vacuum(database, quiet, age=0).purged > 0
    device.call('push', {'since': 0, 'checkpoint': False})
    one._stale = True
    one.step()
    assert len(items(client)) == 1
    device.close()
