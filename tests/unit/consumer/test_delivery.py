"""The payload of a delivery for kombu, and the mailbox (`kombu_couchdb.consumer.delivery`)."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from copy import deepcopy
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from kombu.utils.json import JSONEncoder

from kombu_couchdb.consumer import delivery as module
from kombu_couchdb.consumer.delivery import Credit, Delivery, Mailbox, Subscription
from kombu_couchdb.documents import workitem

NOW = 1_763_709_000.0
SUBSCRIPTION = Subscription('q', Credit())


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, 'time', SimpleNamespace(time=lambda: NOW))


def delivered(headers: dict[str, Any] | None = None, properties: dict[str, Any] | None = None, **more: Any) -> Delivery:
    """Return the first delivery of a message that was stored and read again."""
    message = {'body': 'text', 'headers': headers or {}, 'properties': properties or {}, 'content-type': 'text/plain'}
    doc = {**workitem.claim(workitem.new('id', 'q', message, NOW), 'me', NOW), '_rev': '2-b', **more}
    return Delivery(json.loads(json.dumps(doc, cls=JSONEncoder)), SUBSCRIPTION)


@pytest.mark.parametrize(
    'value',
    [
        datetime(2025, 11, 21, 9, 30, 15, 250, tzinfo=timezone.utc),
        datetime(2025, 11, 21),
        date(2025, 11, 21),
        UUID('12345678123456781234567812345678'),
        Decimal('1.10'),
        b'bytes',
        b'\xff\xfe',
        'text',
        5,
        1.5,
        None,
        True,
        ['a', Decimal('2'), [b'deep']],
        {'a': {'b': UUID(int=5)}, 'c': [date(2025, 1, 1)]},
        {},
        [],
    ],
    ids=repr,
)
def test_headers_keep_their_types(value: Any) -> None:
    found = delivered({'name': value}).payload()['headers']['name']
    assert found == value
    assert type(found) is type(value)


def test_payload_does_not_change_the_document() -> None:
    delivery = delivered(
        {'id': UUID(int=5), 'eta': datetime(2099, 1, 1)}, {'delivery_info': {'exchange': 'ex'}}, date=NOW + 5
    )
    before = deepcopy(delivery.doc)
    payload = delivery.payload()
    payload['headers']['more'] = payload['properties']['delivery_info']['more'] = payload['properties']['more'] = 1
    assert delivery.doc == before


@pytest.mark.parametrize(
    ('kind', 'value'),
    [('unheard of', 1), ('datetime', 'tomorrow'), ('decimal', 'x'), ('uuid', 5), ('uuid', {}), ([], 1), (None, None)],
)
def test_headers_that_look_like_types_of_kombu_stay_unchanged(kind: Any, value: Any) -> None:
    header = {'__type__': kind, '__value__': value}
    assert delivered({'name': [header]}).payload()['headers'] == {'name': [header]}


def test_a_newer_delivery_has_a_higher_number() -> None:
    def number(**members: Any) -> Any:
        return delivered(**members).payload()['properties']['delivery_info']['delivery']

    # A delivery that does not count has the same number of attempts. Revision 10 is newer than revision 9.
    assert number(_rev='9-f', attempts=1) < number(_rev='10-a', attempts=1)


def test_message_due_by_the_servers_clock_has_no_future_eta() -> None:
    eta = datetime.fromtimestamp(NOW + 3e9, timezone.utc).isoformat()
    found = delivered({'eta': eta}, date=NOW + 300).payload()['headers']['eta']
    assert datetime.fromisoformat(found) <= datetime.now(timezone.utc)
    assert datetime.fromisoformat(found).utcoffset() == timedelta(0)


@pytest.mark.parametrize('due', [None, NOW - 300, NOW])
def test_past_eta_stays_unchanged(due: float | None) -> None:
    assert delivered({'eta': '2025-11-21T09:30:00'}, date=due).payload()['headers']['eta'] == '2025-11-21T09:30:00'


# -- the mailbox

A, B, C = (Delivery({'_id': name}, SUBSCRIPTION) for name in 'abc')


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def readable(mailbox: Mailbox) -> bool:
    """Tell whether an event loop would see the mailbox as readable."""
    return bool(select.select([mailbox.fileno()], [], [], 0)[0])


def test_descriptor_is_readable_until_pop_finds_nothing(mailbox: Mailbox) -> None:
    for _ in range(2):
        assert not readable(mailbox)
        for item in (A, B, C):
            mailbox.put(item)
        for item in (A, B, C):
            assert readable(mailbox)
            assert mailbox.pop() is item
        assert mailbox.pop() is None


@pytest.mark.parametrize('timeout', [0.0, -1.0, 0.002])
def test_wait_ends_after_its_timeout_and_does_not_shorten_the_next_read(mailbox: Mailbox, timeout: float) -> None:
    assert mailbox.wait(timeout) is False
    mailbox.put(A)
    assert [mailbox.pop(), mailbox.pop()] == [A, None]


def test_items_put_after_close_are_kept() -> None:
    """The I/O thread may put deliveries after the connection was closed: it must go on to release them."""
    mailbox = Mailbox()
    mailbox.close()
    mailbox.close()
    assert mailbox.fileno() == -1
    mailbox.put(A)
    assert [mailbox.pop(), mailbox.pop()] == [A, None]
