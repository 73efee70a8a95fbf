"""Who may use the page of operators: logins, passwords, roles, sessions, cookies, programs, proxies, other machines."""

from __future__ import annotations

import gc
import json
import logging
import math
import re
import uuid
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from celery import Celery

pytest.importorskip('starlette')

from celery_couchdb import audit
from celery_couchdb.cli.clients import Login
from celery_couchdb.testing import Server
from celery_couchdb.web import accounts, create_app, sessions
from examples.managed.proxy import Proxy as Gateway
from kombu_couchdb.admin import queues
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.credentials import Credentials
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, Users, wait_for
from tests.web import Browser, served

from .conftest import Open, Run

REFUSED = 'CouchDB does not accept this user and password.'


def nobody() -> str:
    """Return the name of no user; pages of one process count wrong passwords together."""
    return f'nobody-{uuid.uuid4().hex}'


def allow(client: Client, user: str) -> None:
    """Make a user the only member of a database."""
    for step in plan(Wanted(client, [], [user])):
        if step.do:
            step.do()


def logged_in(browser: Browser) -> bool:
    return browser.get('/queues').url.endswith('/queues')


def token_of(text: str) -> str:
    found = re.search(r'name="token" value="([^"]*)"', text)
    assert found
    return found[1]


def basic(user: str, password: str) -> str:
    return f'Basic {b64encode(f"{user}:{password}".encode()).decode()}'


# -- what is refused

#: The settings of a page, a request to it, the status of the answer, and words in it.
REFUSALS: dict[str, tuple[dict[str, Any], str, str, dict[str, Any], int, str]] = {
    'a name of another site that leads to this machine': (
        {'login': False}, 'GET', '/queues', {'headers': {'Host': 'evil.example'}}, 403, 'only for 127.0.0.1',
    ),
    'a proxy before a page without a login': (
        {'login': False}, 'GET', '/queues', {'headers': {'X-Real-IP': '127.0.0.1'}}, 403, 'without a proxy',
    ),
    'a machine behind such a proxy': (
        {'login': False}, 'GET', '/queues', {'headers': {'X-Forwarded-For': '203.0.113.9'}}, 403, 'without a proxy',
    ),
    'no user from the proxy': ({'trust_header': 'X-User'}, 'GET', '/queues', {}, 403, 'needs the header X-User, once'),
    'a user from the proxy and one from the browser': (
        {'trust_header': 'X-User'}, 'GET', '/queues', {'headers': [('X-User', 'ann'), ('X-User', 'bob')]}, 403, 'once',
    ),
    'a login from a form of another site': (
        {}, 'POST', '/login', {'headers': {'Sec-Fetch-Site': 'cross-site'}}, 403, 'This form is from another site.',
    ),
    'a large form': ({}, 'POST', '/login', {'form': f'user={"x" * 2_000_000}'}, 413, 'The form is too large.'),
    'a form with many fields': ({}, 'POST', '/login', {'form': '&'.join(10_001 * ['x=1'])}, 413, 'too many fields'),
    'a name that CouchDB cuts': ({}, 'POST', '/login', {'form': 'user=a:b&password=x'}, 403, 'has no colon'),
    'a long name': ({}, 'POST', '/login', {'form': f'user={"x" * 8001}&password=x'}, 403, 'more than 8,000 characters'),
    'a long password': ({}, 'POST', '/login', {'form': f'user=a&password={"x" * 8001}'}, 403, 'more than 8,000 char'),
    'no password': ({}, 'POST', '/login', {'form': 'user=a'}, 403, 'Give the name and the password of a CouchDB user.'),
    'a path with a slash too many': ({}, 'GET', '/queues/', {'headers': {'Host': 'evil.example'}}, 404, 'no such page'),
    'a path like a host': ({}, 'GET', '//evil.example', {}, 404, 'href="/evil.example"'),
    'a path like a host, with a backslash': ({}, 'GET', '/%5Cevil.example', {}, 404, 'href="/%5Cevil.example"'),
}  # fmt: skip


@pytest.mark.parametrize('case', REFUSALS)
def test_refused(open_page: Open, server: Server, case: str) -> None:
    settings, method, path, given, status, words = REFUSALS[case]
    url = urlsplit(open_page(**settings).url)
    form = given.get('form', f'user={server.user}&password={server.password}' if method == 'POST' else '').encode()
    given_headers = given.get('headers', {})
    pairs = given_headers if isinstance(given_headers, list) else [*given_headers.items()]
    headers = [('Host', url.netloc), ('Content-Length', str(len(form))), *pairs]
    if 'Host' in dict(pairs):
        del headers[0]
    connection = HTTPConnection(url.netloc, timeout=PATIENCE)
    connection.putrequest(method, path, skip_host=True)
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders(form)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert (answer.status, words in text, answer.getheader('Set-Cookie')) == (status, True, None), text[:2000]
    assert not re.search(r'"(https?:)?[/\\]{2}evil', f'{text} "{answer.getheader("Location", "")}"')


