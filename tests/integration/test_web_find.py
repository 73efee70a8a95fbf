"""What every page has: a field to find tasks, names that lead to their things, and warnings of queues."""

from __future__ import annotations

import re
from functools import partial

import pytest
from celery import Celery

pytest.importorskip('starlette')

from celery_couchdb import audit
from kombu_couchdb.admin import queues
from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.support import Inbox
from tests.web import Browser

from .conftest import Connect, kill_all


def shows(browser: Browser, path: str, *texts: str) -> bool:
    """Load a page, whose numbers may be those of a moment ago, and tell whether it has these texts."""
    page = browser.get(path).text
    return all(text in page for text in texts)


def test_find(app: Celery, admin: Browser) -> None:
    def nothing() -> None:
        pass

    for name in ('shop.mail', 'shop.pay', 'stock.count'):
        app.task(name=name, shared=False)(nothing)
    task_id = app.send_task('shop.mail').id
    admin.get('/jobs')
    assert 'name="q"' in admin.page.text

    def place(text: str) -> str:
        return str(admin.get(f'/find?q={text}').url).partition(admin.url)[2]

    assert place(task_id) == place(task_id[:8]) == f'/tasks/{task_id}'
    assert place('shop.mail') == '/jobs?task=shop.mail'
    assert place('COUNT') == '/jobs?task=stock.count'
    assert place('other.app.task') == '/jobs?task=other.app.task'
    admin.get('/find?q=shop')
    assert re.findall('/jobs[?]task=(shop[.][a-z]+)', admin.page.text) == ['shop.mail', 'shop.pay']
    assert admin.get('/find?q=<script>').status_code == 404
    assert '<script>' not in admin.page.text.partition('<body')[2].partition('<script defer')[0]


def test_names_are_links(app: Celery, admin: Browser, connect: Connect, client: Client) -> None:
    dead = app.send_task('shop.pay', queue='pay').id
    kill_all(Inbox(connect(), 'pay', ack=False), client, 1)
    audit.record(client, 'ann', 'pause queue', ['mail'], 'paused', None)
    audit.record(client, 'ann', 'remove job', [dead], 'removed', None)
    audit.record(client, 'ann', 'let worker add a queue', ['w1@host'], 'added', None)
    for path, links in {
        '/queues': ('/jobs?queue=pay', '/failures?queue=pay'),
        '/activity': ('/jobs?queue=mail', f'/tasks/{dead}', '/workers?worker=w1%40host'),
        '/jobs?state=dead': ('/jobs?queue=pay', '/jobs?task=shop.pay'),
    }.items():
        wait_for(partial(shows, admin, path, *(f'href="{link}' for link in links)), f'the links {links}')


def test_queues_that_are_paused_or_that_nobody_consumes(app: Celery, admin: Browser, client: Client) -> None:
    app.send_task('shop.mail', queue='mail')
    app.send_task('shop.pay', queue='pay')
    queues.pause(client, 'pay')
    warnings = 'Paused: <a href="/jobs?queue=pay"', 'No worker consumes: <a'
    for path in ('/queues', '/activity', '/jobs', '/workers'):
        wait_for(partial(shows, admin, path, *warnings), 'the warnings')


def test_done_jobs_that_nobody_keeps(app: Celery, admin: Browser) -> None:
    for number in range(3):
        app.send_task('shop.mail', (number,))
    admin.get('/jobs?state=done')
    assert 'Jobs that are done are not kept. With the transport option keep_done' in admin.text
    assert 'What ended in the last hours' in admin.text
    assert 'Look further' not in admin.text
