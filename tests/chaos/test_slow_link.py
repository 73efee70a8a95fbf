"""Large messages over a slow link, which needs much longer for them than the time limit of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import validation, workitem
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import wait_for
from tests.support import Inbox, items, publish, publish_many, release_all

from .link import Link

#: Time limits of a request in seconds, and the rate of the link in bytes a second: a megabyte takes longer than the
#: limit.
LIMITS = {'request_timeout': 2.0, 'connect_timeout': 2.0}
RATE = 400_000

#: The number of messages, and the characters of each.
COUNT, SIZE = 40, 100_000


@pytest.fixture
def link(server: Server) -> Iterator[Link]:
    with Link(server.host, server.port, RATE) as link:
        yield link


@pytest.fixture
def slow(server: Server, client: Client, database: str, link: Link) -> Iterator[Callable[..., Connection]]:
    """A function that connects to the test's database over the link; its arguments are transport options."""
    opened: list[Connection] = []

    def slow(**options: Any) -> Connection:
        url = server.couchdb_url(database).replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{link.port}/')
        opened.append(Connection(url, transport_options={**LIMITS, **options}))
        return opened[-1]

    yield slow
    release_all(opened)


def text(number: int) -> str:
    return f'{number:05d}' * (SIZE // 5)


def test_large_message_is_published_despite_the_time_limit(
    connect: Callable[..., Connection], slow: Callable[..., Connection]
) -> None:
    connection, body = slow(), 'x' * 3_000_000

    def published() -> bool:
        try:
            publish(connection, body)
        except ServerUnavailable:
            return False  # the machine stalled for two seconds: try again
        return True

    wait_for(published, 'the message to be published')
    assert Inbox(connect()).wait(1)[0] == body


def test_large_messages_are_downloaded_only_once(
    connect: Callable[..., Connection], slow: Callable[..., Connection], link: Link, client: Client
) -> None:
    publish_many(connect(), [text(number) for number in range(COUNT)])
    inbox = Inbox(slow())
    assert sorted(inbox.wait(COUNT)) == [text(number) for number in range(COUNT)]
    wait_for(lambda: not items(client), 'all messages to be acknowledged')
    inbox.stays(COUNT, 0.5)
    assert link.down.passed + link.up.passed < 2.0 * COUNT * SIZE


@pytest.mark.parametrize('attached', [True, False], ids=['attached', 'inline'])
def test_large_messages_of_an_expired_consumer_are_redelivered(
    connect: Callable[..., Connection], slow: Callable[..., Connection], client: Client, attached: bool
) -> None:
    """The bodies of unique jobs, and of messages of earlier versions, are in the documents instead of attachments."""
    publish_many(connect(), [text(number) for number in range(COUNT)])
    for doc in items(client):
        if not attached:
            body = client.content(f'/{doc["_id"]}/body', {'rev': doc['_rev']}, SIZE + 2).decode()
            doc = {
                **{name: value for name, value in doc.items() if name != '_attachments'},
                'message': {**doc['message'], 'body': body},
            }
        client.put(workitem.claim(validation.checked(doc), 'broker:consumer:gone', 0.0))
    inbox = Inbox(slow())
    assert sorted(inbox.wait(COUNT)) == [text(number) for number in range(COUNT)]
    assert all(message.delivery_info['redelivered'] for message in inbox.messages)
    wait_for(lambda: not items(client), 'all messages to be acknowledged')


def test_stopped_consumer_releases_messages_that_it_has_not_downloaded(
    connect: Callable[..., Connection], slow: Callable[..., Connection], client: Client
) -> None:
    publish_many(connect(), [text(number) for number in range(COUNT)])
    connection = slow()
    inbox = Inbox(connection, ack=False)
    inbox.wait(1)
    seen = [message.payload for message in inbox.messages]
    connection.release()
    assert all(workitem.is_waiting(doc) for doc in items(client))
    assert sum(doc['attempts'] for doc in items(client)) <= len(inbox.messages)
    assert sorted(Inbox(connect()).wait(COUNT)) == [text(number) for number in range(COUNT)]
    assert set(seen) <= {text(number) for number in range(COUNT)}
