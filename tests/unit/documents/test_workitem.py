"""The WorkItem and its policy (`kombu_couchdb.documents.workitem`)."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from kombu_couchdb.documents import dead_letter, validation, workitem
from kombu_couchdb.documents.body import MAX_INLINE
from kombu_couchdb.documents.task_message import due_date
from kombu_couchdb.errors import Unstorable

NOW = 1_763_709_000.25


def message(body: str = 'text', headers: Any = None, **properties: Any) -> dict[str, Any]:
    return {
        'body': body,
        'headers': headers or {},
        'properties': properties,
        'content-type': 'application/json',
        'content-encoding': 'utf-8',
    }


def item(**more: Any) -> Any:
    """Return a waiting item as read from the database; `more` may make it malformed."""
    return {**workitem.new('id', 'q', message(), NOW), '_rev': '1-a', **more}


# -- new


@pytest.mark.parametrize('step', [1e-5, 1.0, 1e6, 3e9])
def test_ids_sort_by_time(step: float) -> None:
    later = workitem.new_id(NOW + step)  # created first, so that the serial number does not determine the order
    assert workitem.new_id(NOW) < later
    assert len(workitem.new_id(NOW)) == len(workitem.new_id(NOW + step))


@pytest.mark.parametrize(
    ('given', 'kept'),
    [(0, 0), (5, 5), (9, 9), (10, 9), (255, 9), (-1, 0), ('7', 7), (None, 0), ('high', 0), ([], 0), (float('nan'), 0)],
)
def test_priorities_are_clamped_to_0_to_9(given: Any, kept: int) -> None:
    assert workitem.new('id', 'q', message(priority=given), NOW)['priority'] == kept


# -- expiration


@pytest.mark.parametrize(
    ('expiration', 'expires'),
    [('1500', NOW + 1.5), (250, NOW + 0.25), ('0', NOW), (None, None), ('soon', None), ('', None), ([], None)],
)
def test_expiration_is_in_milliseconds(expiration: Any, expires: float | None) -> None:
    doc = workitem.new('id', 'q', message(expiration=expiration), NOW)
    assert doc.get('expires') == expires
    if expires is None:
        assert not workitem.has_expired(doc, float('inf'))
        return
    assert workitem.has_expired(doc, expires)
    assert not workitem.has_expired(doc, expires - 0.001)


# -- due dates


@pytest.mark.parametrize(
    'eta',
    [
        '2025-11-21T09:30:00Z',
        '2025-11-21T09:30:00+00:00',
        '2025-11-21T12:00:00+02:30',
        '2025-11-21T09:30:00',
        '2025-11-21 01:30:00.000000-08:00',
        datetime(2025, 11, 21, 9, 30),
        datetime(2025, 11, 21, 9, 30, tzinfo=timezone.utc),
        datetime(2025, 11, 21, 11, 30, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_eta_in_any_notation_is_the_same_moment(eta: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv('TZ', 'XST+5')  # the time zone of the machine must not matter
        time.tzset()
        found = due_date(message(headers={'task': 'add', 'eta': eta}))
    time.tzset()
    assert found == 1_763_717_400.0


@pytest.mark.parametrize('eta', [None, '', 'Z', 'tomorrow', '2025-13-01T00:00:00Z', 5, 1.5, [], {}, True])
def test_message_without_a_valid_eta_is_due_at_once(eta: Any) -> None:
    assert due_date(message(headers={'task': 'add', 'eta': eta})) is None
    assert due_date({'headers': None}) is None


def test_header_eta_of_a_message_that_is_not_celerys_belongs_to_its_application() -> None:
    assert due_date({'headers': {'eta': '2099-01-01T00:00:00Z'}}) is None


# -- changes of state


def test_claims_are_distinct() -> None:
    claims = [workitem.claim(item(), by, now) for by in ('me', 'you') for now in (NOW, NOW + 1e-6)]
    assert len({json.dumps(claim) for claim in claims}) == 4


@pytest.mark.parametrize(('delivered', 'attempts'), [(True, 1), (False, 0)])
def test_release_counts_only_delivered_messages(delivered: bool, attempts: int) -> None:
    released = workitem.release(workitem.claim(item(), 'me', NOW), delivered=delivered)
    assert released == item(attempts=attempts, **({'consumer': 'me'} if delivered else {}))
    assert workitem.is_waiting(released)


def test_large_body_that_is_not_text_is_refused() -> None:
    with pytest.raises(Unstorable, match='surrogate'):
        workitem.new('id', 'q', message('\ud800' * (MAX_INLINE + 1)), NOW)


# -- dead letters and states


def test_replayed_item_is_like_a_new_one() -> None:
    doc = item(
        attempts=20, consumer='me', message=message(headers={'id': 'a', 'expires': 'long ago', 'eta': 'long ago'})
    )
    dead = dead_letter.made_of({**doc, 'expires': NOW, 'date': NOW}, 'because', NOW + 1)
    replayed = dead_letter.replayed(validation.checked(dead), NOW + 60)
    assert workitem.is_waiting(replayed)
    assert workitem.is_due(replayed, NOW + 60)
    assert not workitem.has_expired(replayed, NOW + 1e9)
    assert (replayed['published'], replayed['attempts'], replayed['_rev']) == (NOW + 60, 0, '1-a')
    assert not {'status', 'reason', 'failed'} & set(replayed)
    assert replayed['message']['headers'] == {'id': 'a', 'expires': None, 'eta': 'long ago'}
    assert dead['message']['headers']['expires'] == 'long ago'


@pytest.mark.parametrize(
    ('doc', 'state'),
    [
        (item(), 'ready'),
        (item(date=NOW - 1), 'ready'),
        (item(date=NOW + 1), 'scheduled'),
        (item(date='spoilt'), 'ready'),
        (item(expires=NOW - 1), 'gone'),
        (item(expires=NOW - 1, message=message(headers={'id': 'a', 'expires': 'then'})), 'ready'),
        (item(expires=NOW - 1, message=message(headers={'expires': 'then'})), 'gone'),
        (item(expires=NOW + 1), 'ready'),
        (workitem.claim(item(), 'me', NOW), 'prefetched'),
        (dead_letter.made_of(item(), 'because', NOW), 'dead'),
    ],
)
def test_states(doc: dict[str, Any], state: str) -> None:
    assert workitem.state(doc, NOW) == state


# -- forged documents


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_deeply_nested_dead_letter_can_be_copied() -> None:
    assert dead_letter.copy(item(status='fail', message=nested(5000)))['status'] == 'fail'


@pytest.mark.parametrize('removed', ['yes', None, [], {}])
def test_only_a_date_removes_a_message(removed: Any) -> None:
    """Any member can write the member `removed`; that of `Jobs.remove` is a date."""
    held = {'_id': 'a', '_rev': '2-a', 'queue': 'q', 'attempts': 1, 'claimed': {'by': 'c', 'date': 1.0}}
    assert '_deleted' not in workitem.release({**held, 'removed': removed})
    assert workitem.release({**held, 'removed': 5.0})['_deleted'] is True


@pytest.mark.parametrize(
    ('spoilt', 'named'),
    [
        ({'message': None}, 'message'),
        ({'message': {**message(), 'properties': []}}, 'message.properties'),
        ({'message': {**message(), 'headers': 'none'}}, 'message.headers'),
        ({'message': {**message(), 'body': {}}}, 'message.body'),
        ({'message': message(delivery_info='here')}, 'delivery_info'),
        ({'claimed': {}}, 'claimed'),
        ({'claimed': {'by': 7}}, 'claimed'),
        ({'attempts': None}, 'attempts'),
        ({'attempts': True}, 'attempts'),
        ({'attempts': -1}, 'attempts'),
        ({'date': 'tomorrow'}, 'date'),
    ],
)
def test_flaw_names_the_member(spoilt: dict[str, Any], named: str) -> None:
    sentence = validation.malformed_reason(item(**spoilt))
    assert sentence is not None
    assert named in sentence
    assert sentence.startswith('malformed: ')


@pytest.mark.parametrize('place', ['headers', 'properties', 'message', 'item', 'next'])
def test_deep_nesting_is_a_flaw(place: str) -> None:
    deep, fit = (item(message={**message(), 'headers': {}, 'properties': {}}) for _ in range(2))
    for doc, levels in ((deep, 600), (fit, 90)):
        inner = {
            'headers': doc['message']['headers'],
            'properties': doc['message']['properties'],
            'message': doc['message'],
            'item': doc,
            'next': doc,
        }[place]
        inner['next' if place == 'next' else 'x'] = nested(levels)
    assert validation.malformed_reason(fit) is None
    assert validation.malformed_reason(deep) == 'malformed: it is nested in more than 110 levels'
