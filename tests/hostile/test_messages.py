"""Messages with any content: each is delivered unchanged, or its publisher gets one clear error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import validation
from kombu_couchdb.errors import CouchDBError, Unstorable
from tests.conftest import wait_for
from tests.support import Inbox, items, publish

from .strategies import any_text, json_values

LONG_AGO, FAR = '2001-01-01T00:00:00', '2999-01-01T00:00:00'


def clear(exc: CouchDBError, *secrets: str) -> None:
    """Check that an error is one readable sentence without secrets."""
    text = str(exc)
    assert not [secret for secret in secrets if secret in text]
    assert 20 < len(text) < 400
    assert text.isprintable()


def same(left: Any, right: Any) -> bool:
    """Tell whether two values are equal as JSON: 1 equals 1.0, but not true."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def send(connection: Connection, body: Any, to: str = 'q', **more: Any) -> None:
    """Publish without kombu's producer, which would correct the types of some properties."""
    channel = connection.default_channel
    message = channel.prepare_message(
        body,
        more.pop('priority', None),
        more.pop('content_type', None),
        more.pop('content_encoding', None),
        more.pop('headers', None),
        more,
    )
    channel.basic_publish(message, '', to)


def test_published_messages_are_delivered_unchanged(
    connection: Connection, client: Client, apache_couchdb: bool
) -> None:
    # The embedded server is written in JavaScript, and drops members of this name.
    names = any_text() if apache_couchdb else any_text().filter(lambda name: name != '__proto__')
    bodies = st.binary() | any_text().map(lambda text: text.encode('utf-8', 'surrogatepass'))
    encodings = (
        st.sampled_from(['utf-8', 'UTF8', 'us-ascii', 'binary', 'latin-1', 'utf-16', 'nonsense', '']) | any_text()
    )
    sent: dict[int, tuple[bytes, Any, Any, Any]] = {}
    refused = 0

    @given(bodies, st.dictionaries(names, json_values(names, exact=apache_couchdb), max_size=3), any_text(), encodings)
    @example(b'body', {}, 'text/plain', 'utf-8')  # at least one is accepted and one is refused
    @example(b'body', {'x': math.nan}, 'text/plain', 'utf-8')
    def each(body: bytes, headers: dict[str, Any], content_type: str, encoding: str) -> None:
        nonlocal refused
        number = len(sent)
        headers = {name: value for name, value in headers.items() if name not in ('job_key', 'eta')}
        try:
            send(
                connection,
                body,
                headers={**headers, 'number': number},
                content_type=content_type,
                content_encoding=encoding,
            )
        except CouchDBError as exc:
            clear(exc)
            refused += 1
        else:
            sent[number] = (body, headers, content_type, encoding)

    each()
    inbox = Inbox(connection)
    inbox.drain_until(lambda: len(inbox.messages) >= len(sent), 'all accepted messages')
    assert sent
    assert refused
    for message in inbox.messages:
        body, headers, content_type, encoding = sent[message.headers.pop('number')]
        assert message.body == body
        assert same(message.headers, headers)
        assert (message.content_type, message.content_encoding) == (content_type, encoding)
    wait_for(lambda: not items(client), 'all messages to be acknowledged')


@pytest.mark.parametrize(
    'header',
    [math.nan, math.inf, 10**309, 5e-324, '\ud800', {1: 'x'}, {'a': {None: 1}}, {'x': object()}, {'x'}, 'deep'],
    ids=lambda header: str(type(header)) if isinstance(header, dict) else repr(header),
)
def test_message_that_cannot_be_stored_is_refused_without_affecting_others(
    connection: Connection, client: Client, header: Any
) -> None:
    value: Any = header
    for _ in range(101 if header == 'deep' else 0):
        value = [value]
    for to in ('q', 'other'):
        with pytest.raises(Unstorable) as caught:
            send(connection, 'body', to, headers={'x': value})
        clear(caught.value)
    publish(connection, 'next')
    assert [item['message']['body'] for item in items(client)] == ['"next"']


def test_odd_dates_priorities_and_expirations_block_no_message(
    connect: Callable[..., Connection], client: Client
) -> None:
    connection = connect()
    values = json_values() | st.sampled_from(
        [LONG_AGO, FAR, '5', '-5', '0', '1e9', 'NaN', str(10**400), '9' * 30, 10**400, b'5']
    )
    count = 0

    @given(values, values, values)
    def each(priority: Any, expiration: Any, eta: Any) -> None:
        nonlocal count
        try:
            send(connection, 'body', priority=priority, expiration=expiration, headers={'eta': eta})
        except CouchDBError as exc:
            clear(exc)
        else:
            count += 1

    each()
    assert count > 5
    stored = items(client)
    assert len(stored) == count
    assert not [reason for item in stored if (reason := validation.malformed_reason(item))]
    publish(connection, 'last')
    inbox = Inbox(connect(), prefetch=3)
    inbox.drain_until(lambda: any(message.body == b'"last"' for message in inbox.messages), 'the last message')
    now = client.clock.now()
    wait_for(
        lambda: all(item['date'] and item['date'] > now for item in items(client)),
        'all due messages to be delivered or deleted',
    )
