"""Checks of parcels: which are accepted, and how they become messages."""

from __future__ import annotations

import base64
import json
import zlib
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from inspect import isfunction
from inspect import signature as parameters_of
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.app.task import Context
from celery.canvas import Signature
from celery.canvas import _chain as chain_class
from celery.exceptions import Reject, Retry
from kombu import Producer, serialization
from kombu.utils.json import dumps

from celery_couchdb.contrib.parcels.parcel_checks import Accept, ParcelRefused, call_in, checked
from celery_couchdb.contrib.parcels.room import PARCEL, Origin
from kombu_couchdb.contrib.parcels.parcel import moved_id

ACCEPT = Accept(['add', 'mail.*'], {'celery', 'mail'})


def signature(task: Any, **more: Any) -> dict[str, Any]:
    return {'task': task, 'args': [], 'kwargs': {}, 'options': {}, **more}


def holder(kind: str, **kwargs: Any) -> dict[str, Any]:
    return signature(f'celery.{kind}', subtask_type=kind, kwargs=kwargs)


@pytest.mark.parametrize(
    ('task', 'embedded', 'name'),
    [
        ('subtract', None, 'subtract'),
        ('adder', None, 'adder'),
        (['add'], None, 'add'),
        ('celery.group', None, 'celery.group'),
        ('celery.map', None, 'celery.map'),
        ('add', {'callbacks': [signature('celery.map', args=['subtract', [1]])]}, 'celery.map'),
        ('add', {'errbacks': [signature('add', options={'link': [signature('subtract')]})]}, 'subtract'),
        ('add', {'chord': holder('chord', header=[], body=signature('subtract'))}, 'subtract'),
        ('add', {'chord': signature('add', options={'link_error': [signature('subtract')]})}, 'subtract'),
        ('add', {'chain': [signature('add', options={'chord': signature('subtract')})]}, 'subtract'),
        ('add', {'chain': [signature('add', options={'chain': [signature('subtract')]})]}, 'subtract'),
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
        {'errbacks': ['subtract']},
        {'errbacks': 'subtract'},
        {'chord': 'subtract'},
        {'chord': signature('add', options={'link_error': ['subtract']})},
        {'callbacks': [signature('add', options={'link': 'subtract'})]},
        {'chain': [holder('chord', header='subtract', body=signature('add'))]},
        {'chain': [holder('group', tasks=['subtract'])]},
        {'chain': signature('add')},
        {'callbacks': [signature('add', type='subtract')]},
        {'callbacks': [signature('add', args='x')]},
        {'chain': [signature('add', subtask_type='xmap', kwargs={'task': 'subtract', 'it': [1]})]},
        {'chain': [signature('add', subtask_type='group', kwargs={'tasks': []})]},
        {'chain': [signature('celery.group', subtask_type='group', args=[['subtract']], kwargs={'tasks': []})]},
    ],
)
def test_invalid_signature_is_refused(embedded: Any) -> None:
    """Celery accepts the name of a task as a signature."""
    assert ACCEPT.refusal('add', embedded) == 'its callbacks, chain or chord are not written as Celery writes them'


@pytest.mark.parametrize(
    'options',
    [
        {'region': 'us'},
        {'headers': {'x-from-region': 'us'}},
        {'task_id': 'b', 'headers': {'headers': {PARCEL: ['parcels', 'order-17', 'b']}}},
    ],
)
def test_signature_cannot_say_where_its_result_goes(options: dict[str, Any]) -> None:
    reason = ACCEPT.refusal('add', {'chain': [signature('add', options=options)]})
    assert reason is not None
    assert reason.endswith(' is not for publishers')


def test_deeply_nested_signatures_are_checked() -> None:
    nested: Any = signature('subtract')
    for _ in range(5_000):
        nested = signature('add', options={'link': [nested]})
    assert ACCEPT.refusal('add', {'chain': [nested]}) is not None


def test_nothing_is_accepted_by_default() -> None:
    assert Accept((), {'celery'}).refusal('add', None) == "task 'add' is not in parcels_accept"


def body(args: str = '[1, 2]', kwargs: str = '{}', **embedded: Any) -> str:
    """Return the body of a task as Celery writes it."""
    empty = dict.fromkeys(('callbacks', 'errbacks', 'chain', 'chord'))
    return f'[{args}, {kwargs}, {json.dumps({**empty, **embedded})}]'


