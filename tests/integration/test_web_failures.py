"""The pages of failures and of one task: groups, filters, what is retried and dropped, and who may do that."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chord
from celery.app.task import Context

pytest.importorskip('starlette')

from celery_couchdb import audit
from celery_couchdb.failures import Failures
from celery_couchdb.resources import change
from celery_couchdb.testing import Server
from celery_couchdb.web.pages import failures as page_of_failures
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import dead_letter, workitem
from tests.support import Inbox
from tests.web import Browser

from .conftest import Connect, Open, kill_all

HOSTILE = '<script>alert(1)</script>'

#: Publishes a task that fails.
Fail = Callable[..., str]


@pytest.fixture
def fail(app: Celery, client: Client) -> Fail:
    def fail(
        task_id: str, text: str = 'no', kind: str = 'ValueError', task: str = 'pay', arg: str = '4111 1111'
    ) -> str:
        app.send_task(task, (arg,), task_id=task_id, queue='pays')
        app.backend.store_result(task_id, ValueError(text), 'FAILURE')
        [doc] = find(client, task_id)
        error: Any = {'type': kind, 'text': text, 'traceback': 'line 1\nline 2', 'worker': 'w@1', 'retries': 0}
        client.put(dead_letter.failed(doc, error, 1e6, client.clock.now()))
        return task_id

    return fail


@pytest.fixture
def letter(app: Celery, connect: Connect, client: Client) -> str:
    """The id of a task whose message is a dead letter."""
    task_id = app.send_task('mail', ('ann@home',), queue='q').id
    kill_all(Inbox(connect(), 'q', ack=False), client, 1)
    return task_id


def shown(browser: Browser) -> list[str]:
    """Return the ids of the failures in the list."""
    return re.findall(r'type="checkbox" name="select" value="([^"]*)"', browser.page.text.partition('id="list"')[2])


def target(browser: Browser, within: str) -> str:
    """Return the filter that a row of the groups, or the form for all, selects."""
    part = browser.page.text.partition(within)[2] if within == 'class="all"' else browser.page.text
    [found, *_] = [
        found
        for value in re.findall(r'name="select" value="([^"]*shown=[^"]*)"', part)
        if within in (found := html.unescape(value)) or within == 'class="all"'
    ]
    return found


def states(app: Celery, client: Client, task_id: str) -> tuple[list[str], str]:
    """Return the states of the messages of a task, and that of its result."""
    return [workitem.state(doc, 1e10) for doc in find(client, task_id)], app.AsyncResult(task_id).state


def test_groups_and_filters(fail: Fail, letter: str, admin: Browser) -> None:
    """Failures are the first page; groups lead to their failures, and filters select."""
    pays = [fail(f'pay-{number}') for number in range(2)]
    key = fail('key', 'k', 'KeyError', 'report', HOSTILE)
    admin.get('/')
    assert admin.page.url.endswith('/failures')
    assert sorted(shown(admin)) == sorted([*pays, key, letter])
    assert '4 failures' in admin.text
    assert HOSTILE not in admin.page.text
    assert HOSTILE in admin.text
    group = next(found for found in re.findall(r'href="([^"]*)"', admin.page.text) if 'error=ValueError' in found)
    admin.get(html.unescape(group))
    assert sorted(shown(admin)) == pays
    for query, found in {
        'task=report': [key],
        'error=ValueError%3A+no': pays,
        'error=rejected': [letter],
        'queue=q&since=1h': [letter],
        'since=2099-01-01': [],
        'task=other': [],
    }.items():
        admin.get(f'/failures?{query}')
        assert sorted(shown(admin)) == sorted(found), query
    for query in ('since=soon', 'after=x,1', 'at=-1', 'oldest=nan'):
        assert admin.get(f'/failures?{query}').status_code == 200, query
        assert shown(admin) == []
        assert admin.get(f'/failures?{query}&format=json').status_code == 400


def test_largest_groups_are_first_and_all_are_reachable(
    fail: Fail, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of_failures, '_MAX_GROUPS', 2)
    for number in range(3):
        fail(f'largest-{number}', 'k', 'KeyError', 'largest')
    for name in ('a', 'b', 'c'):
        fail(f'of-{name}', 'v', 'ValueError', f'task-{name}')

    def groups(query: str) -> list[str]:
        section = admin.get(f'/failures{query}').text.partition('id="groups"')[2].partition('id="list"')[0]
        return re.findall(r'href="/failures[?]task=([a-z-]*)&amp;error=', section)

    assert groups('')[0] == 'largest'
    assert (len(groups('')), 'These are the largest of 4 groups. Show all' in admin.text) == (2, True)
    assert sorted(groups('?groups=all')) == ['largest', 'task-a', 'task-b', 'task-c']
    assert groups('?sort=task') == ['largest', 'task-a', 'task-b', 'task-c']
    assert groups('?sort=last')[-1] == 'largest'
    for button in ('Retry selected groups', 'Retry: all 6', '>Retry<'):
        assert admin.page.text.count(button) == 1, button


def test_first_page_without_failures(app: Celery, client: Client, admin: Browser) -> None:
    admin.get('/')
    assert admin.page.url.endswith('/queues')
    admin.get('/failures')
    assert 'There are no failures.' in admin.text


def test_pages_and_new_failures(fail: Fail, admin: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages together have each failure once; a list does not jump, and tells of new failures."""
    monkeypatch.setattr(page_of_failures, '_LIMIT', 2)
    ids = [fail(f'pay-{number}') for number in range(5)]
    found, path = list[str](), '/failures?format=json'
    while path:
        found += [row['id'] for row in admin.get(path).json()]
        path = admin.page.links.get('next', {}).get('url', '')
    assert found == ids[::-1]
    admin.get('/failures')
    again = re.search(r'<div id="live" hx-get="([^"]*)"', admin.page.text)
    assert again
    fail('new')
    admin.get(html.unescape(again[1]), headers={'HX-Request': 'true'})
    assert shown(admin) == ids[:2:-1]
    assert '1 new failure: show the list' in html.unescape(admin.page.text)