def test_other_machine_without_a_login(app: Celery, stack: ExitStack) -> None:
    page: Any = create_app(app, login=False)

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        """Serve the page at all addresses, for a client on another machine."""
        await page({**scope, 'client': ('203.0.113.9', 4711)}, receive, send)

    answer = Browser(stack.enter_context(served(mounted))).get('/queues', headers={'Host': 'localhost'})
    assert (answer.status_code, 'only for 127.0.0.1, ::1 and localhost' in answer.text) == (403, True)


# -- the login


def test_login(open_page: Open, server: Server) -> None:
    browser = open_page()
    assert browser.get('/activity?a=1').url == f'{browser.url}/login?next=%2Factivity%3Fa%3D1'
    browser.log_in(nobody(), 'wrong')
    assert browser.page.status_code == 403
    assert f'{REFUSED} CouchDB user' in browser.text
    page = browser.post('/login', user=server.user, password=server.password, next='/activity?a=1')
    assert page.url == f'{browser.url}/activity?a=1'
    cookie = page.history[0].headers['Set-Cookie']
    assert {'HttpOnly', 'Path=/', 'SameSite=strict'} <= set(cookie.split('; '))
    assert 'Secure' not in cookie
    assert server.password not in browser.page.text + cookie
    browser.post('/logout')
    assert not logged_in(browser)
    page = Browser(browser.url, **{'X-Forwarded-Proto': 'https'}).log_in(server.user, server.password)
    assert 'Secure' in page.history[0].headers['Set-Cookie'].split('; ')


@pytest.mark.parametrize(
    ('target', 'location'),
    [
        ('', '/'),
        ('//evil.example', '/evil.example'),
        ('https://evil.example', '/https://evil.example'),
        ('/\\evil.example', '/%5Cevil.example'),
        ('/\t/evil.example', '/%09/evil.example'),
        ('/jobs?path=x&request=y&self=z', '/jobs?path=x&request=y&self=z'),
        ('/jobs?state=ready&queue=a&state=dead', '/jobs?state=ready&state=dead&queue=a'),
    ],
)
def test_login_leads_to_the_page_that_was_asked_for(
    open_page: Open, server: Server, target: str, location: str
) -> None:
    browser = open_page()
    page = browser.post('/login', user=server.user, password=server.password, next=target)
    assert page.history[0].headers['Location'] == location
    answer = Browser(browser.url).get('/', headers={'Host': 'evil.example'}, allow_redirects=False)
    assert answer.headers['Location'] == '/login'


def test_wrong_passwords_do_not_lock_the_user_in_couchdb(
    open_page: Open, app: Celery, stack: ExitStack, server: Server, client: Client, member: dict[str, str]
) -> None:
    """Neither through several pages, nor with right passwords between, nor with names that CouchDB cuts."""
    user, password = member['user'], member['password']
    allow(client, user)
    pages = [open_page(), open_page()]
    for number in range(8):
        for page in pages:
            Browser(page.url).log_in(user, 'wrong')
            page.log_in(f'{user}:{number}', 'wrong')
        pages[0].log_in(user, password)
    pages[1].log_in(user, 'wrong')
    assert 'Too many wrong passwords for this user; try again in 5 minutes.' in pages[1].text
    assert requests.get(f'{server.url}/_session', auth=(user, password), timeout=PATIENCE).json()['ok']
    pages[1].log_in(server.user, server.password)
    assert logged_in(pages[1])


def test_right_passwords_at_once(open_page: Open, server: Server) -> None:
    url = f'{open_page().url}/queues?format=json'

    def ask(number: int) -> int:
        return requests.get(url, auth=(server.user, server.password), timeout=PATIENCE).status_code

    with ThreadPoolExecutor(10) as programs:
        assert [*programs.map(ask, range(10))] == 10 * [200]


def test_user_who_is_no_member(open_page: Open, client: Client, member: dict[str, str]) -> None:
    allow(client, 'somebody-else')
    browser = open_page()
    for _ in range(4):  # the password is right: this is no reason to wait
        browser.log_in(**member)
        assert f'The user {member["user"]} is no member of the database {client.address.database}' in browser.text


def test_gateway_with_a_user_of_its_own(app: Celery, server: Server, stack: ExitStack) -> None:
    """A gateway may accept every password. The page does not let in who says to be somebody else than CouchDB says."""
    authorization = basic(server.user, server.password)
    gateway = stack.enter_context(Gateway(urlsplit(server.url), lambda request: None, authorization=authorization))
    url = app.conf.broker_url.replace(f':{server.port}/', f':{gateway.port}/')
    through = Celery('through', set_as_current=False, broker=url, backend='disabled://')
    browser = Browser(stack.enter_context(served(create_app(through))))
    browser.log_in(nobody(), 'any')
    assert (browser.page.status_code, REFUSED in browser.text) == (403, True)


