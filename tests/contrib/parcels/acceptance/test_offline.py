"""Publishers that are offline: a real PouchDB puts tasks into its own database, and replicates it later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from celery_couchdb.testing.server import fresh_name
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import AccessDenied
from tests.acceptance.conftest import Site, couchdb, succeeded
from tests.conftest import PATIENT_BROKER, Users, wait_for
from tests.device import Device
from tests.parcels import receipt_of


@pytest.fixture
def worker(site: Site, parcels: Client) -> Any:
    """A worker that moves parcels of `nap` and `add`, and starts within the test."""
    return site.worker(
        broker_transport_options={
            **PATIENT_BROKER,
            'parcels': parcels.address.database,
            'parcels_accept': ('add', 'nap', 'now'),
        }
    )


@pytest.fixture
def device(site: Site, parcels: Client, stack: ExitStack) -> Callable[[str], Device]:
    """A function that returns the device with a name: a new process with the data of the last one."""

    def device(name: str) -> Device:
        url = f'{site.server.url}/{parcels.address.database}'
        made = Device(site.folder / name, url)
        stack.callback(made.close)
        return made

    return device


def nap(site: Site, name: str) -> Document:
    return {'_id': name, 'task': 'nap', 'args': [str(site.journal), name, 0]}


def test_orders_of_a_device_that_was_offline(
    site: Site, device: Callable[[str], Device], worker: Any, parcels: Client
) -> None:
    """They run once, also if the device replicates again, is restarted, or changes its parcel."""
    phone = device('phone')
    orders = [f'phone:{number}' for number in range(5)]
    for order in orders:
        phone.call('put', nap(site, order))
    phone.call('put', {'_id': 'phone:bad', 'task': 'fail', 'args': ['?']})
    phone.call('put', nap(site, 'phone:cancelled'))
    phone.call('remove', 'phone:cancelled')
    assert site.journalled() == []
    phone.call('sync')
    receipts = [wait_for(partial(done_in, phone, order), 'the receipt') for order in orders]
    assert [receipt['result'] for receipt in receipts] == orders
    refused = wait_for(lambda: phone.call('get', 'phone:bad').get('reason'), 'the refusal')
    assert refused == "task 'fail' is not in parcels_accept"
    phone.close()

    phone = device('phone')  # the same data, after a restart
    phone.call('put', nap(site, 'order'))
    phone.call('push')
    wait_for(lambda: receipt_of(parcels, 'order'), 'the receipt')
    # Without a checkpoint, which a device loses that changes its URL, everything is compared again.
    for options in ({}, {'since': 0, 'checkpoint': False}):
        assert phone.call('push', options)['failed'] == 0
    phone.call('put', {**phone.call('get', 'order'), 'args': [str(site.journal), 'edited', 0]})
    phone.call('push')
    phone.call('put', nap(site, 'next'))
    phone.call('push')
    wait_for(lambda: receipt_of(parcels, 'next'), 'the receipt')
    phone.call('pull')
    assert phone.call('get', 'order')['type'] == 'Receipt'
    phone.call('remove', 'order')
    phone.call('push')
    ran = [*orders, 'order', 'next']
    assert sorted(site.journalled()) == sorted(f'{what} {name}' for what in ('start', 'end') for name in ran)


def test_users_of_devices_have_rights_on_their_own_database_only(
    site: Site, worker: Any, parcels: Client, users: Users, apache_couchdb: bool, stack: ExitStack
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    own, other = names = [f'device-{fresh_name()[5:]}' for _ in range(2)]
    databases = [f'{parcels.address.database}-{name}' for name in names]
    for name, database in zip(names, databases, strict=True):
        users(name, 'secret')
        stack.callback(site.server.delete, database)
    site.app.conf.broker_transport_options = {**PATIENT_BROKER, 'parcels': parcels.address.database}
    setup = ('setup', f'--device={own}', f'--device={other}')
    succeeded(couchdb(site, *setup))
    assert 'done' not in succeeded(couchdb(site, *setup))  # the second time there is nothing to do
    phone = Device(site.folder / own, f'http://{own}:secret@{site.server.host}:{site.server.port}/{databases[0]}')
    stack.callback(phone.close)
    phone.call('sync')
    for order in (f'{other}:order', 'order'):  # any id is good in a database of its own
        phone.call('put', nap(site, order))
        receipt = wait_for(partial(done_in, phone, order), 'the receipt')
        assert receipt['result'] == order
    assert [row['id'] for row in parcels.id_range('') if not row['id'].startswith('_')] == []
    for database in (parcels.address.database, databases[1]):
        with pytest.raises(AccessDenied):
            site.server.client(database, user=own, password='secret').id_range('')


def done_in(device: Device, doc_id: str) -> Document:
    """Return a receipt on a device that tells how its task ended; an empty document if there is none yet."""
    doc: Document = device.call('get', doc_id) or {}
    return doc if 'done' in doc else {}
