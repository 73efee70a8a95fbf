"""The vacuum of a database of parcels: a device that was offline must not bring back what was purged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from celery import Celery

from celery_couchdb.parcels.mover import Mover
from celery_couchdb.testing import Server
from kombu_couchdb.admin.vacuum import is_replicated, vacuum
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import DatabaseMissing
from kombu_couchdb.parcels.stored_parcels import Parcels, moving
from tests.device import Device
from tests.support import command_of, items


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


def test_message_whose_parcel_still_waits_is_not_forgotten(
    mover_app: Celery,
    mover: Callable[[], Mover],
    client: Client,
    parcels: Client,
    apache_couchdb: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader is killed after it has published a message; the task runs before another worker is the leader."""
    if not apache_couchdb:
        pytest.skip('the embedded server cannot purge')
    parcels.put({'_id': 'order-1', 'task': 'add', 'args': [1, 2]})
    parcels.put({'_id': 'order-2', 'task': 'add', 'args': [3, 4]})
    one, two = mover(), mover()
    with monkeypatch.context() as patch:
        patch.setattr(one._client, 'bulk', lambda docs: pytest.fail('killed'))
        with pytest.raises(pytest.fail.Exception):
            one.step()
    assert len(items(client)) == 2
    finish(client)
    parcels.put({**parcels.get('order-2'), '_deleted': True})
    assert vacuum(client, quiet, age=0, moving=partial(moving, [Parcels(parcels)])).purged == 1
    one._leader.release()
    two.step()
    assert parcels.get('order-1')['type'] == 'Receipt'
    assert items(client) == []


def test_command_asks_both_databases_of_parcels(mover_app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, reads = list[list[str]](), list[str]()
    waiting = Parcels.waiting

    def read(self: Parcels) -> Iterator[str]:
        reads.append(self.client.address.database)
        return waiting(self)

    def vacuum(client: Client, show: object, *, moving: Callable[[], set[str]], **_: object) -> None:
        reads.clear()
        assert set(moving()) == set()
        asked.append([*reads])
        raise DatabaseMissing('it stops here')

    monkeypatch.setattr(Parcels, 'waiting', read)
    monkeypatch.setattr('celery_couchdb.cli.vacuum.vacuum', vacuum)
    mover_app.conf.broker_transport_options |= {'region': 'eu', 'regions': {'eu': 'couchdb://localhost/r-eu'}}
    done = command_of(mover_app)('vacuum', '--yes', '--no-wait')
    assert done.exit_code == 0, done.output
    names = mover_app.conf.broker_transport_options
    # The databases of the broker, of broadcasts, of results, and of parcels.
    assert asked == [[names['parcels'], 'r-eu'], [], [], []]