def message(**changes: Any) -> dict[str, Any]:
    return {
        'body': body(),
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
    where = {PARCEL: ['parcels', 'order-17', 'a', '1-x', 5.0, 60], 'x-from-region': 'us'}
    request = Context({**own, 'headers': where})  # Celery has its own headers there
    assert Origin.of(request, 'a') == ('parcels', 'order-17', 'a', '1-x', 5.0, 60)
    forged = message(headers={**own, **where, 'headers': where})
    assert checked({'message': forged}, None, ACCEPT, ['json'])['headers'] == own


@pytest.mark.parametrize(
    'header',
    [
        ['parcels', 'order-17', 'another task', '1-x', 5.0, 60.0],
        ['parcels', 'order-17', 'a'],
        ['parcels', 17, 'a', '1-x', 5.0, 60.0],
        ['parcels', 'order-17', 'a', '1-x', 5.0, '60'],
        None,
    ],
)
def test_another_task_has_no_receipt(header: Any) -> None:
    """All tasks that a task sends have its header."""
    assert Origin.of(Context({'task': 'add', 'id': 'a', 'headers': {PARCEL: header}}), 'a') is None


@pytest.mark.parametrize('name', ['callbacks', 'chain', 'is_eager', 'args', 'get'])
@pytest.mark.parametrize('own_body', [body(), '[[1], {}, null]'])
def test_header_that_acts_like_a_part_of_the_body_is_refused(name: str, own_body: str) -> None:
    """Each header becomes an attribute of Celery's request, where the worker looks for the next tasks, too."""
    headers = {'task': 'add', 'id': 'a', name: [signature('subtract')]}
    with pytest.raises(ParcelRefused, match=f'the header {name} is not for publishers'):
        checked({'message': message(headers=headers, body=own_body)}, None, ACCEPT, ['json'])


@pytest.mark.parametrize('missing', ['callbacks', 'chain'])
def test_body_that_leaves_a_part_to_the_headers_is_refused(missing: str) -> None:
    embedded = {name: None for name in ('callbacks', 'errbacks', 'chain', 'chord') if name != missing}
    for spoilt in (embedded, {**embedded, missing: None, PARCEL: ['parcels', 'order-17', 'a']}):
        with pytest.raises(ParcelRefused, match='must have exactly the members callbacks, chain, chord, errbacks'):
            checked({'message': message(body=json.dumps([[1], {}, spoilt]))}, None, ACCEPT, ['json'])


@pytest.mark.parametrize('name', ['rate_key', 'job_key', 'task', 'chain', 'headers', 'x-region'])
def test_headers_of_a_signature_are_those_of_applications(name: str) -> None:
    """The headers of a signature replace those that Celery writes, and choose limits that all tasks share."""
    allowed = {'traceparent': '00-0', 'customer': 5}
    assert ACCEPT.refusal('add', {'callbacks': [signature('add', options={'headers': allowed})]}) is None
    for options in ({'headers': {**allowed, name: 'subtract'}}, {name: 'subtract'}):
        inner = signature('add', options=options)
        for embedded in (
            {'callbacks': [inner]},
            {'chord': signature('add', options={'link': [inner]})},
            {'chain': [holder('chord', header=[signature('add')], body=inner)]},
        ):
            reason = ACCEPT.refusal('add', embedded)
            assert reason is not None
            assert reason.startswith('its callbacks, chain or chord are not ')


@pytest.mark.parametrize(
    'options',
    [
        {'time_limit': 5},
        {'keep_done': 1e9},
        {'retries': -1},
        {'producer': 'x'},
        {'countdown': 'x'},
        {'eta': '9999-12-31T23:59:59'},
        {'task_id': 'parcel:x'},
        {'shadow': 'a\x1b[2J'},
        {'headers': 'x'},
        {'stamped_headers': ['chain'], 'chain': [{'task': 'subtract'}]},
    ],
)
def test_options_of_a_signature(options: dict[str, Any]) -> None:
    assert ACCEPT.refusal('add', {'chain': [signature('add', options=options)]}) is not None


def test_what_celery_writes_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery('publisher', set_as_current=False, broker='memory://', backend='cache+memory://')
    monkeypatch.setattr('celery._state._tls.current_app', app)  # Celery 5.4 loses the app of some signatures
    sent = list[tuple[Any, dict[str, Any]]]()
    monkeypatch.setattr(Producer, 'publish', lambda self, body, **options: sent.append((body, options['headers'])))
    one, two = app.signature('add', (1, 1)), app.signature('mail.send', (1,))
    for canvas in (
        chain(one, two, group(two, two), two),
        chord([one, chain(one, two)], two) | two | group(two, two) | two,
        chord([chord([one, one], two), one], chain(two, two)),
        chain(one, group(two, chain(two, two)), group(two, two), two),
    ):
        for options in (
            {},
            {'link': two, 'link_error': two, 'countdown': 5, 'expires': 10, 'priority': 4, 'shadow': 'other'},
            {'headers': {'traceparent': '00-0'}, 'queue': 'mail', 'compression': 'gzip', 'ignore_result': True},
        ):
            with suppress(TypeError):  # Celery 5.4 refuses links of some chains
                canvas.apply_async(**options)
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    for second in (two.clone().set(eta=later, expires=later), two.clone().set(argsrepr='(secret)')):
        chain(one, second).apply_async()
    stamped = chain(one, two, group(two, two)) | two.clone().set(link=one)
    stamped.stamp(customer='x')
    stamped.apply_async()
    assert len(sent) > 15
    for task_body, headers in sent:
        moved = message(body=dumps(task_body), headers=headers)
        assert checked({'message': moved}, None, ACCEPT, ['json'])['headers'].items() <= headers.items()


@pytest.mark.parametrize(
    'name',
    [
        *('stamped_headers', 'stamps', 'chain', 'chord', 'link', 'link_error', 'callbacks', 'errbacks', 'task_id'),
        *('headers', 'route_name', 'name', 'producer', 'time_limit', 'now', 'status', 'result', 'region', 'rate'),
    ],
)
def test_stamps_do_not_become_options_of_a_retry(name: str) -> None:
    """A retry gives stamps to `apply_async` as options. An empty stamp `stamped_headers` makes them act."""
    stamps = {'customer': 'x', name: [signature('subtract')]}
    headers: dict[str, Any] = {'task': 'add', 'id': 'a', 'stamped_headers': list(stamps), 'stamps': stamps}
    with pytest.raises(ParcelRefused, match=f"the stamp '{name}' is not for publishers"):
        checked({'message': message(headers=headers)}, None, ACCEPT, ['json'])
    for listed in ([], None, ['customer']):  # Celery before 5.7 obeys stamps that the list lacks, too
        headers = {'task': 'add', 'id': 'a', 'stamped_headers': listed, 'stamps': {name: [signature('subtract')]}}
        with pytest.raises(ParcelRefused, match=f"the stamp '{name}' is not for publishers"):
            checked({'message': message(headers=headers)}, None, ACCEPT, ['json'])
    options = {**stamps, 'stamped_headers': list(stamps)}
    assert f"the stamp '{name}' is" in str(ACCEPT.refusal('add', {'chain': [signature('add', options=options)]}))


@pytest.mark.parametrize('name', ['date', 'expires'])
@pytest.mark.parametrize('value', [True, '2030-01-01', 1e300, [5]])
def test_call_with_a_date_that_is_none_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ParcelRefused, match=f'{name} must be a number of seconds since 1970'):
        call_in({'_id': 'a', 'task': 'add', name: value}, ACCEPT, 'b')


