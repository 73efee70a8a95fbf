"""The types in Celery's messages (`kombu_couchdb.documents.task_message`)."""

from __future__ import annotations

import bz2
import zlib
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.app.task import Context
from kombu.utils.json import dumps, loads

from kombu_couchdb.documents import task_message, validation
from kombu_couchdb.documents.body import loaded
from kombu_couchdb.transport.qos import Message

from .test_workitem import item, message

TASK = {'task': 'add', 'id': 'a'}

#: Text, numbers and so on of which each header accepts some.
ANYTHING: list[Any] = ['x', 5, -5, 1.5, 1e300, True, [], [1], ['x', 'y'], [[1]], [1, 2, 3], {}, {'__type__': 'uuid'}]


def flaw(headers: dict[str, Any], **changes: Any) -> str | None:
    return validation.malformed_reason(item(message={**message(headers=headers), **changes}))


def test_what_celery_writes_has_no_flaw() -> None:
    app = Celery(set_as_current=False)
    eta = datetime(2030, 1, 1, tzinfo=timezone.utc)
    for options in (
        {},
        {'eta': eta, 'expires': eta, 'time_limit': 5, 'soft_time_limit': 1.5, 'group_id': 'g', 'group_index': 0},
        {'countdown': 5, 'expires': 5.5, 'retries': 3, 'shadow': 'x', 'parent_id': 'a', 'root_id': 'b', 'now': eta},
        {'stamped_headers': ['who'], 'who': ['me'], 'ignore_result': True, 'replaced_task_nesting': 2},
        {'group_id': UUID(int=5), 'root_id': UUID(int=5)},
    ):
        task = app.amqp.as_task_v2('a', 'add', **options)
        assert flaw(loads(dumps(task.headers), object_hook=lambda found: found)) is None
        assert task_message.body_problem(loads(dumps(task.body))) is None
        assert {*task.headers} <= {*task_message.HEADERS}


@pytest.mark.parametrize(
    ('name', 'accepted'),
    [
        ('task', ['x']),
        ('id', ['x', {'__type__': 'uuid', '__value__': {'hex': '0' * 32}}]),
        ('shadow', ['x']),
        ('compression', ['x']),
        ('group', ['x']),
        ('eta', ['x', '2030-01-01', '9998-12-31T23:59:59Z', {'__type__': 'datetime', '__value__': '2030-01-01'}]),
        ('expires', ['x', '2030-01-01T00:00:00+00:00', '9999-12-31T23:59:59Z', '0001-01-01T00:00:00+23:59']),
        ('retries', [5]),
        ('group_index', [5]),
        ('timelimit', [[None, None], [5, 1.5]]),
        ('ignore_result', [5, -5, True]),
        ('stamped_headers', [[], ['x', 'y']]),
        ('stamps', [{}, {'__type__': 'uuid'}]),
        ('headers', [{}, {'__type__': 'uuid'}]),
    ],
)
def test_header_of_a_task_has_its_type(name: str, accepted: list[Any]) -> None:
    for value in [*accepted, *ANYTHING]:
        reason = flaw({**TASK, name: value})
        assert (reason is None) == (value in accepted and not (value is True and True not in accepted)), value
        assert flaw({name: value} if name != 'task' else {}) is None  # not a task of protocol 2
    assert (flaw({**TASK, name: None}) is None) == (name not in TASK)


def test_header_that_replaces_a_function_of_celerys_request_is_a_flaw() -> None:
    """Celery's worker calls it for each message, outside the task: the worker would end with a TypeError."""
    headers = {**TASK, '_get_custom_headers': 'x'}
    with pytest.raises(TypeError, match='not callable'):
        Context(headers)
    assert 'the header _get_custom_headers is not for messages' in (flaw(headers) or '')


@pytest.mark.parametrize('headers', [{'task': 'resize'}, {'task': 5, 'expires': 60}, {'id': 7, 'timelimit': 'x'}])
def test_program_without_celery_may_use_headers_of_these_names(headers: dict[str, Any]) -> None:
    assert flaw(headers) is None


@pytest.mark.parametrize('date', ['', '9999-12-31T23:59:59', '0001-01-01T00:00:00', '9999-01-01'])
def test_date_that_celery_cannot_compare_is_a_flaw(date: str) -> None:
    assert 'expires must be an ISO date' in (flaw({**TASK, 'expires': date}) or '')


@pytest.mark.parametrize('encoding', ['bz2', 'zlib', 'zip', 'hex', 'base64', 'punycode', 'idna', 'unicode_escape', 'x'])
def test_other_encodings_are_never_decoded(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any) -> Any:
        raise AssertionError('it was decoded')

    monkeypatch.setattr(bz2, 'decompress', decode)
    monkeypatch.setattr(zlib, 'decompress', decode)
    monkeypatch.setattr('kombu.serialization._decode', decode)
    spoilt = {**message('x' * 1000), 'content-encoding': encoding, 'content-type': 'application/data'}
    assert 'content-encoding must be' in (validation.malformed_reason(item(message=spoilt)) or '')
    with pytest.raises(ValueError, match='content-encoding must be'):
        Message(spoilt)
    with pytest.raises(ValueError, match='content-encoding must be'):
        loaded(spoilt, b'x' * 1000, None)


@pytest.mark.parametrize(
    'body',
    [
        None,
        5,
        'abc',
        [],
        {},
        [[], {}],
        [[], {}, None],
        [[], {}, {}],
        [{}, {}, dict.fromkeys(task_message.EMBEDDED)],
        [[], [], dict.fromkeys(task_message.EMBEDDED)],
        [[], {}, dict.fromkeys([*task_message.EMBEDDED, 'x-parcel'])],
        {'args': 1, 'kwargs': 2, 'embed': dict.fromkeys(task_message.EMBEDDED)},
    ],
)
def test_body_that_celery_does_not_write_is_a_flaw(body: Any) -> None:
    assert task_message.body_problem(body) is not None
