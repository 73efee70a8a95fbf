"""The pages of the system, of parcels and of regions: what they show, and what users can do there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery

pytest.importorskip('starlette')

from celery_couchdb.parcels.mover import Mover
from celery_couchdb.testing import Server
from celery_couchdb.web import create_app
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.parcels.parcel import PARCELS
from tests.regions import regions_on
from tests.support import Inbox, items, publish_many
from tests.web import Browser, served

from .conftest import Connect

#: A key that is HTML, a command to a terminal, and changes the direction of text.
HOSTILE = '<b>k</b>\x1b[2J\u202e'

#: A function that serves the page of an app, and returns a browser whose user has logged in as the administrator.
Open = Callable[..., Browser]


@pytest.fixture
def open_page(server: Server) -> Iterator[Open]:
    """See `Open`."""
    with ExitStack() as stack:

        def open_page(
            app: Celery, user: str = server.user, password: str = server.password, **settings: Any
        ) -> Browser:
            browser = Browser(stack.enter_context(served(create_app(app, **settings))))
            browser.log_in(user, password)
            return browser

        yield open_page


def read(browser: Browser, path: str) -> Any:
    """Return the JSON of a page."""
    return browser.session.get(browser.url + path, headers={'Accept': 'application/json'}).json()


def rows_of(browser: Browser, path: str) -> list[str]:
    """Return the texts of the rows of a page."""
    browser.get(path)
    return [row.partition('</tr>')[0] for row in browser.page.text.split('<tr id="row-')[1:]]


# -- the system


def test_limits_in_use(open_page: Open, app: Celery, connect: Connect, client: Client) -> None:
    limited = {'concurrency_key': HOSTILE, 'concurrency_limit': 2}
    publish_many(connect(), range(5), headers=limited)
    publish_many(connect(), range(3), headers={'rate_key': 'mails', 'rate': '1/h'})
    inbox = Inbox(connect(), ack=False)
    parked = 5  # three wait for a slot, two for a start
    inbox.drain_until(lambda: sum(bool(item.get('parked')) for item in items(client)) == parked, 'the parked messages')
    client.bulk([{'_id': 'slot:a:0', 'type': 'Slot', 'key': ['no text']}, {'_id': 'rate:a', 'type': 'Rate', 'key': 1}])
    browser = open_page(app)
    slots, rate = read(browser, '/system')['limits']
    assert (slots['key'], slots['limits'], slots['slots'], slots['parked'], slots['next']) == (
        HOSTILE,
        'concurrency',
        2,
        3,
        None,
    )
    assert (rate['key'], rate['limits'], rate['slots'], rate['parked']) == ('mails', 'rate', None, 2)
    assert 3500 < rate['next'] < 3700
    assert 0 <= rate['age'] <= 100
    assert browser.get('/system').status_code == 200
    assert '<b>' not in browser.page.text
    assert '<b>k</b>\\x1b[2J\\u202e concurrency 2 3' in browser.text


def test_server_databases_and_duties(open_page: Open, app: Celery, client: Client, apache_couchdb: bool) -> None:
    client.put({'_id': 'broker:leader:beat:shop', 'type': 'Leader', 'holder': 'vm:7:c0ffee', 'date': time.time()})
    client.bulk([{'_id': f'doc-{number}'} for number in range(3)])
    browser = open_page(app)
    browser.get('/system')
    name = client.address.database
    assert f'{"CouchDB" if apache_couchdb else "PouchDB (embedded)"} ' in browser.text
    assert 'beat:shop vm:7' in browser.text
    assert 'No task with a concurrency limit or a rate runs or waits.' in browser.text
    found = read(browser, '/system')
    assert (found['database']['name'], found['database']['documents']) == (name, client.info()['doc_count'])
    assert [leader['duty'] for leader in found['leaders']] == ['beat:shop']
    assert found['limits'] == []
    assert f'{name} ' in browser.text
    menu = browser.page.text.partition('<nav')[2].partition('</nav>')[0]
    assert 'System' in menu
    assert 'Parcels' not in menu
    assert 'Regions' not in menu
    assert browser.get('/parcels').status_code == 404


# -- parcels


@pytest.fixture
def moved(parcels: Client, mover: Callable[[], Mover]) -> None:
    """A mover has moved one parcel and refused two; one more waits."""
    one = mover()
    parcels.bulk(
        [
            {'_id': 'moved', 'task': 'add', 'args': [1, 2]},
            {'_id': 'refused-1', 'task': HOSTILE},
            {'_id': 'refused-2', 'task': 'add', 'args': 5},
        ]
    )
    one.step()
    parcels.put({'_id': 'waiting', 'task': 'add', 'args': [3, 4]})


def states(browser: Browser, query: str = '') -> dict[str, str]:
    """Return the states of the parcels that the page lists, by id."""
    return {one['document']['_id']: one['state'] for one in read(browser, f'/parcels{query}')}


def test_parcels(open_page: Open, mover_app: Celery, parcels: Client, moved: None) -> None:
    browser = open_page(mover_app)
    found = rows_of(browser, '/parcels')
    assert ['waiting' in found[0], 'refused-1' in found[1], 'refused-2' in found[2], len(found)] == [True] * 3 + [3]
    assert 'Waiting 1 Refused 2' in browser.text
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


def test_parcels_of_a_reader(open_page: Open, mover_app: Celery, moved: None) -> None:
    """Who may change nothing, and see no arguments."""
    browser = open_page(mover_app, read_only=True, mask_args=True)
    assert len(rows_of(browser, '/parcels')) == 3
    assert [('args' in one['document'], one['document'].get('reason')) for one in read(browser, '/parcels')] == [
        (False, None),
        (False, f'task {HOSTILE!r} is not in parcels_accept'),
        (False, 'args must be a list and kwargs an object'),
        (False, None),
    ]
    assert browser.post('/parcels', action='drop', select='waiting', confirmed='1').status_code == 403
    assert states(browser)['waiting'] == 'waiting'


def test_parcels_of_a_user_without_rights(
    open_page: Open, mover_app: Celery, client: Client, moved: None, member: dict[str, str]
) -> None:
    for step in plan(Wanted(client, [], [member['user']])):
        if step.do:
            step.do()
    browser = open_page(mover_app, **member)
    assert browser.get('/queues').status_code == 200
    assert browser.get('/parcels').status_code == 403
    assert member['user'] in browser.text


# -- regions


def test_regions(open_page: Open, server: Server) -> None:
    with regions_on(server, 'eu', 'us') as regions:
        eu = regions['eu']
        refused = {'status': 'fail', 'reason': HOSTILE, 'type': 'Parcel', 'task': 'add', 'id': 'refused'}
        eu.regions.put({'_id': 'p:us:refused:1', **refused})
        sent = eu.app.send_task('add', (1, 2), region='us')
        browser = open_page(eu.app)
        [us, *tasks] = rows_of(browser, '/regions')
        assert 'us' in us
        assert len(tasks) == 2
        assert '<b>' not in browser.page.text
        [found] = read(browser, '/regions')
        given = found['given']
        assert (found['name'], given['sent']['count'], given['refused']['count']) == ('us', 1, 1)
        assert 'us has refused 1 task' in browser.text
        browser.post('/regions', action='replay', select='p:us:refused:1')
        assert '1 task replayed.' in browser.text
        assert read(browser, '/regions')[0]['given']['refused']['count'] == 0
        browser.post('/regions', action='cancel', select='p:us:refused:1', confirmed='1', terminate='on')
        assert eu.regions.get('p:us:refused:1')['terminate'] is True
        browser.post('/regions', action='drop', select='p:us:refused:1', confirmed='1')
        assert eu.regions.get_or_none('p:us:refused:1') is None
        browser.get(f'/tasks/{sent.id}')
        assert 'sent to region us' in browser.text
