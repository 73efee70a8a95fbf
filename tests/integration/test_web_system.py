"""The pages of queues, of the system and of regions: what they show, and what users can do there."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from celery import Celery

pytest.importorskip('starlette')

from celery_couchdb.testing import Server
from celery_couchdb.web import live
from kombu_couchdb.couchdb.client import Client
from tests.regions import regions_on
from tests.support import Inbox, items, publish_many
from tests.web import read, rows_of

from .conftest import Connect, OpenApp, Run
from .test_status import heartbeat

#: A key that is HTML, a command to a terminal, and changes the direction of text.
HOSTILE = '<b>k</b>\x1b[2J\u202e'


# -- the system


def test_limits_in_use(open_app: OpenApp, app: Celery, connect: Connect, client: Client) -> None:
    limited = {'concurrency_key': HOSTILE, 'concurrency_limit': 2}
    publish_many(connect(), range(5), headers=limited)
    publish_many(connect(), range(3), headers={'rate_key': 'mails', 'rate': '1/h'})
    inbox = Inbox(connect(), ack=False)
    parked = 5  # three wait for a slot, two for a start
    inbox.drain_until(lambda: sum(bool(item.get('parked')) for item in items(client)) == parked, 'the parked messages')
    client.bulk([{'_id': 'slot:a:0', 'type': 'Slot', 'key': ['no text']}, {'_id': 'rate:a', 'type': 'Rate', 'key': 1}])
    browser = open_app(app)
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


def test_server_databases_and_duties(open_app: OpenApp, app: Celery, client: Client, apache_couchdb: bool) -> None:
    client.put({'_id': 'broker:leader:beat:shop', 'type': 'Leader', 'holder': 'vm:7:c0ffee', 'date': time.time()})
    client.bulk([{'_id': f'doc-{number}'} for number in range(3)])
    browser = open_app(app)
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


# -- regions


def test_regions(open_app: OpenApp, server: Server) -> None:
    with regions_on(server, 'eu', 'us') as regions:
        eu = regions['eu']
        refused = {'status': 'refused', 'reason': HOSTILE, 'type': 'Parcel', 'task': 'add', 'id': 'refused'}
        eu.regions.put({'_id': 'p:us:refused:1', **refused})
        sent = eu.app.send_task('add', (1, 2), region='us')
        browser = open_app(eu.app)
        [us, *tasks] = rows_of(browser, '/regions')
        assert 'us' in us
        assert len(tasks) == 2
        assert '<b>' not in browser.page.text
        [found] = read(browser, '/regions')
        numbers = found['numbers']
        assert (found['target'], numbers['sent']['count'], numbers['refused']['count']) == ('us', 1, 1)
        assert 'us has refused 1 task' in browser.text
        browser.post('/regions', action='replay', select='p:us:refused:1')
        assert '1 task replayed.' in browser.text
        assert read(browser, '/regions')[0]['numbers']['refused']['count'] == 0
        browser.post('/regions', action='cancel', select='p:us:refused:1', confirmed='1', terminate='on')
        assert eu.regions.get('p:us:refused:1')['terminate'] is True
        browser.post('/regions', action='drop', select='p:us:refused:1', confirmed='1')
        assert eu.regions.get_or_none('p:us:refused:1') is None
        browser.get(f'/tasks/{sent.id}')
        assert 'sent to region us' in browser.text


# -- queues and workers


def test_workers_that_are_all_busy_are_named(app: Celery, client: Client, open_app: OpenApp, run: Run) -> None:
    app.send_task('t', queue='mail')
    task = {'id': '1', 'task': 'pay', 'queue': 'mail', 'since': time.time() - 60}
    pool: dict[str, Any] = {'name': 'solo', 'processes': 2, 'since': time.time(), 'versions': ['celery 5.6']}
    doc = heartbeat(
        'w1', worker='w1@here', queues=['mail'], pool=pool, running={'queues': {'mail': [1, 0]}, 'tasks': [task]}
    )
    leader = {
        '_id': 'broker:leader:beat',
        'type': 'Leader',
        'holder': 'here:5:1',
        'date': time.time(),
        'node': 'w1@here',
    }
    client.bulk([doc, leader])
    assert 'are busy' not in run('status').stdout
    pool['processes'] = 1
    client.put({**client.get(doc['_id']), 'pool': pool})
    assert 'mail: all of its workers are busy: w1@here.' in run('status').stdout
    assert re.search('w1@here +5 .* solo, 1 of 1 busy +beat +mail', run('status').stdout)
    browser = open_app(app)
    assert 'all of its workers are busy: w1@here' in rows_of(browser, '/queues')[0]
    browser.get('/system')
    assert '<a href="/workers?worker=w1%40here">w1@here</a>' in browser.page.text
    browser.get('/workers?worker=w1%40here')
    assert 'All 1 of w1@here 0 longer than usual Clear' in browser.text
    assert 'Shut down' in browser.text
    assert 'Grow' not in browser.text
    browser.post('/workers', action='shrink', select='w1@here')
    assert browser.page.status_code == 400


def test_pool_of_a_fixed_size_is_refused_before_the_question(app: Celery, client: Client, open_app: OpenApp) -> None:
    for name in ('prefork', 'solo'):
        pool: dict[str, Any] = {'name': name, 'processes': 1, 'since': time.time(), 'versions': []}
        client.put(heartbeat(name, worker=f'{name}@here', pool=pool))
    browser = open_app(app)
    browser.get('/workers')
    browser.post('/workers', action='grow', select='prefork@here')
    assert 'Grow the pool of the worker prefork@here?' in browser.text
    browser.post('/workers', action='grow', select=['prefork@here', 'solo@here'])
    assert 'The size of this pool is fixed: solo@here (solo).' in browser.text


def test_first_page_does_not_wait_for_the_ages(app: Celery, open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, '_MAX_AGES', 1)
    for queue in ('mail', 'pay'):
        app.send_task('t', queue=queue)
    browser = open_app(app)  # the login leads to this page
    monkeypatch.setattr(live, '_FRESH_SECONDS', 0.0)
    assert 'mail no worker 1 0 0 0 0 …' in browser.text
    assert [row['oldest'] is not None for row in read(browser, '/queues')] == [True, True]
    browser.get('/queues')  # a browser without scripts
    assert re.search(r'mail no worker 1 0 0 0 0 \d+ s', browser.text)
