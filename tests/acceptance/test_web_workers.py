"""The page of workers with real ones: the tasks that they run, and remote control of some of them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

pytest.importorskip('starlette')

from celery_couchdb.web import create_app
from kombu_couchdb.admin.status import consumers
from tests.conftest import PATIENCE, wait_for
from tests.web import Browser, served

from .conftest import Site


@pytest.fixture
def browser(site: Site, stack: ExitStack) -> Browser:
    site.set_up()
    browser = Browser(stack.enter_context(served(create_app(site.app))))
    browser.get('/')
    browser.log_in(site.server.user, site.server.password)
    return browser


def shown(browser: Browser) -> str:
    browser.get('/workers')
    return browser.text


def tell(browser: Browser, action: str, *workers: str, **fields: str) -> str:
    """Do something to workers, and return what the page says of it."""
    shown(browser)
    browser.post('/workers', action=action, select=workers, confirmed='1', **fields)
    return browser.text


def test_workers_are_told_what_to_do(site: Site, browser: Browser) -> None:
    quick, solo = site.worker(), site.worker('--queues', 'slow', pool='solo', concurrency=1)
    nap = site.send('late_nap', str(site.journal), 'first', None, queue='slow')
    wait_for(lambda: any(one['running'] for one in consumers(site.client)), 'the task to be reported')
    wait_for(lambda: f'href="/tasks/{nap.id}"' in (shown(browser), browser.page.text)[1], 'the page to show the task')
    assert f'{nap.id[:8]} slow' in browser.text

    said = tell(browser, 'add', quick.hostname(), solo.hostname(), queue='more')
    assert f'Consumes more now: {quick.hostname()}; no reply within 2 seconds' in said
    assert f'a worker does not reply): {solo.hostname()}. ' in said
    wait_for(lambda: 'celery, more' in shown(browser), 'the queue')
    forked = site.worker('--queues', 'forked', pool='prefork', concurrency=1)
    wait_for(lambda: forked.hostname() in shown(browser), 'the third worker')
    assert 'The pool has a fixed size' in tell(browser, 'grow', quick.hostname(), processes='2')
    assert 'Pool will grow' in tell(browser, 'grow', forked.hostname(), processes='1')
    assert 'Pool will shrink' in tell(browser, 'shrink', forked.hostname(), processes='1')
    assert 'No longer consuming from forked' in tell(browser, 'cancel', forked.hostname(), queue='forked')
    assert 'No Celery worker that runs: nobody@here.' in tell(browser, 'shutdown', 'nobody@here')

    assert f'Shuts down when its tasks have ended: {quick.hostname()}' in tell(browser, 'shutdown', quick.hostname())
    wait_for(lambda: quick.hostname() not in {one['name'] for one in consumers(site.client)}, 'the worker to end')
    site.go_on()
    assert nap.get(timeout=PATIENCE) == 'first'
