"""The page of operators: what it shows, forms, headers, and what it reads of CouchDB and when."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from typing import Any

import pytest
import requests
from celery import Celery

pytest.importorskip('starlette')

from starlette.applications import Starlette
from starlette.routing import Mount

from celery_couchdb import audit
from celery_couchdb.testing import Server
from celery_couchdb.web import create_app
from celery_couchdb.web.cli import Prefixed
from kombu_couchdb.admin import queues
from kombu_couchdb.couchdb.client import Client
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, wait_for
from tests.support import Request, publish
from tests.web import Browser, served

from .conftest import Connect, Open

#: Names that are HTML, commands to a terminal, or change the direction of text.
HOSTILE = ('<script>alert(1)</script>', '"><img src=x>', 'line\nbreak \x1b[31m', 'ab\u202ecd', "it's {{ 7 * 7 }}")


# -- what is shown


def test_hostile_names(admin: Browser, connect: Connect, client: Client) -> None:
    connection = connect()
    for name in HOSTILE:
        publish(connection, {}, name)
        queues.pause(client, name, by=name, reason=name)
        audit.record(client, name, name, [name], name, name)
    for path in ('/queues', '/workers', '/activity'):
        page = admin.get(path).text
        assert not re.search(
            r'<script>|<img|\x1b|\u202e|s 49', page.partition('<body')[2].partition('<script defer')[0]
        )
    assert "it's {{ 7 * 7 }} by it's {{ 7 * 7 }}" not in admin.text
    for shown in ('<script>alert(1)</script>', 'line\\nbreak \\x1b[31m', 'ab\\u202ecd', "it's {{ 7 * 7 }}"):
        assert shown in admin.text
    admin.get('/queues')
    admin.post('/queues', action='purge', select=HOSTILE)
    assert 'Purge these 5 queues with 5 messages? ' in admin.text
    admin.post('/queues', action='purge', select=HOSTILE, confirmed=1)
    assert '5 messages deleted.' in admin.text
    admin.post('/queues', action='resume', select=HOSTILE[3])
    assert '1 queue resumed.' in admin.text


def test_safe_headers(admin: Browser) -> None:
    for path in (
        '/queues',
        '/login',
        '/nothing',
        '/static/style.css',
        '/static/nothing',
        '/health',
        '/metrics',
        '/status',
    ):
        headers = admin.get(path).headers
        assert "default-src 'self'" in headers['Content-Security-Policy'], path
        assert headers['X-Content-Type-Options'] == 'nosniff'
        assert headers['Cache-Control'] == 'no-store'
    page = admin.get('/queues').text
    assert not re.search(r'<style|style=|\son\w+=|<script(?! (?:defer|type="module") src=)', page)


def test_error_in_a_page(admin: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(client: Client, limit: int) -> Any:
        raise RuntimeError('the secret of a programmer')

    monkeypatch.setattr(audit, 'newest', broken)
    page = admin.get('/activity')
    assert (page.status_code, 'secret' in page.text) == (500, False)
    assert 'This page has an error' in admin.text
    assert "default-src 'self'" in page.headers['Content-Security-Policy']


@pytest.mark.parametrize('path', ['/celery', '/tools/celery'])
def test_below_a_path(app: Celery, server: Server, stack: ExitStack, path: str) -> None:
    mounted: Any = Starlette(routes=[Mount(path, create_app(app))])
    urls = [stack.enter_context(served(mounted)), stack.enter_context(served(Prefixed(create_app(app), path)))]
    for url in urls:
        browser = Browser(url + path)
        browser.log_in(server.user, server.password)
        assert browser.page.url == f'{url}{path}/queues'
        links = re.findall(r'(?:href|src|action|hx-get|sse-connect)="([^"]*)"', browser.page.text)
        assert all(link.startswith((f'{path}/', '#')) for link in links)
        style = next(link for link in links if 'style' in link)
        assert requests.get(url + style, timeout=PATIENCE).headers['Cache-Control'].endswith('immutable')
        assert f'Path={path}' in browser.page.history[0].headers['Set-Cookie']
    stripped = requests.get(f'{urls[1]}/login', timeout=PATIENCE)  # by a proxy that removes the prefix
    assert f'action="{path}/login"' in stripped.text


# -- what is changed


def test_pause_asks_and_is_recorded(admin: Browser, client: Client, app: Celery, server: Server) -> None:
    for name in ('mail', 'pay'):
        app.send_task('t', queue=name)
    admin.get('/queues')
    admin.post('/queues', action='pause', select='mail')
    assert 'Pause the queue mail?' in admin.text
    assert queues.paused(client) == {}
    assert 'Refuse new messages of programs' in admin.text
    admin.post('/queues', action='pause', select='mail', reason='the provider is down', refuse='1', confirmed=1)
    assert '1 queue paused.' in admin.text
    paused = queues.paused(client)['mail']
    assert (paused['by'], paused['reason'], paused['refuse']) == (server.user, 'the provider is down', True)
    assert '1 queue paused.' not in admin.get('/queues').text
    admin.post('/queues', action='purge', select=['mail', 'pay'], confirmed=1)
    [purged, pause] = admin.get('/activity?format=json').json()
    assert [purged[name] for name in ('user', 'action', 'targets', 'count')] == [
        server.user,
        'purge queue',
        ['mail', 'pay'],
        2,
    ]
    assert (pause['reason'], pause['outcome']) == ('the provider is down', '1 queue paused.')
    admin.get('/activity')
    assert 'pause queue mail 1 queue paused. the provider is down' in admin.text


def test_refused_action_is_recorded(admin: Browser, client: Client, app: Celery) -> None:
    admin.get('/queues')
    admin.post('/queues', action='delete', select='half \ufffd', confirmed=1)
    admin.post('/queues', action='delete')
    assert 'Select a queue first.' in admin.text
    assert admin.post('/queues', action='explode', select='q').status_code == 400
    assert len(audit.newest(client, 9)) == 1


def test_forms_need_the_token_of_the_session(admin: Browser, open_page: Open, server: Server, client: Client) -> None:
    other = open_page()
    other.log_in(server.user, server.password)
    for page in ('', other.page.text):
        token = re.search(r'name="token" value="([^"]*)"', page)
        answer = admin.post('/queues', action='pause', select='q', confirmed=1, token=token[1] if token else '')
        assert (answer.status_code, queues.paused(client)) == (403, {})
    assert 'This form is not from your session' in admin.text
    assert admin.post('/logout', token='x').status_code == 403


def test_record_is_kept_for_90_days(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for days in (0, 60, 91):
        monkeypatch.setattr(type(client.clock), 'now', lambda self, days=days: now + days * 86400)
        audit.record(client, 'ann', f'day {days}', [f'target {n}' for n in range(30)], 'done.', None)
    found = audit.newest(client, 9)
    assert [each['action'] for each in found] == ['day 91', 'day 60']
    assert (len(found[0]['targets']), found[0]['count']) == (20, 30)


# -- what it costs


def test_nothing_is_read_while_nobody_looks(admin: Browser, app: Celery, sent: list[Request]) -> None:
    with ExitStack() as browsers:
        streams = [browsers.enter_context(admin.events()) for _ in range(5)]
        assert [next(stream) for stream in streams] == 5 * ['change']
        sent.clear()
        app.send_task('t', queue='mail')
        began = time.monotonic()
        for stream in streams:
            assert next(stream) == 'change'
            admin.get('/queues')
        # One reading for five browsers: they share it.
        ours = [request for request in sent if request.method == 'GET']
        assert (
            len([request for request in ours if request.path and 'waiting' in request.path])
            <= 1 + (time.monotonic() - began) / 2
        )
        assert 'mail' in admin.text
    live_threads = [thread for thread in __import__('threading').enumerate() if thread.name == 'celery-couchdb-live']
    wait_for(lambda: not any(thread.is_alive() for thread in live_threads), 'the thread to end')
    sent.clear()
    app.send_task('t', queue='mail')
    assert not [request for request in sent if request.method == 'GET' and request.path == '/_changes']


def test_couchdb_stops_and_comes_back(app: Celery, server: Server, stack: ExitStack) -> None:
    proxy = stack.enter_context(Proxy(server.host, server.port))
    url = app.conf.broker_url.replace(f':{server.port}/', f':{proxy.port}/')
    through = Celery('through', set_as_current=False, broker=url, backend='disabled://')
    browser = Browser(stack.enter_context(served(create_app(through))))
    assert browser.get('/health').status_code == 200
    browser.log_in(server.user, server.password)
    with browser.events() as events:
        assert next(events) == 'change'
        proxy.refuse()
        assert next(events) == 'problem'
        browser.get('/queues')
        assert re.search(r'CouchDB cannot be read: http://\S+: .+\. It could \d+ s ago \. Trying again', browser.text)
        wait_for(lambda: browser.get('/health').status_code == 503, 'the probe to fail')
        proxy.restore()
        assert next(events) == 'problem'
        assert 'trying again' not in browser.get('/queues').text