#: The parameters of all methods of signatures that pass options on, with this Celery; and two names that none has.
PARAMETERS = {'declare', 'extra_options'} | {
    name
    for kind in (Signature, chain_class, group, chord)
    for method in vars(kind).values()
    if isfunction(method) and any(each.kind is each.VAR_KEYWORD for each in parameters_of(method).parameters.values())
    for name in parameters_of(method).parameters
}


@pytest.mark.parametrize('name', sorted(PARAMETERS))
def test_stamp_that_is_accepted_loses_no_next_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery('worker', set_as_current=False, broker='memory://', backend='cache+memory://')
    monkeypatch.setattr('celery._state._tls.current_app', app)
    sent = list[dict[str, Any]]()
    monkeypatch.setattr(Producer, 'publish', lambda self, body, **options: sent.append(options['headers']['stamps']))
    add = app.signature('add', (1,))
    for canvas, count in ((add, 1), (chain(add, add), 1), (group(add, add), 2), (chord([add, add], add), 2)):
        next_task: dict[str, Any] = json.loads(dumps(canvas))
        next_task['options'].update({'stamped_headers': [name], name: 'x'})
        if ACCEPT.refusal('add', {'chain': [next_task]}) is None:
            sent.clear()
            Signature.from_dict(next_task, app=app).apply_async((0,), parent_id='a', root_id='a')
            assert sent == [{name: 'x'}] * count


