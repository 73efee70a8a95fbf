"""Publishers that are offline: a real PouchDB puts tasks into its own database, and replicates it later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from celery_couchdb.cli import couchdb
from celery_couchdb.testing.server import fresh_name
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import AccessDenied
from tests.conftest import PATIENCE, PATIENT_BROKER, Users, wait_for
from tests.device import Device
from tests.parcels import receipt_of

from .conftest import Site


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
    phone = device('phone')
    for number in range(20):
        phone.call('put', nap(site, f'phone:{number:02}'))
    phone.call('put', {'_id': 'phone:bad', 'task': 'fail', 'args': ['?']})
    phone.call('put', nap(site, 'phone:cancelled'))
    phone.call('remove', 'phone:cancelled')
    assert site.journalled() == []
    phone.call('sync')

    receipts = [wait_for(partial(done_in, phone, f'phone:{number:02}'), 'the receipt') for number in range(20)]
    assert [receipt['result'] for receipt in receipts] == [f'phone:{number:02}' for number in range(20)]
    refused = wait_for(lambda: phone.call('get', 'phone:bad').get('reason'), 'the refusal')
    assert refused == "task 'fail' is not in parcels_accept"
    assert sorted(site.journalled()) == sorted(
        f'{what} phone:{number:02}' for what in ('start', 'end') for number in range(20)
    )


def test_device_that_replicates_again_runs_nothing_again(
    site: Site, device: Callable[[str], Device], worker: Any, parcels: Client
) -> None:
    phone = device('phone')
    phone.call('put', nap(site, 'order'))
    phone.call('push')
    wait_for(lambda: receipt_of(parcels, 'order'), 'the receipt')
    # Without a checkpoint, which a device loses that changes its URL, everything is compared again.
    for options in ({}, {'since': 0, 'checkpoint': False}):
        assert phone.call('push', options)['failed'] == 0
    phone.close()
    phone = device('phone')  # the same data, after a restart
    phone.call('put', {**phone.call('get', 'order'), 'args': [str(site.journal), 'edited', 0]})
    phone.call('push')
    phone.call('put', nap(site, 'next'))
    phone.call('push')
    wait_for(lambda: receipt_of(parcels, 'next'), 'the receipt')
    phone.call('pull')
    assert phone.call('get', 'order')['type'] == 'Receipt'
    phone.call('remove', 'order')
    phone.call('push')
    assert sorted(site.journalled()) == ['end next', 'end order', 'start next', 'start order']


def test_two_devices_with_the_same_id_run_one(
    site: Site, device: Callable[[str], Device], worker: Any, parcels: Client
) -> None:
    phones = [device(name) for name in ('one', 'two')]
    for number, phone in enumerate(phones):
        for _ in range(3 * number):
            phone.call('put', {'_id': 'order', 'task': 'add', 'args': [0, 0]})
            phone.call('remove', 'order')  # so that its revisions are higher than those of the other device
        phone.call('put', {'_id': 'order', 'task': 'nap', 'args': [str(site.journal), f'of {number}', 0]})
    phones[0].call('push')
    first = wait_for(lambda: receipt_of(parcels, 'order'), 'the receipt')
    phones[1].call('push')

    def second() -> Document:
        doc = receipt_of(parcels, 'order')
        return doc if doc and doc['_rev'] != first['_rev'] else {}

    assert wait_for(second, 'the receipt')['result'] == first['result'] == 'of 0'
    for phone in phones:
        phone.call('pull')
        assert phone.call('get', 'order')['result'] == 'of 0'
    assert site.journalled() == ['start of 0', 'end of 0']


def test_users_of_devices_see_their_own_parcels_only(
    site: Site, worker: Any, parcels: Client, users: Users, apache_couchdb: bool, stack: ExitStack
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has only one user')
    names = [f'device-{fresh_name()[5:]}' for _ in range(2)]
    for name in names:
        users(name, 'secret')
        stack.callback(site.server.delete, f'{parcels.address.database}-{name}')
    site.app.conf.broker_transport_options = {**PATIENT_BROKER, 'parcels': parcels.address.database}
    setup = partial(CliRunner().invoke, couchdb, obj=SimpleNamespace(app=site.app, no_color=True))
    stack.callback(end_replications, site, f'celery-{parcels.address.database}-')
    arguments = ['setup', *(f'--device={name}' for name in names)]
    done = setup(arguments)
    assert done.exit_code == 0, done.output
    assert site.server.password not in done.output
    assert 'done' not in setup(arguments).output  # the second time there is nothing to do
    phones = []
    for name in names:
        url = f'http://{name}:secret@{site.server.host}:{site.server.port}/{parcels.address.database}-{name}'
        phones.append(Device(site.folder / name, url))
        stack.callback(phones[-1].close)
        phones[-1].call('sync')
    mine, theirs = (f'{name}:order' for name in names)
    phones[0].call('put', nap(site, mine))
    phones[0].call('put', nap(site, 'p:order'))
    phones[0].call('put', nap(site, theirs))  # forged: nothing of this passes
    phones[1].call('put', {'_id': mine, 'type': 'Receipt', 'state': 'SUCCESS', 'done': 1})
    phones[1].call('put', nap(site, names[1] + ':last'))
    for phone, doc_id in ((phones[0], mine), (phones[1], names[1] + ':last')):
        receipt = wait_for(partial(done_in, phone, doc_id), 'the receipt')
        assert receipt['result'] == doc_id
    assert phones[1].call('get', mine)['_rev'].startswith('1-')  # its own forgery, which nobody else has
    assert {row['id'] for row in parcels.id_range('device-')} == {mine, names[1] + ':last'}
    own = site.server.client(parcels.address.database, user=names[0], password='secret')
    with pytest.raises(AccessDenied):
        own.get(mine)
    with pytest.raises(AccessDenied):
        site.server.client(f'{parcels.address.database}-{names[1]}', user=names[0], password='secret').id_range('')
    assert sorted(site.journalled()) == sorted(
        f'{what} {doc_id}' for what in ('start', 'end') for doc_id in (mine, names[1] + ':last')
    )


def end_replications(site: Site, prefix: str) -> None:
    """Delete the documents of replications whose ids begin with `prefix`."""
    url = f'{site.server.url}/_replicator'
    for row in requests.get(f'{url}/_all_docs', timeout=PATIENCE).json()['rows']:
        if row['id'].startswith(prefix):
            requests.delete(f'{url}/{row["id"]}', params={'rev': row['value']['rev']}, timeout=PATIENCE)


def done_in(device: Device, doc_id: str) -> Document:
    """Return a receipt on a device that tells how its task ended; an empty document if there is none yet."""
    doc: Document = device.call('get', doc_id) or {}
    return doc if 'done' in doc else {}
