"""The page of schedules: rules in words, the last result, whether a beat runs, and the form of an entry."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from celery import Celery

pytest.importorskip('starlette')

from celery_couchdb import audit
from celery_couchdb.contrib.beat import Schedules
from celery_couchdb.contrib.beat.entries import new_state
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.integration.conftest import Beat, Open, entry_of, until_idle
from tests.support import items
from tests.web import Browser

HOSTILE = '<img src=x> "quoted" ab\u202ecd'


def form(browser: Browser) -> dict[str, str]:
    """Return the values of the fields of an entry in the form that is shown."""
    page = browser.page.text
    found = dict(re.findall(r'<input id="field-(\w+)"[^>]* value="([^"]*)"', page))
    found |= dict(re.findall(r'<input type="hidden" name="(seen)" value="([^"]*)"', page))
    found |= dict(re.findall(r'<textarea [^>]*name="(\w+)"[^>]*>\n(.*?)</textarea>', page, re.DOTALL))
    for name, options in re.findall(r'<select [^>]*name="(\w+)">(.*?)</select>', page):
        found[name] = re.findall(r' selected>(\w+)', options)[0]
    return {name: html.unescape(text) for name, text in found.items()}


def add(browser: Browser, **fields: str) -> str:
    """Send the form of a new entry, and return the text of the page that is shown then."""
    browser.get('/schedules')
    browser.post('/schedules', action='add')
    given = form(browser)
    browser.post('/schedules', action='add', confirmed=1, **{**given, **fields})
    return browser.text


def test_list(app: Celery, admin: Browser, schedules: Schedules, client: Client, beat: Beat) -> None:
    assert 'There is no schedule: add one, or start' in admin.get('/schedules').text
    assert 'No beat runs' not in admin.text
    schedules.add('books', 'shop.close', {'crontab': '30 3 * * mon-fri', 'timezone': 'Europe/Berlin'})
    schedules.add(HOSTILE, HOSTILE, 60, args=[HOSTILE])
    client.put({**new_state('beat:state:books'), 'task_id': 'task-1', 'sent': 1800000000.0, 'count': 1234})
    app.backend.store_result('task-1', ValueError('no books'), 'FAILURE')
    admin.get('/schedules')
    assert 'No beat runs: start "celery -A your_app beat -S couchdb".' in admin.text
    assert 'at 03:30 on Monday to Friday, Europe/Berlin' in admin.text
    assert 'the app does not know this task' in admin.text
    assert len(re.findall('<time ', re.findall('<tr id=.*?</tr>', admin.page.text, re.DOTALL)[1])) == 3 + 1
    assert '<a href="/tasks/task-1">FAILURE</a>' in admin.page.text
    assert '1,234' in admin.text
    assert not re.search('<img|\u202e', admin.page.text)
    [entry] = [row for row in admin.get('/schedules?format=json').json() if row['name'] == 'books']
    assert (entry['result'], entry['rule'], len(entry['next'])) == (
        'FAILURE',
        'at 03:30 on Monday to Friday, Europe/Berlin',
        3,
    )
    until_idle(beat(), 10)
    assert 'No beat runs' not in admin.get('/schedules').text


def test_next_dates_are_shown_before_an_entry_is_saved(admin: Browser, client: Client) -> None:
    rule = {'name': 'x', 'task': 'shop.close', 'kind': 'crontab', 'crontab': '30 3 1 1 *', 'start': '2098-02-01'}
    admin.get('/schedules')
    admin.post('/schedules', action='add', confirmed=1, preview=1, **rule)
    years = re.findall(r'<time datetime="([0-9]+)-01-01T03:30', admin.page.text)
    assert years == ['2099', '2100', '2101']
    assert 'value="30 3 1 1 *"' in admin.page.text
    admin.post('/schedules', action='add', confirmed=1, preview=1, **{**rule, 'crontab': 'never'})
    assert admin.page.status_code == 422
    assert client.find(['beat:entry:x']) == [None]


def test_entry_is_added(admin: Browser, client: Client) -> None:
    text = add(
        admin,
        name='books',
        task='shop.close',
        kind='crontab',
        crontab='30 3 * * *',
        timezone='Europe/Berlin',
        kwargs='{"year": 2026}',
        options='{"queue": "slow"}',
        missed='skip',
        grace='10m',
        start='2026-01-01T00:30Z',
        until='2099-01-01',
        times='3',
    )
    assert 'books: added.' in text
    doc = client.get('beat:entry:books')
    assert {name: doc[name] for name in doc.keys() - {'_id', '_rev', 'type', 'source', 'until'}} == {
        'task': 'shop.close',
        'schedule': {'crontab': '30 3 * * *', 'timezone': 'Europe/Berlin'},
        'kwargs': {'year': 2026},
        'options': {'queue': 'slow'},
        'missed': 'skip',
        'grace': 600.0,
        'enabled': True,
        'start': 1_767_227_400,
        'times': 3,
    }
    for kind, rule, stored in (
        ('every', '15m', {'every': 900.0}),
        ('at', '2099-01-01T09:00', {'at': '2099-01-01T09:00'}),
    ):
        assert 'added' in add(admin, name=kind, task='t', kind=kind, **{kind: rule})
        assert client.get(f'beat:entry:{kind}')['schedule'] == stored


#: Fields of the form of a new entry, and the sentence that says what is wrong.
WRONG = [
    ({'every': 'soon'}, "Every: give a number and a unit, such as 90s, 15m, 2h or 7d, not 'soon'."),
    ({'every': '0'}, 'Every: it must be from 0.01 to 1,000,000,000 seconds, not 0.'),
    (
        {'kind': 'crontab', 'crontab': '99 * * * *'},
        'schedule.crontab: the minute must be 0 to 59, or a pattern such as',
    ),
    ({'kind': 'crontab', 'crontab': '0 0 * * no'}, 'the weekday must be 0 (Sunday) to 6, or sun to sat, or a pattern'),
    ({'kind': 'crontab', 'crontab': '* * * * *', 'timezone': 'Mars'}, "schedule.timezone 'Mars' is not the name"),
    ({'kind': 'solar', 'solar': 'sunset'}, 'solar must be an event, a latitude and a longitude'),
    ({'kind': 'at', 'at': 'never'}, 'schedule.at must be a date'),
    ({'kind': 'at', 'at': '2020-01-01'}, 'nothing would be sent'),
    ({'times': 'many'}, "Times: give a whole number from 1, not 'many'."),
    ({'start': 'soon'}, "start must be a date such as 2027-01-01T09:00, not 'soon'"),
    ({'options': '{"queu": "q"}'}, "is it 'queue'?"),
    ({'args': '{}'}, "Arguments: it must be a list in JSON, not '{}'."),
    ({'options': '{"task_id": "1"}'}, "options must not contain 'task_id'"),
    ({'name': ''}, 'Give a name, a task and a rule.'),
    ({'name': 'taken'}, "There is a schedule entry 'taken' already."),
]


def test_wrong_value_is_one_sentence_and_the_input_stays(admin: Browser, schedules: Schedules, client: Client) -> None:
    schedules.add('taken', 't', 60)
    for fields, sentence in WRONG:
        given = {'name': 'new', 'task': f'shop {HOSTILE}', 'kind': 'every', 'every': '60', **fields}
        text = add(admin, **given)
        assert sentence.lower() in text.lower()
        assert form(admin).items() >= given.items()
    assert client.get_or_none('beat:entry:new') is None
    assert [record['action'] for record in audit.newest(client, 9)] == ['add schedule']


def test_entry_is_edited(admin: Browser, schedules: Schedules, client: Client) -> None:
    schedules.add('a', 't', {'every': 3600, 'relative': True}, args=[1], start=5.0)
    before = client.get('beat:entry:a')

    def edit(**fields: Any) -> str:
        admin.get('/schedules')
        admin.post('/schedules', action='edit', select='a')
        assert admin.page.text.count('name="select" value="a"') == 1
        admin.post('/schedules', action='edit', select='a', confirmed=1, **{**form(admin), **fields})
        return admin.text

    assert 'a: nothing was changed.' in edit()
    assert client.get('beat:entry:a') == before
    edit(grace='2m', args='')
    after = client.get('beat:entry:a')
    assert {name: value for name, value in after.items() if before.get(name) != value and name != '_rev'} == {
        'grace': 120.0,
        'args': [],
    }
    [record, *_] = audit.newest(client, 9)
    assert record['changes'] == {'a': {'grace': [None, '120.0'], 'args': ['[1]', '[]']}}
    assert re.search('args: \\[1\\] → \\[\\]; grace: .{1,3} → 120.0', admin.get('/activity').text)
    edit(kind='crontab', crontab='0 0 1 1 *', timezone='Europe/Berlin')
    assert len(audit.newest(client, 9)) == 4
    edit(crontab='0 0 1 2 *')
    assert client.get('beat:entry:a')['schedule'] == {'crontab': '0 0 1 2 *', 'timezone': 'Europe/Berlin'}


def test_two_who_edit_one_entry_at_once(admin: Browser, schedules: Schedules, client: Client) -> None:
    schedules.add('a', 't', 3600, args=[1])
    admin.get('/schedules')
    admin.post('/schedules', action='edit', select='a')
    opened = form(admin)
    schedules.edit('a', args=[2])
    admin.post('/schedules', action='edit', select='a', confirmed=1, **{**opened, 'grace': '2m'})
    assert "Somebody else has changed the schedule entry 'a' since you read it. This is how it is now." in admin.text
    assert client.get('beat:entry:a')['args'] == [2]
    admin.post('/schedules', action='edit', select='a', confirmed=1, **{**form(admin), 'grace': '2m'})
    assert {'args': [2], 'grace': 120.0}.items() <= client.get('beat:entry:a').items()


def test_arguments_in_records_are_masked(open_page: Open, server: Server, schedules: Schedules, client: Client) -> None:
    schedules.add('a', 't', 5, args=['secret'], kwargs={'x': 'secret'})
    record = {name: value for name, value in audit.newest(client, 9)[0].items() if name != '_rev'}
    client.put({**record, '_id': f'{record["_id"]}~', 'changes': None})
    browser = open_page(mask_args=True)
    browser.log_in(server.user, server.password)
    shown = browser.get('/activity').text
    assert 'task: - → ' in shown
    assert [record['action'] for record in browser.get('/activity?format=json').json()] == 2 * ['add schedule']
    assert 'secret' not in shown + browser.page.text


def test_entries_are_run_disabled_enabled_and_deleted(admin: Browser, client: Client, beat: Beat) -> None:
    until_idle(beat(code=entry_of(), other=entry_of()), 10)

    def act(action: str, *names: str) -> str:
        admin.get('/schedules')
        admin.post('/schedules', action=action, select=names, confirmed=1)
        return admin.text

    assert re.search('code: sent as [0-9a-f-]{36}', act('run', 'code'))
    assert [doc['message']['headers']['task'] for doc in items(client)] == ['add']
    assert '2 entries: disabled.' in act('disable', 'code', 'other')
    assert client.get('beat:entry:code')['enabled'] is False
    assert 'code: enabled.' in act('enable', 'code')
    client.put({**client.get('beat:entry:code'), 'args': [7]})
    assert 'active, not as in the code' in admin.get('/schedules').text
    assert 'code: as in the code.' in act('reset', 'code')
    assert client.get('beat:entry:code')['args'] == []
    assert "Schedule entry 'code' is in the code of the app" in act('delete', 'code')
    client.put({**client.get('beat:entry:other'), 'source': 'database'})
    assert 'other: deleted.' in act('delete', 'other')
    assert client.get_or_none('beat:entry:other') is None