@pytest.mark.parametrize('value', [{'__type__': 'datetime', '__value__': 'x'}, {'__type__': 'uuid', '__value__': 5}])
def test_call_with_arguments_that_no_worker_can_decode_is_refused(value: Any) -> None:
    for arguments in ({'args': [value]}, {'kwargs': {'deep': [{'er': value}]}}):
        with pytest.raises(ParcelRefused, match='the arguments cannot be read'):
            call_in({'_id': 'a', 'task': 'add', **arguments}, ACCEPT, 'b')
    date = {'__type__': 'datetime', '__value__': '2030-01-01'}
    assert call_in({'_id': 'a', 'task': 'add', 'args': [date]}, ACCEPT, 'b').args == [date]
    with pytest.raises(ParcelRefused, match='kwargs an object'):
        call_in({'_id': 'a', 'task': 'add', 'kwargs': date}, ACCEPT, 'b')


@pytest.mark.parametrize('listed', [{}, {'stamped_headers': None}, {'stamped_headers': ['who']}])
def test_stamps_that_are_not_listed_are_refused(listed: dict[str, Any]) -> None:
    headers = {'task': 'add', 'id': 'a', 'stamps': {'customer': 'x'}, **listed}
    with pytest.raises(ParcelRefused, match='names that are not in stamped_headers'):
        checked({'message': message(headers=headers)}, None, ACCEPT, ['json'])