def test_login_while_couchdb_does_not_respond(app: Celery, server: Server, stack: ExitStack) -> None:
    """Nobody learns the address of CouchDB, no password stays in memory, and no attempt counts."""
    proxy = stack.enter_context(Proxy(server.host, server.port))
    url = app.conf.broker_url.replace(f':{server.port}/', f':{proxy.port}/')
    through = Celery('through', set_as_current=False, broker=url, backend='disabled://')
    browser = Browser(stack.enter_context(served(create_app(through))))
    browser.get('/login')
    proxy.refuse()
    secret = uuid.uuid4().hex
    for _ in range(4):
        browser.log_in(server.user, secret)
        assert browser.page.status_code == 503
        assert 'CouchDB does not respond just now; the log of the page says more.' in browser.text
    auth = (server.user, secret)
    program = requests.get(f'{browser.url}/queues?format=json', auth=auth, timeout=PATIENCE)
    assert (program.status_code, 'does not respond just now' in program.json()['error']) == (503, True)
    assert str(proxy.port) not in browser.page.text.replace(browser.url, '') + program.text
    proxy.restore()
    browser.log_in(nobody(), secret)
    assert REFUSED in browser.text
    del program, auth
    assert not with_password(secret)
    browser.log_in(server.user, server.password)
    assert logged_in(browser)
    assert with_password(server.password)


def with_password(secret: str) -> list[type]:
    """Return the classes of the objects that have this password."""
    gc.collect()
    ours = [one for one in gc.get_objects() if isinstance(one, (Address, Login, Credentials))]
    return [type(one) for one in ours if one.password == secret]


