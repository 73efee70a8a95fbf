"""What operators do to many jobs: by id and by filter, from the command line and from the page."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Queue

pytest.importorskip('starlette')

from celery_couchdb import audit
from celery_couchdb.jobs import Jobs
from celery_couchdb.resources import change
from celery_couchdb.web import actions
from kombu_couchdb.admin.jobs import find
from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.support import Inbox, Request, items
from tests.web import Browser

from .conftest import Connect, Run


def queues_of(client: Client) -> list[str]:
    """Return the queues of all messages."""
    return sorted(str(item['queue']) for item in items(client))


def declared(connection: Connection, name: str) -> None:
    """Declare a queue."""
    Queue(name)(connection.default_channel).declare()


def test_jobs_that_match_are_moved_and_removed(app: Celery, connect: Connect, client: Client, run: Run) -> None:
    declared(connect(), 'slow')
    for number in range(6):
        app.send_task('shop.mail' if number % 2 else 'shop.pay', (number,), queue='mail')
    done = run('jobs', 'move', '--task', 'shop.pay', '--to', 'slow', answer='y\n')
    assert done.stdout == 'Move 3 jobs? [y/N]: y\n3 jobs moved.\n'
    assert done.stderr == 'Warning: no worker consumes slow.\n'
    assert queues_of(client) == ['mail'] * 3 + ['slow'] * 3
    assert run('jobs', 'remove', '--queue', 'mail', '--before', '1h', '-y').stdout == (
        'No job matches these filters (queue: mail, before: 1h).\n'
    )
    assert run('jobs', 'remove', '--queue', 'mail', '--args', '(1', '-y').stdout == '1 job removed.\n'
    assert run('jobs', 'run', '--state', 'ready', '--queue', 'slow', '-y').stdout == '3 jobs are due now.\n'
    assert run('jobs', 'remove', '--all', '--yes', '--reason', 'sent twice').stdout == '5 jobs removed.\n'
    assert items(client) == []
    last, *_, first = audit.newest(client, 9)
    assert (last['action'], last['targets'], last['reason']) == ('remove job', ['all 5 jobs'], 'sent twice')
    assert first['targets'] == ['all 3 jobs (task: shop.pay)']
    assert first['outcome'] == '3 jobs moved; no worker consumes slow.'


def test_at_most_so_many_jobs_are_moved(
    app: Celery, connect: Connect, client: Client, run: Run, admin: Browser
) -> None:
    declared(connect(), 'slow')
    for number in range(9):
        app.send_task('shop.mail', (number,), queue='mail')
    done = run('jobs', 'move', '--queue', 'mail', '--limit', '2', '--to', 'slow', answer='y\n')
    assert done.stdout == 'Move 2 jobs? [y/N]: y\n2 jobs moved.\n'
    assert queues_of(client) == ['mail'] * 7 + ['slow'] * 2
    assert run('jobs', 'remove', '--queue', 'slow', '--limit', '5', '-y').stdout == '2 jobs removed.\n'
    admin.get('/jobs?queue=mail')
    [query] = set(re.findall(r'name="select" value="([^"]*shown=[^"]*)"', admin.page.text))
    everything = {'action': 'move-all', 'select': html.unescape(query), 'confirmed': 1, 'to': 'slow'}
    admin.post('/jobs', **everything, limit='none')
    assert "At most: give a whole number from 1, not 'none'" in html.unescape(admin.text)
    admin.post('/jobs', **{**everything, 'to': ''}, limit=3)
    assert 'Give a queue, a due date or a priority.' in admin.text
    admin.post('/jobs', **everything, limit=3)
    assert '3 jobs moved; no worker consumes slow.' in admin.text
    assert queues_of(client) == ['mail'] * 4 + ['slow'] * 3


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        (('remove',), 'Name jobs by id, or select them with --state, --queue, --task …, or give --all.'),
        (('remove', 'abcd', '--all'), 'Name jobs by id'),
        (('move', '--all'), 'Give a queue, a due date or a priority: --to, --due, --priority.'),
        (('move', '--all', '--to', 'none', '-y'), "there is no queue 'none'"),
        (('edit', '--all', '--new-args', '{}'), 'it must be a list in JSON'),
    ],
)
def test_wrong_selection_changes_nothing(
    app: Celery, client: Client, run: Run, given: tuple[str, ...], words: str
) -> None:
    app.send_task('shop.mail', queue='mail')
    before = items(client)
    done = run('jobs', *given)
    assert (words in done.stderr, done.exit_code > 0) == (True, True), done.stderr
    assert items(client) == before


def test_command_that_is_interrupted_says_what_was_done(
    app: Celery, client: Client, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change, 'BATCH_DOCS', 2)
    for number in range(5):
        app.send_task('shop.mail', (number,), queue='mail')
    remove_all = Jobs.remove_all

    def interrupted(self: Jobs, *given: Any, **settings: Any) -> object:
        if len(items(client)) == 1:
            raise KeyboardInterrupt
        return remove_all(self, *given, **settings)

    monkeypatch.setattr(Jobs, 'remove_all', interrupted)
    done = run('jobs', 'remove', '--all', '-y')
    assert (done.exit_code, len(items(client))) == (1, 1)
    assert 'Interrupted: 4 jobs removed. The rest is as it was.' in done.stderr
    assert audit.newest(client, 1)[0]['outcome'] == '4 jobs removed; it was stopped, and the rest is as it was.'


def test_many_jobs_are_read_and_written_together(app: Celery, client: Client, sent: list[Request]) -> None:
    """50 jobs cost as many requests as one."""
    ids = [app.send_task('shop.mail', (number,), queue='mail', countdown=600).id for number in range(50)]
    jobs = Jobs(app, client)
    jobs.move(ids[0], countdown=300)
    sent.clear()
    changed, refused = jobs.move_all(ids, eta=None)
    assert (len(changed), refused, len(sent) <= 3) == (50, {}, True)
    sent.clear()
    assert all(removal.removed for removal in jobs.remove_all(ids).values())
    assert len(sent) < 12, [request.path for request in sent]


def test_jobs_that_others_hold_or_changed(app: Celery, connect: Connect, client: Client) -> None:
    held = app.send_task('shop.mail', queue='mail').id
    Inbox(connect(), 'mail', ack=False).wait(1)
    waits = app.send_task('shop.pay', queue='pay').id
    changed, refused = Jobs(app).move_all([held, waits, 'never there'], priority=3)
    assert [*changed] == [waits]
    assert {name: str(error) for name, error in refused.items()} == {
        held: f'job {held} cannot be changed: a worker holds it',
        'never there': 'job never there cannot be changed: it is not in a queue',
    }


# -- the page


def test_all_that_match_on_the_page(app: Celery, admin: Browser, client: Client) -> None:
    for number in range(4):
        app.send_task('shop.mail', (number,), queue=f'q{number % 2}')
    admin.get('/jobs?queue=q1&state=ready')
    [target] = re.findall(r'type="hidden" name="select" value="([^"]*)"', admin.page.text)
    newer = app.send_task('shop.mail', queue='q1').id
    admin.post('/jobs', action='remove-all', select=html.unescape(target))
    assert 'Remove all 2 jobs (states: ready, queue: q1)?' in admin.text
    admin.post('/jobs', action='remove-all', select=html.unescape(target), confirmed=1)
    assert '2 jobs removed.' in admin.text
    assert len(items(client)) == 3
    assert find(client, newer)
    [done] = audit.newest(client, 9)
    assert (done['action'], done['targets']) == ('remove job', ['all 2 jobs (states: ready, queue: q1)'])
    for wrong in ('', 'state=new', 'since=soon', 'queue=q1', 'before=2099-01-01&state=new'):
        admin.post('/jobs', action='remove-all', select=wrong)
        assert 'This form is not from this page' in admin.text


def _form(browser: Browser) -> dict[str, str]:
    """Return what the form of a question has in its hidden fields and its areas."""
    hidden = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', browser.page.text)
    areas = re.findall(r'<textarea [^>]*name="(\w+)"[^>]*>\n?([^<]*)</textarea>', browser.page.text)
    return {name: html.unescape(text) for name, text in [*hidden, *areas]}


def test_two_who_edit_one_job_at_once(app: Celery, admin: Browser, client: Client) -> None:
    name = app.send_task('shop.mail', (1,), {'to': 'ann'}, queue='mail').id
    admin.get('/jobs')
    admin.post('/jobs', action='edit', select=name)
    second = _form(admin)
    assert (second['new_args'], second['new_kwargs']) == ('[1]', '{"to": "ann"}')
    Jobs(app).edit(name, args=[2])
    admin.post('/jobs', **{**second, 'new_kwargs': '{"to": "joe"}'})
    assert f'Somebody else has changed job {name} since you read it. This is how it is now.' in admin.text
    assert Jobs(app).decode(find(client, name)[0])[:2] == [[2], {'to': 'ann'}]
    second = _form(admin)
    assert (second['new_args'], second['new_kwargs']) == ('[2]', '{"to": "ann"}')
    admin.post('/jobs', **{**second, 'new_kwargs': '{"to": "joe"}'})
    assert '1 job edited.' in admin.text
    assert Jobs(app).decode(find(client, name)[0])[:2] == [[2], {'to': 'joe'}]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let each action go to the background, one job at a time; return a function that lets one part go on."""
    monkeypatch.setattr(change, 'BATCH_DOCS', 1)
    monkeypatch.setattr(actions, '_FOREGROUND_SECONDS', 0.0)
    allowed, remove_all = threading.Semaphore(0), Jobs.remove_all

    def wait(self: Jobs, *given: Any, **settings: Any) -> object:
        allowed.acquire()
        return remove_all(self, *given, **settings)

    monkeypatch.setattr(Jobs, 'remove_all', wait)
    return allowed.release


