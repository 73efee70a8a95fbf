"""Checks of parcels: which are accepted, and how they become messages."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest
from celery.app.task import Context

from celery_couchdb.parcels.accept import Accept
from celery_couchdb.parcels.check import Refused, call_in, checked
from celery_couchdb.parcels.inherited import PARCEL
from celery_couchdb.parcels.origin import parcel_of

#: 100 MB of blanks, compressed to 100 kB.
BOMB = base64.b64encode(zlib.compress(b' ' * 100_000_000)).decode()

ACCEPT = Accept(['add', 'mail.*'], {'celery', 'mail'})


def signature(task: Any, **more: Any) -> dict[str, Any]:
    return {'task': task, 'args': [], 'kwargs': {}, 'options': {}, **more}


def holder(kind: str, **kwargs: Any) -> dict[str, Any]:
    return signature(f'celery.{kind}', subtask_type=kind, kwargs=kwargs)


@pytest.mark.parametrize(
    ('task', 'embedded'),
    [
        ('add', None),
        ('mail.send', {'callbacks': None, 'errbacks': None, 'chain': None, 'chord': None}),
        ('add', {'callbacks': [signature('mail.send')], 'chain': [signature('add'), signature('add')]}),
        ('add', {'chord': signature('mail.send', options={'queue': 'mail'})}),
        ('add', {'callbacks': [holder('group', tasks=[signature('add'), holder('chain', tasks=[signature('add')])])]}),
        (
            'add',
            {'chain': [holder('chord', header=[signature('add')], body=signature('add'), kwargs={'task': 'mine'})]},
        ),
        ('add', {'callbacks': [signature('add', args=[{'task': 'mine'}], options={'link': [signature('add')]})]}),
    ],
)
def test_accepted_parcel(task: str, embedded: Any) -> None:
    assert ACCEPT.refusal(task, embedded) is None


@pytest.mark.parametrize(
    ('task', 'embedded', 'name'),
    [
        ('subtract', None, 'subtract'),
        ('adder', None, 'adder'),
        (['add'], None, 'add'),
        (None, None, 'None'),
        ('celery.backend_cleanup', None, 'backend_cleanup'),
        ('celery.group', None, 'celery.group'),
        ('celery.map', None, 'celery.map'),
        ('celery.starmap', None, 'celery.starmap'),
        ('celery.chunks', None, 'celery.chunks'),
        ('add', {'callbacks': [signature('subtract')]}, 'subtract'),
        ('add', {'callbacks': [signature('celery.map', args=['subtract', [1]])]}, 'celery.map'),
        ('add', {'errbacks': [signature('add', options={'link': [signature('subtract')]})]}, 'subtract'),
        ('add', {'chord': holder('chord', header=[], body=signature('subtract'))}, 'subtract'),
        ('add', {'chord': signature('add', options={'link_error': [signature('subtract')]})}, 'subtract'),
        ('add', {'chain': [holder('group', tasks=[holder('group', tasks=[signature('subtract')])])]}, 'subtract'),
        ('add', {'chain': [signature('add', options={'queue': 'admin'})]}, 'admin'),
        ('add', {'chain': [signature('add', options={'exchange': 'celery.pidbox'})]}, 'celery.pidbox'),
        ('add', {'chain': [signature(['add'])]}, 'add'),
    ],
)
def test_refused_parcel(task: Any, embedded: Any, name: str) -> None:
    reason = ACCEPT.refusal(task, embedded)
    assert reason is not None
    assert name in reason


@pytest.mark.parametrize(
    'embedded',
    [
        'subtract',
        [],
        {'errbacks': ['subtract']},
        {'errbacks': 'subtract'},
        {'callbacks': ['subtract']},
        {'chain': ['subtract']},
        {'chord': 'subtract'},
        {'chord': signature('add', options={'link_error': ['subtract']})},
        {'callbacks': [signature('add', options={'link': 'subtract'})]},
        {'callbacks': [signature('add', options='x')]},
        {'callbacks': [signature('add', options={'headers': 'x'})]},
        {'chain': [holder('chord', header='subtract', body=signature('add'))]},
        {'chain': [holder('group', tasks=['subtract'])]},
        {'chain': [signature('add', subtask_type='xmap', kwargs={'task': 'subtract', 'it': [1]})]},
        {'chain': [signature('add', subtask_type='group', kwargs={'tasks': []})]},
        {'chain': [signature('celery.group', subtask_type='group', args=[['subtract']], kwargs={'tasks': []})]},
        {'chain': [signature('celery.group', subtask_type=['group'])]},
    ],
)
def test_invalid_signature_is_refused(embedded: Any) -> None:
    """Celery accepts the name of a task as a signature."""
    assert ACCEPT.refusal('add', embedded) == 'its callbacks, chain or chord are not written as Celery writes them'


@pytest.mark.parametrize(
    'options',
    [
        {'region': 'us'},
        {'headers': {'x-region': 'us'}},
        {'headers': {'x-from-region': 'us'}},
        {'task_id': 'b', 'headers': {PARCEL: ['order-17', 'b']}},
        {'task_id': 'b', 'headers': {'headers': {PARCEL: ['order-17', 'b']}}},
    ],
)
def test_signature_cannot_say_where_its_result_goes(options: dict[str, Any]) -> None:
    reason = ACCEPT.refusal('add', {'chain': [signature('add', options=options)]})
    assert reason == 'its callbacks, chain or chord name a region or a parcel'


def test_deeply_nested_signatures_are_checked() -> None:
    nested: Any = signature('subtract')
    for _ in range(100_000):
        nested = signature('add', options={'link': [nested]})
    assert ACCEPT.refusal('add', {'chain': [nested]}) is not None


def test_nothing_is_accepted_by_default() -> None:
    assert Accept((), {'celery'}).refusal('add', None) == "task 'add' is not in parcels_accept"


def test_parcel_of_a_plain_call() -> None:
    call = call_in(
        {
            '_id': 'a',
            'task': 'add',
            'args': [1],
            'kwargs': {'y': 2},
            'queue': 'mail',
            'date': 5,
            'priority': 3,
            'customer': "a member of the publisher's own",
        },
        ACCEPT,
    )
    assert (call.task, call.args, call.kwargs) == ('add', [1], {'y': 2})
    assert (call.options['queue'], call.options['eta'].timestamp(), call.options['priority']) == ('mail', 5.0, 3)


def test_missing_task_id_is_derived_from_the_document_id() -> None:
    ids = [call_in({'_id': doc_id, 'task': 'add'}, ACCEPT).options['task_id'] for doc_id in ('a', 'a', 'b')]
    assert ids[0] == ids[1] != ids[2]


def message(**changes: Any) -> dict[str, Any]:
    return {
        'body': '[[1, 2], {}, {}]',
        'content-type': 'application/json',
        'content-encoding': 'utf-8',
        'headers': {'task': 'add', 'id': 'a'},
        'properties': {'body_encoding': 'utf-8', 'reply_to': 'x', 'priority': 5},
        **changes,
    }


def test_message_keeps_only_allowed_properties() -> None:
    assert checked({'message': message()}, None, ACCEPT, ['json'])['properties'] == {'priority': 5}


def test_message_cannot_say_where_its_result_goes() -> None:
    own = {'task': 'add', 'id': 'a'}
    where = {PARCEL: ['order-17', 'a'], 'x-from-region': 'us'}
    assert parcel_of(Context({**own, 'headers': where}), 'a') == 'order-17'  # Celery has its own headers there
    forged = message(headers={**own, **where, 'headers': where})
    assert checked({'message': forged}, None, ACCEPT, ['json'])['headers'] == own


@pytest.mark.parametrize(
    'header', [['order-17', 'another task'], ['order-17'], ['order-17', 'a', 'b'], [17, 'a'], 'order-17', None]
)
def test_result_of_another_task_names_no_parcel(header: Any) -> None:
    """All tasks that a task sends have its header."""
    assert parcel_of(Context({'task': 'add', 'id': 'a', 'headers': {PARCEL: header}}), 'a') is None


def test_long_document_id_is_refused() -> None:
    with pytest.raises(Refused, match='the id of the document has more than 255 characters'):
        call_in({'_id': 'a' * 256, 'task': 'add'}, ACCEPT)


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        ({'headers': {'task': 'subtract', 'id': 'a'}}, 'subtract'),
        ({'headers': {'task': 'add', 'id': 'a', 'compression': 'application/x-gzip'}}, 'cannot be read'),
        (
            {
                'headers': {'task': 'add', 'id': 'a', 'compression': 'gzip'},
                'body': BOMB,
                'properties': {'body_encoding': 'base64'},
            },
            'decompresses to more than',
        ),
        ({'headers': {'task': 'add', 'id': 'a', 'job_key': 'k'}}, 'unique job'),
        ({'headers': {'task': 'add'}}, 'no task and its id'),
        ({'headers': {'task': 'add', 'id': 'a\nforged'}}, 'id must be printable text'),
        ({'headers': {'task': 'add', 'id': 'a' * 256}}, 'id must be printable text'),
        ({'body': '[[], {}, {"errbacks": ["subtract"]}]'}, 'are not written as'),
        ({'headers': {'task': 'add', 'id': 'a', 'n': 1e309}}, 'cannot hold the number'),
        ({'content-type': 'application/x-python-serialize'}, 'is not accepted'),
        ({'content-type': 'text/plain'}, 'is not accepted'),
        ({'body': '[1'}, 'cannot be read'),
        ({'body': '[1]'}, 'cannot be read'),
        ({'body': '[' * 100_000}, 'cannot be read'),
        ({'body': None}, 'cannot be read'),
        ({'body': '[[], {}, {"chain": [{"task": "subtract"}]}]'}, 'subtract'),
        ({'headers': 5}, 'malformed'),
    ],
)
def test_refused_message(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        checked({'message': message(**changes)}, None, ACCEPT, ['json', 'pickle'])