def test_password_stays_in_memory(open_page: Open, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        browser = open_page()
        browser.log_in(nobody(), 'a wrong secret')
        browser.log_in(server.user, server.password)
        page = browser.get('/queues')
    [cookie] = browser.session.cookies.get_dict().values()
    secrets = (server.password, 'a wrong secret', str(cookie))
    assert not [secret for secret in secrets if secret in caplog.text + page.text + page.url]


# -- sessions


def test_session_ends(admin: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged_in(admin)
    with admin.events() as events:
        monkeypatch.setattr(sessions, '_MAX_IDLE_SECONDS', 0.0)
        assert next(events) == 'change'
        assert logged_in(admin)  # an open page keeps it alive
        monkeypatch.undo()
        monkeypatch.setattr(sessions, '_MAX_SECONDS', 0.0)
        assert not logged_in(admin)
        with admin.events() as others:
            assert next(others) == 'end'


def test_idle_session_ends(admin: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logged_in(admin)
    monkeypatch.setattr(sessions, '_MAX_IDLE_SECONDS', 0.0)
    assert not logged_in(admin)


def test_open_pages_end_with_the_session(admin: Browser, app: Celery) -> None:
    with admin.events() as events:
        assert next(events) == 'change'
        admin.get('/queues')
        admin.post('/logout')
        found = set[str]()
        for _ in range(3):
            if 'end' not in found:
                app.send_task('t', queue='mail')
                found.add(next(events))
        assert 'end' in found


@pytest.mark.parametrize('login', [True, False])
def test_two_pages_on_one_host(open_page: Open, server: Server, app: Celery, client: Client, login: bool) -> None:
    """Browsers send the cookies of one port to all ports of a host, and those of a path to all paths below it."""
    app.send_task('t', queue='mail')
    one, other = open_page(login=login), open_page(login=login)
    other.session = one.session
    for browser in (one, other):
        if login:
            browser.log_in(server.user, server.password)
        browser.get('/queues')
    one.post('/queues', action='pause', select='mail', confirmed=1)
    assert '1 queue paused.' in one.text
    other.post('/queues', action='resume', select='mail')
    assert '1 queue resumed.' in other.text


# -- roles


def test_reader(
    open_page: Open, client: Client, app: Celery, member: dict[str, str], users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who becomes a reader, or an operator again, does not need to log in again."""
    app.send_task('t', queue='mail')
    user, password = member['user'], member['password']
    allow(client, user)
    browser = open_page()
    browser.log_in(user, password)
    assert 'read only' not in browser.page.text
    monkeypatch.setattr(accounts, '_ROLES_SECONDS', math.inf)
    users(user, password, 'celery-reader')
    other = Browser(browser.url)
    wait_for(lambda: 'read only' in other.log_in(user, password).text, 'the new role at another login')
    assert_cannot_act(other)
    assert_cannot_act(browser)
    monkeypatch.setattr(accounts, '_ROLES_SECONDS', 0.0)
    users(user, password)
    wait_for(lambda: 'read only' not in browser.get('/queues').text, 'the old role')
    browser.post('/queues', action='pause', select='mail', confirmed=1)
    assert '1 queue paused.' in browser.text


def test_new_password(
    open_page: Open, client: Client, member: dict[str, str], users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who logs in with a new password works with it, and sessions with the old one end."""
    user, old = member['user'], member['password']
    allow(client, user)
    before = open_page()
    before.log_in(user, old)
    users(user, 'another one')
    after = Browser(before.url)
    after.log_in(user, 'another one')
    assert after.get('/activity').status_code == 200
    monkeypatch.setattr(accounts, '_ROLES_SECONDS', 0.0)
    wait_for(lambda: not logged_in(before), 'the old session to end')
    assert logged_in(after)


def test_read_only(open_page: Open, server: Server, app: Celery) -> None:
    app.send_task('t', queue='mail')
    browser = open_page(read_only=True)
    browser.log_in(server.user, server.password)
    assert_cannot_act(browser)


def assert_cannot_act(browser: Browser) -> None:
    browser.get('/queues')
    assert 'read only' in browser.page.text
    assert '<button name="action"' not in browser.page.text
    token = token_of(browser.page.text)
    assert browser.post('/queues', action='pause', select='mail', confirmed=1, token=token).status_code == 403
    assert 'You can look at everything here, but change nothing.' in browser.text


# -- programs


def test_programs(open_page: Open, server: Server, app: Celery, run: Run, client: Client) -> None:
    app.send_task('t', queue='mail')
    browser = open_page()
    answer = requests.get(f'{browser.url}/queues?format=json', timeout=PATIENCE)
    assert (answer.status_code, answer.headers['WWW-Authenticate'].partition(' ')[0]) == (401, 'Basic')
    listed = [json.loads(line) for line in run('queues', 'list', '--json').output.splitlines()]

    def ask(path: str, **given: Any) -> requests.Response:
        given = {'auth': (server.user, server.password), 'headers': {'Accept': 'application/json'}, **given}
        return requests.get(browser.url + path, timeout=PATIENCE, **given)

    assert [{**row, 'oldest': None} for row in ask('/queues').json()] == [{**row, 'oldest': None} for row in listed]
    assert ask('/nothing').json() == {'error': 'There is no such page.'}
    assert 'celery_couchdb_queue_messages{queue="mail",state="ready"} 1.0' in ask('/metrics', headers={}).text
    wrong = ask('/metrics', auth=(nobody(), 'wrong'))
    assert (wrong.status_code, wrong.json()) == (401, {'error': REFUSED})


def test_programs_cannot_change_anything(open_page: Open, server: Server, app: Celery, client: Client) -> None:
    app.send_task('t', queue='mail')
    url, auth = f'{open_page().url}/queues', (server.user, server.password)
    token = token_of(requests.get(url, auth=auth, timeout=PATIENCE).text)
    form = {'action': 'pause', 'select': 'mail', 'confirmed': '1', 'token': token}
    assert requests.post(url, form, auth=auth, timeout=PATIENCE).status_code == 403
    assert queues.paused(client) == {}


# -- proxies


def test_proxy_that_asks_for_a_password_itself(open_page: Open, server: Server) -> None:
    """What a browser sends to such a proxy is no password of CouchDB's."""
    browser = open_page()
    browser.session.headers['Authorization'] = basic(server.user, 'a password of the proxy')
    for _ in range(4):
        assert not logged_in(browser)
    browser.log_in(server.user, server.password)
    assert logged_in(browser)
    with browser.events() as events:
        assert next(events) == 'change'
    browser.session.headers['Accept'] = '*/*'  # what the script of a page loads, after the session has ended
    for name in browser.session.cookies.keys():  # noqa: SIM118 - a jar of cookies has no names otherwise
        browser.session.cookies.set(name, 'ended', domain='127.0.0.1', path='/')
    for _ in range(4):
        assert not logged_in(browser)


def test_trusted_header(open_page: Open, client: Client, app: Celery) -> None:
    app.send_task('t', queue='mail')
    ann = Browser(open_page(trust_header='X-Forwarded-User').url, **{'X-Forwarded-User': 'ann'})
    ann.get('/queues')
    ann.post('/queues', action='pause', select='mail', confirmed=1)
    assert (queues.paused(client)['mail']['by'], audit.newest(client, 5)[0]['user']) == ('ann', 'ann')
    ann.session.headers['X-Forwarded-User'] = 'bob'  # the cookie of another user
    assert ann.post('/queues', action='resume', select='mail').status_code == 403


def test_no_login(open_page: Open) -> None:
    assert logged_in(open_page(login=False))
