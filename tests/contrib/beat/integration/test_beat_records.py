"""The record of what somebody changed in the entries of beat with a command or a function."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_couchdb import audit
from celery_couchdb.contrib.beat import Schedules
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied


def test_changes_are_recorded(schedules: Schedules, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """Who did what, and what it was before; arguments as the options want them to be shown."""
    schedules.add('a', 'add', 5, args=['secret'], options={'argsrepr': '***'}, start=7)
    schedules.edit('a', schedule=6, args=['more secret'], start=7)
    schedules.disable('a')
    schedules.disable('a')
    schedules.delete('a')
    found = audit.newest(client, 9)[::-1]
    assert [done['action'].partition(' ')[0] for done in found] == ['add', 'edit', 'disable', 'delete']
    assert {(done['user'], *done['targets']) for done in found} == {(audit.who_runs_this(), 'a')}
    added, edited, disabled, deleted = (done['changes']['a'] for done in found)
    assert (added['task'], added['args'], added['start']) == ([None, '"add"'], [None, '***'], [None, '7'])
    assert edited == {'schedule': ['{"every": 5}', '{"every": 6}'], 'args': ['***', '***']}
    assert disabled == {'enabled': ['true', 'false']}
    assert (deleted['schedule'], deleted['args']) == (['{"every": 6}', None], ['***', None])
    assert 'secret' not in json.dumps(found)
    malformed: list[Any] = [[], {'a': 5}, {'a': {'args': 'x'}}, {'a': {'args': ['x']}}, {'a': {'args': [None, 5]}}]
    record = {name: value for name, value in found[0].items() if name != '_rev'}
    client.bulk([{**record, '_id': f'broker:audit:~{n}', 'changes': wrong} for n, wrong in enumerate(malformed)])
    assert len(audit.newest(client, 20)) == 4


def test_change_stays_if_it_cannot_be_recorded(
    schedules: Schedules, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise AccessDenied('no')

    monkeypatch.setattr(audit, 'record', refuse)
    schedules.add('a', 'add', 5)
    assert 'the record of a change of schedule entry a could not be stored: no' in caplog.text
    assert client.get_or_none('beat:entry:a')
