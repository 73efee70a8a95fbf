"""The page of jobs: filters, pages by key, rows that stay, and actions."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
import requests
from celery import Celery

pytest.importorskip('starlette')

from celery_couchdb import audit
from celery_couchdb.testing import Server
from kombu_couchdb.admin import listing
from kombu_couchdb.admin.jobs import OPEN, find
from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE
from tests.support import Inbox, Request, items
from tests.web import Browser

from .conftest import Connect, Open, Run, kill_all

HOSTILE = '<script>alert(1)</script>'


def shown(browser: Browser) -> list[str]:
    """Return the ids of the jobs in the table."""
    return re.findall(r'type="checkbox" name="select" value="([^"]*)"', browser.page.text)


def link(browser: Browser, text: str) -> str:
    """Return where the link with this text leads to; '' without one."""
    found = re.search(rf'href="([^"]*)"[^>]*>{text}', browser.page.text)
    return html.unescape(found[1]) if found else ''


def many(app: Celery, client: Client, count: int) -> None:
    """Store jobs of two queues with several priorities: ready, due since then, scheduled and done ones."""
    app.send_task('shop.mail')
    [like] = items(client)
    del like['_rev']
    begin = client.clock.now() - 900
    docs: list[Any] = []
    for number in range(count):
        published = begin + number
        doc = {**like, '_id': f'{number:030x}', 'queue': f'q{number % 2}', 'published': published}
        doc['priority'] = number % 3
        doc['message'] = {**like['message'], 'headers': {**like['message']['headers'], 'id': f'task-{number}'}}
        if number % 5 == 0:
            doc['date'] = published
        elif number % 7 == 0:
            doc['date'] = published + 7200
        elif number % 11 == 0:
            doc |= {'type': 'DoneItem', 'status': 'done', 'finished': published, 'expires': begin + 9e6}
        docs.append(doc)
    client.bulk(docs)


def test_filters(app: Celery, admin: Browser, connect: Connect, client: Client) -> None:
    mail = [app.send_task('shop.mail', (number, HOSTILE), {'to': 'ann'}, queue='mail').id for number in range(2)]
    later = app.send_task('shop.report', queue='reports', countdown=3600).id
    failed = app.send_task('shop.pay', queue='pay').id
    kill_all(Inbox(connect(), 'pay', ack=False), client, 1)
    held = app.send_task('shop.pay', queue='pay').id
    Inbox(connect(), 'pay', ack=False).wait(1)

    def found(query: str) -> set[str]:
        admin.get(f'/jobs?{query}')
        return set(shown(admin))

    assert found('') == {*mail, later, held}
    assert HOSTILE not in admin.page.text
    assert f"(0, '{HOSTILE}') {{'to': 'ann'}}" in admin.text
    assert link(admin, mail[0][:8]) == f'/tasks/{mail[0]}'
    assert found('state=scheduled&state=dead') == {later, failed}
    assert found('state=prefetched') == {held}
    assert found('queue=mail') == set(mail)
    assert found('task=shop.report&since=1h') == {later}
    assert found('args=1%2C&since=2026-01-01') == {mail[1]}
    assert found('state=parked') == set()
    assert 'No job matches states parked.' in admin.text
    assert found('since=soon&queue=mail') == set()
    assert "'soon' is neither a duration (90s, 30m, 2h, 1d) nor a date" in admin.text
    assert 'name="since" value="soon"' in admin.page.text
    for query in ('state=new', 'after=[]', 'after=["ready","q",[[1,2],null]]', 'after=' + 3000 * '['):
        assert found(query) == set(), query
        assert admin.page.status_code == 200


def test_arguments_are_masked(app: Celery, open_page: Open, server: Server) -> None:
    task_id = app.send_task('pay', ('4111',), queue='pay').id
    browser = open_page(mask_args=True)
    browser.log_in(server.user, server.password)
    for path in (
        *('/jobs?format=json', '/jobs?args=4111', '/jobs'),
        *(f'/tasks/{task_id}?format=json', f'/tasks/{task_id}'),
    ):
        browser.get(path)
        assert '4111' not in browser.page.text.replace('args=4111', '')
        assert (task_id in browser.page.text) is ('args' not in path)
    assert browser.post('/jobs', action='edit', select=task_id).status_code == 400


def test_pages_by_key(app: Celery, admin: Browser, client: Client, sent: list[Request]) -> None:
    """All pages together have each job once, in the order of the command, and none reads those before it."""
    many(app, client, 130)
    for query, wanted in {
        '': listing.JobFilter(OPEN),
        'state=ready&queue=q1': listing.JobFilter(['ready'], 'q1'),
        'task=shop.mail': listing.JobFilter(OPEN, None, 'shop.mail'),
        'state=done&state=dead&since=1d': listing.JobFilter(['done', 'dead'], since=0.0),
    }.items():
        listed = [doc['message']['headers']['id'] for doc in listing.listing(client, wanted, 500)]
        found, path = list[str](), f'/jobs?{query}'
        while path:
            sent.clear()
            admin.get(path)
            read = sum(len(request.docs or ()) for request in sent if request.path == '/_bulk_get')
            found += shown(admin)
            assert read <= 3 * 51
            path = link(admin, 'Next page')
        assert found == listed
        assert len(found) > 4


def test_next_page_after_its_first_job_has_ended(app: Celery, admin: Browser, client: Client) -> None:
    many(app, client, 130)
    every = [doc['message']['headers']['id'] for doc in listing.listing(client, listing.JobFilter(['ready']), 500)]
    admin.get('/jobs?state=ready')
    following = link(admin, 'Next page')
    client.bulk([{**doc, '_deleted': True} for name in every[49:52] for doc in find(client, name)])
    admin.get(following)
    assert shown(admin) == every[52:102]


def test_search_ends_after_a_thousand_jobs(app: Celery, admin: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, 'MAX_EXAMINED', 4)
    first, *_ = [app.send_task('shop.mail', (number,)).id for number in range(9)]
    admin.get('/jobs?args=(0,')
    for _ in range(2):
        assert 'No job' not in admin.text
        admin.get(link(admin, 'Look further'))
    assert shown(admin) == [first]


def test_list_stays_and_tells_of_new_jobs(app: Celery, admin: Browser, client: Client) -> None:
    ids = [app.send_task('shop.mail', queue='mail').id for _ in range(3)]
    admin.get('/jobs?queue=mail')
    again = re.search(r'<div id="live" hx-get="([^"]*)"', admin.page.text)
    assert again
    admin.get('/jobs')
    admin.post('/jobs', action='remove', select=ids[0], confirmed=1)
    admin.get('/jobs')
    admin.post('/jobs', action='move', select=ids[1], confirmed=1, due='1h')
    for queue in ('mail', 'mail', 'other'):
        app.send_task('shop.mail', queue=queue)
    admin.get(html.unescape(again[1]), headers={'HX-Request': 'true'})
    assert shown(admin) == ids[1:]
    assert '<tbody data-keep>' in admin.page.text
    text = re.sub('<[^>]*>', ' ', admin.page.text)
    assert ('2 new jobs: show the list' in text, 'scheduled' in text) == (True, True)
    assert link(admin, '2 new jobs') == '/jobs?queue=mail'


def test_jobs_are_changed(app: Celery, admin: Browser, connect: Connect, client: Client) -> None:
    connect().SimpleQueue('slow').close()
    waiting = [app.send_task('shop.mail', (number,), queue='mail', countdown=3600).id for number in range(3)]
    admin.get('/jobs')
    admin.post('/jobs', action='run', select=waiting[:2], query='queue=mail&state=ready&state=dead')
    assert admin.page.url.endswith('/jobs?queue=mail&state=ready&state=dead')
    assert '2 jobs are due now.' in admin.text
    assert shown(admin) == waiting[:2]

    def move(**fields: Any) -> str:
        admin.get('/jobs')
        admin.post('/jobs', action='move', select=waiting[0], confirmed=1, reason='because', **fields)
        return admin.text

    assert "Priority: it must be a whole number from 0 to 9, not '10'." in move(priority='10', to='slow')
    assert ('value="slow"' in admin.page.text, 'value="because"' in admin.page.text) == (True, True)
    assert 'it must be a date such as 2026-01-31T08:00+01:00, or "now", not \'soon\'' in move(due='soon')
    assert "There is no queue 'none'" in move(to='none')
    assert 'Give a queue, a due date or a priority.' in move()
    assert '1 job moved; no worker consumes slow.' in move(priority='7', to='slow', due='2099-01-01T00:00Z')
    [doc] = find(client, waiting[0])
    assert (doc['priority'], doc['queue'], doc['date']) == (7, 'slow', 4070908800.0)
    assert [done['action'] for done in audit.newest(client, 9)] == ['move job', 'move job', 'run now job']


def test_arguments_are_edited(app: Celery, admin: Browser, connect: Connect, client: Client) -> None:
    first, other = (app.send_task('shop.mail', (1, HOSTILE), {'to': 'ann'}, queue='mail').id for _ in range(2))
    admin.get('/jobs')
    admin.post('/jobs', action='edit', select=first)
    fields = dict(re.findall(r'<textarea [^>]*name="(\w+)"[^>]*>\n(.*?)</textarea>', admin.page.text, re.DOTALL))
    assert {name: json.loads(html.unescape(text)) for name, text in fields.items()} == {
        'new_args': [1, HOSTILE],
        'new_kwargs': {'to': 'ann'},
    }
    admin.post('/jobs', action='edit', select=first, confirmed=1, new_args='[2\n', new_kwargs='{}')
    assert (admin.page.status_code, "Arguments: it must be a list in JSON, not '[2" in admin.text) == (422, True)
    assert '>\n[2\n</textarea>' in html.unescape(admin.page.text)
    admin.post('/jobs', action='edit', select=first, confirmed=1, new_args='[2,\r\n3]', new_kwargs='{}')
    assert '1 job edited.' in admin.text
    assert find(client, first)[0]['message']['headers']['argsrepr'] == '[2, 3]'
    Inbox(connect(), 'mail', ack=False).wait(2)
    admin.get('/jobs')
    admin.post('/jobs', action='edit', select=other)
    assert f'The job {other} does not wait any more.' in admin.text


def test_jobs_are_removed(app: Celery, admin: Browser, connect: Connect, client: Client) -> None:
    held = app.send_task('shop.mail', queue='mail').id
    Inbox(connect(), 'mail', ack=False).wait(1)
    ids = [app.send_task('shop.mail', queue='mail').id for _ in range(2)]
    admin.get('/jobs')
    admin.post('/jobs', action='remove', select=[*ids, held])
    assert 'Remove these 3 jobs?' in admin.text
    admin.post('/jobs', action='remove', select=[*ids, held], confirmed=1, terminate=1)
    assert '2 jobs removed; 1 job is held by a worker, which was told to terminate it.' in admin.text
    assert [app.AsyncResult(name).state for name in ids] == ['REVOKED', 'REVOKED']
    assert find(client, held)[0]['removed']


def test_json(app: Celery, open_page: Open, server: Server, client: Client, run: Run) -> None:
    many(app, client, 70)
    browser = open_page()
    own: Any = {'auth': (server.user, server.password), 'timeout': PATIENCE}
    rows, path = list[Any](), '/jobs?state=ready&format=json'
    while path:
        answer = requests.get(browser.url + path, **own)
        rows += answer.json()
        path = answer.links.get('next', {}).get('url', '')
    listed = [json.loads(line) for line in run('jobs', 'list', '-s', 'ready', '--json', '-n', '99').output.splitlines()]
    assert rows == listed
    assert requests.get(f'{browser.url}/jobs?since=soon&format=json', **own).status_code == 400