def sent_by_a_retry(headers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the task of the message that a retry publishes, and `subtract` if that is to follow."""
    app = Celery('worker', set_as_current=False, broker='memory://', backend='cache+memory://')

    @app.task(name='add', shared=False)
    def add() -> None: ...

    task = app.tasks['add']
    sent = list[tuple[str, str]]()
    monkeypatch.setattr(
        Producer, 'publish', lambda self, body, **more: sent.append((more['headers']['task'], dumps(body[2])))
    )
    task.push_request(**{**headers, 'args': [], 'kwargs': {}, 'called_directly': False, 'delivery_info': {}})
    try:  # an error harms only the task of the publisher
        with suppress(Retry, Reject, LookupError, TypeError, ValueError):
            task.retry(countdown=0)
    finally:
        task.pop_request()
    return {name for name, _ in sent} | {'subtract' for _, embedded in sent if 'subtract' in embedded}


@pytest.mark.parametrize('name', sorted({*Context().as_execution_options(), 'stamps', 'queue', 'mine'}))
@pytest.mark.parametrize('place', ['header', 'stamp', 'stamp without a name'])
def test_retry_of_what_is_accepted_runs_no_other_task(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a retry copies from headers depends on the version of Celery: this runs with each of them."""
    other: Any = signature('subtract')
    value = {'chord': other, 'headers': {'task': 'subtract'}, 'chain': [other], 'link': [other], 'link_error': [other]}
    given = {name: value.get(name, 'subtract')}
    if place != 'header':
        given = {'stamps': given, 'stamped_headers': [name] if place == 'stamp' else []}
    headers = {'task': 'add', 'id': 'a', **given}
    with suppress(ParcelRefused):
        accepted = checked({'message': message(headers=headers)}, None, ACCEPT, ['json'])['headers']
        assert sent_by_a_retry(accepted, monkeypatch) <= {'add'}
    if (name, place) == ('chain', 'header'):  # that was refused: Celery obeys it
        assert sent_by_a_retry(headers, monkeypatch) == {'add', 'subtract'}


def test_time_limits_and_retries_are_those_of_the_task() -> None:
    headers = {'task': 'add', 'id': 'a', 'timelimit': [0.001, None], 'retries': 9, 'traceparent': '00-0'}
    moved = checked({'message': message(headers=headers)}, None, ACCEPT, ['json'])['headers']
    assert moved == {'task': 'add', 'id': 'a', 'traceparent': '00-0'}


@pytest.mark.parametrize('content', ['application/data', 'application/text', '', None, 'application/x-yaml'])
def test_content_type_that_nobody_accepts_is_not_decoded(content: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """kombu trusts `application/data` and `application/text`, and 400 bytes of YAML may take minutes."""
    monkeypatch.setattr('celery_couchdb.contrib.parcels.parcel_checks.loaded', None)
    for encoding in ('utf-8', 'bz2', 'zlib', 'punycode', 'idna'):
        changed = message(**{'content-type': content, 'content-encoding': encoding})
        with pytest.raises(ParcelRefused, match='content'):
            checked({'message': changed}, None, ACCEPT, ['json', 'yaml', 'pickle'])


def test_map_of_three_members_is_no_body() -> None:
    _, _, packed = serialization.dumps({'a': 1, 'b': 2, 'c': {}}, 'msgpack')
    changed = message(body=base64.b64encode(packed).decode(), properties={'body_encoding': 'base64'})
    with pytest.raises(ParcelRefused, match='its body must be a list'):
        checked({'message': {**changed, 'content-type': 'application/x-msgpack'}}, None, ACCEPT, ['msgpack'])


def test_id_of_a_task_without_an_id_cannot_be_chosen() -> None:
    own = moved_id('parcels', 'order-17')
    assert call_in({'_id': 'order-17', 'task': 'add'}, ACCEPT, own).options['task_id'] == own
    with pytest.raises(ParcelRefused, match='id must be printable'):
        call_in({'_id': 'order-18', 'task': 'add', 'id': own}, ACCEPT, moved_id('parcels', 'order-18'))
    with pytest.raises(ParcelRefused, match='id must be printable'):
        checked({'message': message(headers={'task': 'add', 'id': own})}, None, ACCEPT, ['json'])
    assert call_in({'_id': 'order-17', 'task': 'add', 'id': own}, ACCEPT, own).options['task_id'] == own


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        ({'headers': {'task': 'subtract', 'id': 'a'}}, 'subtract'),
        ({'headers': {'task': 'add', 'id': 'a', 'compression': 'application/x-gzip'}}, 'cannot be read'),
        ({'headers': {'task': 'add', 'id': 'a', 'job_key': 'k'}}, 'unique job'),
        ({'headers': {'task': 'add', 'id': 'a\nforged'}}, 'id must be printable text'),
        ({'body': body(errbacks=['subtract'])}, 'are not written as'),
        ({'headers': {'task': 'add', 'id': 'a', 'n': 1e309}}, 'cannot hold the number'),
        ({'headers': {'task': 'add', 'id': 'a', 'shadow': 'x\n[forged]'}}, 'the header shadow must be printable'),
        ({'headers': {'task': 'add', 'id': 'a', 'rate_key': 'k', 'rate': '1/h'}}, 'rate_key is not for publishers'),
        (
            {'headers': {'task': 'add', 'id': 'a', 'concurrency_key': 'k', 'concurrency_limit': 1}},
            'concurrency_key is not for publishers',
        ),
        ({'content-type': 'application/x-python-serialize'}, 'is not accepted'),
        ({'body': '[1]'}, 'must be a list of'),
        ({'body': '[' * 100_000}, 'cannot be read'),
        ({'body': body(chain=[{'task': 'subtract'}])}, 'subtract'),
    ],
)
def test_refused_message(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParcelRefused, match=reason):
        checked({'message': message(**changes)}, None, ACCEPT, ['json', 'pickle'])


def test_message_that_decompresses_to_much_more_is_refused() -> None:
    bomb = base64.b64encode(zlib.compress(b' ' * 20_000_000)).decode()
    headers = {'task': 'add', 'id': 'a', 'compression': 'gzip'}
    with pytest.raises(ParcelRefused, match='decompresses to more than'):
        checked(
            {'message': message(headers=headers, body=bomb, properties={'body_encoding': 'base64'})},
            None,
            ACCEPT,
            ['json'],
        )