def test_failure_is_new_although_the_page_is_ahead_of_its_time(
    fail: Fail, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes do not know the server's time exactly: the page's may be ahead of the worker's."""
    real = Failures.now
    monkeypatch.setattr(Failures, 'now', lambda self: real(self) + 5.0)
    before = fail('before')
    admin.get('/failures')
    again = re.search(r'<div id="live" hx-get="([^"]*)"', admin.page.text)
    assert again
    fail('new')
    admin.get(html.unescape(again[1]), headers={'HX-Request': 'true'})
    assert shown(admin) == [before]
    assert '1 new failure: show the list' in html.unescape(admin.page.text)


def test_all_that_match_are_retried(
    app: Celery, client: Client, fail: Fail, letter: str, admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form asks with the number, and what fails after the page was shown is left as it is."""
    monkeypatch.setattr(change, 'BATCH_DOCS', 2)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_declare('again')
    pays, key = [fail(f'pay-{number}') for number in range(5)], fail('key', 'k', 'KeyError')
    admin.get('/failures')
    group = target(admin, 'error=ValueError')
    later = fail('later')
    admin.post('/failures', action='retry-all', select=group)
    assert 'Retry all 5 failures (task: pay, error: ValueError)?' in admin.text
    assert all(states(app, client, one) == (['dead'], 'FAILURE') for one in pays)
    admin.post('/failures', action='retry-all', select=group, to='again', confirmed='1', reason='paid')
    assert '5 failures retried; no worker consumes again.' in admin.text
    assert {find(client, one)[0]['queue'] for one in pays} == {'again'}
    assert [states(app, client, one)[1] for one in (pays[0], key, later)] == ['PENDING', 'FAILURE', 'FAILURE']
    admin.get('/failures?error=ValueError&before=2099-01-01')
    everything, newest = target(admin, 'class="all"'), fail('newest')
    admin.post('/failures', action='retry-all', select=everything, confirmed='1')
    assert [states(app, client, one)[0] for one in (later, newest)] == [['ready'], ['dead']]
    admin.get('/activity')
    assert 'all 5 failures' in admin.text
    assert '/tasks/all' not in admin.text
    admin.get('/failures?since=9000d&error=KeyError')
    admin.post('/failures', action='drop-all', select=target(admin, 'class="all"'))
    assert 'Drop all 1 failure (error: KeyError, since: 9000d)?' in admin.text
    admin.get('/failures')
    admin.post('/failures', action='retry-all', select=target(admin, 'class="all"'), confirmed='1')
    assert states(app, client, letter)[0] == ['ready']
    [*_, record] = audit.newest(client, 3)
    assert (record['outcome'], record['reason']) == ('5 failures retried; no worker consumes again.', 'paid')


def test_selected_are_edited_and_dropped(app: Celery, client: Client, fail: Fail, letter: str, admin: Browser) -> None:
    pay, other = fail('pay-1'), fail('pay-10')
    admin.get('/failures')
    admin.post('/failures', action='retry', select=pay)
    assert '["4111 1111"]' in admin.text
    admin.post('/failures', action='retry', select=pay, new_args='{', new_kwargs='{}', to='', confirmed='1')
    assert admin.page.status_code == 422
    assert "it must be a list in JSON, not '{'" in admin.text
    edited = {'new_args': '["4242"]', 'new_kwargs': '{}', 'to': ''}
    admin.post('/failures', action='retry', select=pay, **edited, seen='1-abc', confirmed='1')
    assert 'it has failed again since you read it. This is how it is now.' in admin.text
    admin.post('/failures', action='retry', select=pay, **edited, confirmed='1')
    assert json.loads(admin.get(f'/tasks/{pay}?format=json').text)['args'] == ['4242']
    admin.get('/failures')
    admin.post('/failures', action='drop', select=[letter, 'pay-'], confirmed='1')
    assert '1 failure dropped; pay-: this failure is not there any more.' in admin.text
    assert find(client, letter) == []
    assert shown(admin) == [other]
    for hostile in (
        '',
        'kind=x',
        'since=x',
        'shown=%FF',
        'task=pay',
        'shown=2099-01-01&x=1',
        'shown=2099-01-01&kind=x',
    ):
        admin.post('/failures', action='drop-all', select=hostile, confirmed='1')
        assert 'load it again' in admin.text or 'Select a failure' in admin.text
        admin.get('/failures')
        assert shown(admin) == [other]


def test_arguments_are_masked(app: Celery, fail: Fail, letter: str, open_page: Open, server: Server) -> None:
    pay = fail('pay-1')
    browser = open_page(mask_args=True)
    browser.log_in(server.user, server.password)
    for path in (
        '/failures',
        '/failures?format=json',
        f'/tasks/{pay}',
        f'/tasks/{pay}?format=json',
        f'/tasks/{letter}',
    ):
        assert browser.get(path).status_code == 200, browser.text
        assert '4111 1111' not in browser.page.text
        assert 'ann@home' not in browser.page.text.partition('<main')[2]
    browser.get('/failures')
    browser.post('/failures', action='retry', select=pay)
    assert 'Retry the failure pay?' in browser.text
    assert ('new_args' in browser.page.text, '4111 1111' in browser.page.text) == (False, False)
    # How many have these arguments would tell what they are.
    browser.post('/failures', action='drop-all', select='shown=2100-01-01T00:00:00%2B00:00&args=4111')
    assert 'This form is not from this page' in browser.text


def test_readers_cannot_act(
    app: Celery, client: Client, fail: Fail, letter: str, open_page: Open, server: Server
) -> None:
    pay = fail('pay-1')
    browser = open_page(read_only=True)
    browser.log_in(server.user, server.password)
    for path in ('/failures', f'/tasks/{pay}', f'/tasks/{letter}'):
        browser.get(path)
        assert 'name="action"' not in browser.page.text
        assert browser.post(path, action='drop', select=pay, confirmed='1').status_code == 403
    assert states(app, client, pay) == (['dead'], 'FAILURE')


def test_task(app: Celery, client: Client, fail: Fail, letter: str, admin: Browser) -> None:
    """One task: error and traceback, timeline, related tasks, the command, and what one can do in its state."""
    pay, hostile = fail('pay/1?', HOSTILE), fail(HOSTILE)

    def offered(task_id: str) -> list[str]:
        assert admin.get(page_of_task(task_id)).status_code == 200
        return re.findall(r'name="action" value="([^"]*)"', admin.page.text)

    def page_of_task(task_id: str) -> str:
        admin.get('/failures' if task_id in (pay, hostile) else '/jobs')
        links = [html.unescape(found) for found in re.findall(r'href="(/tasks/[^"]*)"', admin.page.text)]
        return next((found for found in links if _unquoted(found) == task_id), f'/tasks/{task_id}')

    assert offered(pay) == ['retry', 'drop']
    assert HOSTILE not in admin.page.text
    assert '<a href="/jobs?queue=pays">pays</a>' in admin.page.text
    assert '<a href="/workers?worker=w%401">w@1</a>' in admin.page.text
    for text in (f'ValueError: {HOSTILE}', 'line 1 line 2', "('4111 1111',)", "celery -A jobs couchdb show 'pay/1?'"):
        assert text in admin.text
    assert 'result stored: FAILURE' in admin.text
    assert offered(hostile) == ['retry', 'drop']
    assert offered(letter) == ['retry', 'drop']
    assert 'a dead letter of queue q since' in admin.text
    assert 'published to queue q' in admin.text
    waiting = app.send_task('mail', countdown=3600).id
    assert offered(waiting) == ['run', 'move', 'edit', 'remove']
    admin.post(f'/tasks/{waiting}', action='run')
    assert 'is due now' in admin.text
    admin.post(f'/tasks/{letter}', action='retry', confirmed='1')
    assert '1 failure retried.' in admin.text
    assert states(app, client, letter)[0] == ['ready']
    admin.post(f'/tasks/{letter}', action='remove', confirmed='1')
    assert states(app, client, letter) == ([], 'REVOKED')


def test_task_of_a_chord(app: Celery, connect: Connect, admin: Browser) -> None:
    parts = [app.signature('part', (number,), app=app) for number in range(3)]
    body = chord(parts, app.signature('end', app=app), app=app).delay()
    first, second, _ = (found.id for found in body.parent.results)
    app.backend.mark_as_done(first, 1, request=_request(connect, first))
    admin.get(f'/tasks/{second}')
    assert 'Chord: 1 of 3 tasks have ended' in admin.text
    assert f'Group {body.parent.id}' in admin.text


def test_unknown_tasks(app: Celery, client: Client, fail: Fail, admin: Browser) -> None:
    fail('pay-12345678')
    admin.get('/tasks/pay-1234')
    assert admin.page.url.endswith('/tasks/pay-12345678')
    assert admin.get('/tasks/none').status_code == 404
    assert "Nothing is known of a task 'none'" in admin.text


def test_user_without_the_results(
    app: Celery, client: Client, fail: Fail, letter: str, open_page: Open, member: dict[str, str]
) -> None:
    """Who may not read the results sees the failures, and on the page of a task is told so."""
    pay = fail('pay-1')
    for found, name in ((client, member['user']), (app.backend.client, 'somebody-else')):
        for step in plan(Wanted(found, [], [name])):
            if step.do:
                step.do()
    browser = open_page()
    browser.log_in(**member)
    browser.get('/failures')
    assert shown(browser) == [pay, letter]
    for task_id in (letter, pay):
        assert browser.get(f'/tasks/{task_id}').status_code == 200
        assert 'Results are not shown: you may not read them.' in browser.text


def _request(connect: Connect, task_id: str) -> Context:
    inbox = Inbox(connect(), 'celery', ack=False)
    inbox.wait(3)
    headers = next(one.headers for one in inbox.messages if one.headers['id'] == task_id)
    body = next(one.payload for one in inbox.messages if one.headers['id'] == task_id)
    return Context(headers, chord=body[2]['chord'])


def _unquoted(path: str) -> str:
    from urllib.parse import unquote

    return unquote(path.removeprefix('/tasks/'))