def test_long_action_goes_on_in_the_background(
    app: Celery, admin: Browser, client: Client, slow: Callable[[], None]
) -> None:
    ids = [app.send_task('shop.mail', (number,), queue='mail').id for number in range(4)]
    admin.get('/jobs')
    admin.post('/jobs', action='remove', select=ids, confirmed=1, reason='sent twice')
    assert 'Remove these 4 jobs: this goes on in the background' in admin.text
    slow()
    wait_for(lambda: '1 of 4 jobs' in _text(admin), 'the progress')
    [begun] = audit.newest(client, 9)  # it is there, whatever happens to the process of the page
    assert (begun['targets'], begun['outcome']) == (ids, audit.UNDER_WAY)
    [name] = re.findall(r'name="select" value="([0-9a-f]{16})"', admin.page.text)
    admin.post('/activity', action='stop', select=name)
    slow()
    wait_for(lambda: audit.newest(client, 9)[-1]['outcome'] != audit.UNDER_WAY, 'the end')
    [done] = [one for one in audit.newest(client, 9) if one['action'] == 'remove job']
    assert done['outcome'] == '2 jobs removed; it was stopped, and the rest is as it was.'
    assert (done['reason'], done['targets'], len(items(client))) == ('sent twice', ids, 2)
    wait_for(lambda: 'it was stopped, and the rest is as it was' in _text(admin), 'the end on the page')


def _text(browser: Browser) -> str:
    browser.get('/queues')
    return browser.text
