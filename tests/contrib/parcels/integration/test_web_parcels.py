"""The page of parcels: what it shows, and what users can do there."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

pytest.importorskip('starlette')

from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.devices import DEVICE
from kombu_couchdb.contrib.parcels.parcel import PARCELS
from kombu_couchdb.couchdb.client import Client
from tests.integration.conftest import OpenApp
from tests.web import Browser, read, rows_of

#: The name of a task that is HTML, a command to a terminal, and changes the direction of text.
HOSTILE = '<b>k</b>\x1b[2J\u202e'


@pytest.fixture
def docs(parcels: Client) -> None:
    """A parcel that was moved, two that were refused, and one that waits."""
    add: dict[str, Any] = {'task': 'add', 'args': [1, 2]}
    parcels.bulk(
        [
            parcel.receipt_of({**add, '_id': 'moved'}, 'a', None, 5.0, 60.0),
            parcel.refused({'_id': 'refused-1', 'task': HOSTILE}, f'task {HOSTILE!r} is not in parcels_accept', 5.0),
            parcel.refused({'_id': 'refused-2', 'task': 'add', 'args': 5}, 'args must be a list', 5.0),
            {**add, '_id': 'waiting'},
        ]
    )


def states(browser: Browser, query: str = '') -> dict[str, str]:
    """Return the states of the parcels that the page lists, by id."""
    return {one['document']['_id']: one['state'] for one in read(browser, f'/parcels{query}')}


def test_parcels(open_app: OpenApp, mover_app: Celery, parcels: Client, docs: None) -> None:
    browser = open_app(mover_app)
    found = rows_of(browser, '/parcels')
    assert ['waiting' in found[0], 'refused-1' in found[1], 'refused-2' in found[2], len(found)] == [True] * 3 + [3]
    assert '<b>' not in browser.page.text
    assert ['moved' in row for row in rows_of(browser, '/parcels?state=moved')] == [True]

    browser.get('/parcels')
    browser.post('/parcels', action='replay', select=['refused-2', 'moved'])
    assert '1 parcel replayed; moved: it was not refused.' in browser.text
    assert states(browser) == {'waiting': 'waiting', 'refused-2': 'waiting', 'refused-1': 'refused', 'moved': 'moved'}

    browser.get('/parcels')
    browser.post('/parcels', action='drop', select=['refused-1', f'_design/{PARCELS}'])
    assert 'Drop these 2 parcels?' in browser.text
    browser.post('/parcels', action='drop', select=['refused-1', f'_design/{PARCELS}'], confirmed='1')
    assert '1 parcel dropped.' in browser.text
    assert parcels.get_or_none(f'_design/{PARCELS}')
    assert 'refused-1' not in states(browser)


def test_parcels_of_a_reader(open_app: OpenApp, mover_app: Celery, docs: None) -> None:
    """Who may change nothing, and see no arguments."""
    browser = open_app(mover_app, read_only=True, mask_args=True)
    assert len(rows_of(browser, '/parcels')) == 3
    assert [('args' in one['document'], one['document'].get('reason')) for one in read(browser, '/parcels')] == [
        (False, None),
        (False, f'task {HOSTILE!r} is not in parcels_accept'),
        (False, 'args must be a list'),
        (False, None),
    ]
    assert browser.post('/parcels', action='drop', select='waiting', confirmed='1').status_code == 403
    assert states(browser)['waiting'] == 'waiting'


def test_parcels_of_a_user_without_rights(
    open_app: OpenApp, mover_app: Celery, client: Client, docs: None, member: dict[str, str]
) -> None:
    for step in plan(Wanted(client, design.documents(), [member['user']])):
        if step.do:
            step.do()
    browser = open_app(mover_app, **member)
    assert browser.get('/queues').status_code == 200
    assert browser.get('/parcels').status_code == 403
    assert member['user'] in browser.text


def test_parcels_of_a_device(open_app: OpenApp, mover_app: Celery, client: Client, parcels: Client, docs: None) -> None:
    database = f'{parcels.address.database}-bob'
    client.put({'_id': f'{DEVICE}bob', 'type': 'Device', 'name': 'bob', 'database': database, 'date': 1.0})
    device = client.beside(database)
    device.create()
    device.put(parcel.refused({'_id': 'order-1', 'task': 'add'}, 'mistake', 5.0))
    browser = open_app(mover_app)
    assert len(rows_of(browser, '/parcels')) == 3
    assert 'Device bob' in browser.text
    assert len(rows_of(browser, '/parcels?device=bob')) == 1
    assert 'mistake' in browser.text
    browser.post('/parcels', action='replay', select='order-1', query='device=bob')
    assert '1 parcel replayed.' in browser.text
    assert states(browser, '?device=bob') == {'order-1': 'waiting'}
    assert browser.get('/parcels?device=nobody').status_code == 404
    device.delete()
