"""The page of tasks and the charts: what they show of the history, and how often they read it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery

pytest.importorskip('starlette')

from celery_couchdb.contrib.metrics.history import read_history
from celery_couchdb.resources.columns import format_mean
from celery_couchdb.resources.workers import failed_cell
from celery_couchdb.testing import Server
from celery_couchdb.web import recent_history
from celery_couchdb.web.recent_history import RecentHistory
from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.integration.conftest import Open
from tests.support import Request
from tests.web import Browser

#: The name of a task that is HTML, a command to a terminal, and an address.
HOSTILE = '"><b>t</b>\x1b[2J/../?a=1'


def happened(client: Client, ago: int, tasks: Any, queues: Any = None) -> None:
    """Write a minute of the history: what happened so many minutes ago."""
    date = (client.clock.now() // 60 - ago) * 60
    number = int(date // 600) % 144
    doc = client.get_or_none(f'broker:history:{number:03}') or {'_id': f'broker:history:{number:03}', 'minutes': {}}
    doc |= {'type': 'History', 'date': date // 600 * 600}
    doc['minutes'][str(int(date % 600 // 60))] = {'tasks': tasks, 'queues': queues or {}}
    client.put(doc)
    assert read_history(client, 24)


@pytest.fixture
def history(client: Client) -> None:
    """Two tasks of the last hour, and one that failed 20 hours ago; and a queue."""
    happened(client, 1200, {HOSTILE: {'failed': 1}})
    happened(client, 200, {'pay': {'succeeded': 100, 'failed': 20, 'seconds': 60}})
    happened(client, 50, {'pay': {'succeeded': 3, 'retried': 1, 'seconds': 6.0}}, {'mail': {'ready': 40}})
    happened(client, 40, {'pay': {'failed': 1, 'rejected': 2}, 'add': {'succeeded': 1000}}, {'mail': {'ready': 10}})


def read(browser: Browser) -> dict[str, Any]:
    """Return the JSON of the page, by task, in its order."""
    return {row.pop('task'): row for row in browser.get('/tasks?format=json').json()}


def test_how_long_tasks_usually_take_and_how_many_failed(history: None, client: Client) -> None:
    usual = RecentHistory(client).read().mean_seconds()
    assert (round(usual['pay'], 3), usual['add'], format_mean(usual['pay'])) == (0.52, 0.0, '520 ms')
    counts = {'pay': {'failed': 3, 'succeeded': 9}, 'add': {'failed': 1}, 'malformed': [], HOSTILE: {'failed': 'x'}}
    assert failed_cell({'since': 1.0, 'counts': counts}).text == '4'
    assert (failed_cell({}).text, failed_cell({'counts': []}).text) == ('-', '-')


def test_tasks_of_the_last_hour_and_day(history: None, admin: Browser) -> None:
    found = read(admin)
    assert list(found) == ['pay', HOSTILE, 'add']
    hour, day = found['pay']['hour'], found['pay']['day']
    ends = ('runs', 'succeeded', 'failed', 'retried', 'rejected')
    assert [hour[name] for name in ends] == [7, 3, 1, 1, 2]
    assert (hour['failure_rate'], hour['mean']) == (0.25, 0.857)
    assert [day[name] for name in ends] == [127, 103, 21, 1, 2]
    assert day['mean'] == 0.52
    assert (found[HOSTILE]['hour']['runs'], found[HOSTILE]['hour']['failure_rate']) == (0, None)

    admin.get('/tasks')
    assert 'pay 7 3 1 1 2 25.0 % 857 ms' in admin.text
    assert 'Succeeded 1,003 Failed 1 Retried 1 Rejected 2 Failure rate <0.1 %' in admin.text
    assert 'aria-label="7 runs"' in admin.page.text
    assert re.search(r'<b>t|<style|style=|\son\w+=', admin.page.text) is None
    assert r'"><b>t</b>\x1b[2J/../?a=1 0 0 0 0 0' in admin.text
    admin.get('/tasks?period=day')
    assert 'pay 127 103 21 1 2 16.9 % 520 ms' in admin.text
    assert r'"><b>t</b>\x1b[2J/../?a=1 1 0 1 0 0 100.0 %' in admin.text
    links = re.findall(r'href="([^"]*=%22%3E%3Cb[^"]*)"', admin.page.text)
    assert [link.partition('?')[0] for link in links] == ['/jobs', '/failures']
    assert [admin.get(link).status_code for link in links] == [200, 200]


def test_chart_and_its_numbers(history: None, admin: Browser) -> None:
    wanted = {
        'hour': (60, 'in each minute 2,000 1,000 0', [('3', '0'), ('1,000', '1')]),
        'day': (48, 'in each 30 minutes 2,000 1,000 0', [('0', '1'), ('100', '20'), ('1,003', '1')]),
    }
    for period, (count, axis, bars) in wanted.items():
        page = admin.get(f'/tasks?period={period}').text
        assert axis in admin.text
        titles = re.findall(r'<title>From \d\d:\d\d UTC: ([\d,]+) succeeded, (\d+) failed</title>', page)
        assert len(titles) == count
        assert [title for title in titles if title != ('0', '0')] == bars
    heights = [float(height) for height in re.findall(r'class="bad"[^>]* height="([\d.]+)"', page)]
    assert heights == [3.0, 3.0, 3.0]  # what is not 0 can be seen
    assert 'ago 1,003 1 1 2' in admin.text  # the table of the same numbers


def test_tasks_that_run_longer_than_usual(history: None, client: Client, open_page: Open, server: Server) -> None:
    now = client.clock.now()
    since = {'a1': ('pay', now - 60), 'b2': ('unknown', now - 600), 'c3': ('mail', now - 60)}
    tasks = [{'id': name, 'task': task, 'queue': 'q', 'since': date} for name, (task, date) in since.items()]
    happened(client, 30, {'mail': {'succeeded': 2, 'seconds': 100}})
    client.put(
        {
            '_id': 'broker:consumer:vm:1:a',
            'type': 'Consumer',
            'host': 'vm',
            'pid': 1,
            'worker': 'w1@vm',
            'queues': ['q'],
        }
        | {'date': now, 'expires': now + 600, 'running': {'tasks': tasks, 'queues': {'q': [3, 0]}}}
    )
    admin = open_page()
    admin.log_in(server.user, server.password)
    admin.get('/workers')
    assert 'Running tasks All 3 1 longer than usual' in admin.text
    assert re.search(r'pay a1 q 1 m \d+ s 520 ms .* mail c3 q 1 m \d+ s 50.0 s', admin.text)
    admin.get('/workers?running=long')
    assert 'a1 q 1 m' in admin.text
    assert 'unknown' not in admin.text
    assert 'c3' not in admin.text


def test_last_hour_of_a_queue(history: None, admin: Browser, app: Celery) -> None:
    for queue in ('mail', 'calm'):
        app.send_task('t', queue=queue)
    wait_for(lambda: {'mail', 'calm'} <= set(admin.get('/queues').text.split('"')), 'the queues')
    page = admin.page.text
    [[text, points]] = re.findall(r'aria-label="([^"]*)"><polyline points="([^"]*)"', page)
    assert text == '1 ready now, 40 at most'
    heights = [19 - float(point.partition(',')[2]) for point in points.split()]
    assert len(heights) == 61
    assert (max(heights), sorted(heights)[-2]) == (18, 4.5)
    assert 0 < heights[-1] < 1  # the last point is what is ready now
    assert re.findall(r'Select calm.*?data-title="Last hour"[^>]*>([^<]*)', page, re.DOTALL) == ['-']


def test_without_history(admin: Browser, app: Celery) -> None:
    app.send_task('t', queue='mail')
    assert 'Last hour' not in admin.get('/queues').text
    admin.get('/tasks')
    assert admin.page.status_code == 200
    assert 'start a worker, and look again a few minutes after it has run a task' in admin.text
    assert 'class="card bars"' not in admin.page.text
    assert read(admin) == {}


def test_documents_that_are_malformed(client: Client, open_page: Open, server: Server) -> None:
    names = {f't{number}': {'succeeded': 1} for number in range(300)}
    happened(client, 30, {**names, 'x': 5, 'y': {'failed': 1e300, 'seconds': -1}, 'z': {'failed': [1]}}, {'q': None})
    happened(client, 2, 'none', 7)
    happened(client, -9, {'future': {'failed': 1}})
    admin = open_page()
    admin.log_in(server.user, server.password)
    assert 'future' not in read(admin)
    assert admin.get('/tasks').status_code == 200
    assert 'These are the first 200; there are' in admin.text
    assert admin.get('/queues').status_code == 200


def test_one_reading_a_minute_and_only_of_what_is_new(
    history: None, client: Client, sent: list[Request], admin: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def readings() -> list[int]:
        """Return how many documents each reading of the history has asked for."""
        bodies = [str(request.body) for request in sent if 'broker:history:' in str(request.body)]
        return [body.count('broker:history:') for body in bodies]

    for path in ('/tasks', '/queues', '/tasks?period=day'):
        admin.get(path)
    [first] = readings()
    assert first >= 144
    happened(client, 1, {'pay': {'failed': 2}})
    sent.clear()
    assert read(admin)['pay']['hour']['failed'] == 1
    assert readings() == []
    monkeypatch.setattr(recent_history, '_FRESH_SECONDS', 0.0)
    assert read(admin)['pay']['hour']['failed'] == 3
    assert [count <= 3 for count in readings()] == [True]
    assert list(read(admin)) == ['pay', HOSTILE, 'add']
