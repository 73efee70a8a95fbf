"""Large messages over a slow link, which needs much longer for them than the time limit of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import validation, workitem
from kombu_couchdb.errors import ServerUnavailable
from tests.chaos.proxy import Proxy
from tests.conftest import wait_for
from tests.support import Inbox, items, publish, publish_many, release_all

#: Time limits of a request in seconds, and the rate of the link in bytes a second.
LIMITS = {'request_timeout': 2.0, 'connect_timeout': 2.0}
RATE = 400_000

#: The number of messages, and the characters of each: all together take longer than the limit.
COUNT, SIZE = 20, 100_000


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.host, server.port, RATE) as proxy:
        yield proxy


@pytest.fixture
def slow(server: Server, client: Client, database: str, proxy: Proxy) -> Iterator[Callable[[], Connection]]:
    """A function that connects to the test's database over the link."""
    opened: list[Connection] = []

    def slow() -> Connection:
        url = server.couchdb_url(database).replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{proxy.port}/')
        opened.append(Connection(url, transport_options=LIMITS))
        return opened[-1]

    yield slow
    release_all(opened)


def text(number: int) -> str:
    return f'{number:05d}' * (SIZE // 5)


def test_large_message_is_published_despite_the_time_limit(
    connect: Callable[..., Connection], slow: Callable[..., Connection]
) -> None:
    connection, body = slow(), 'x' * 1_500_000

    def published() -> bool:
        try:
            publish(connection, body)
        except ServerUnavailable:
            return False  # the machine stalled for two seconds: try again
        return True

    wait_for(published, 'the message to be published')
    assert Inbox(connect()).wait(1)[0] == body


def test_large_messages_are_downloaded_only_once(
    connect: Callable[..., Connection], slow: Callable[..., Connection], proxy: Proxy, client: Client
) -> None:
    publish_many(connect(), [text(number) for number in range(COUNT)])
    inbox = Inbox(slow())
    assert sorted(inbox.wait(COUNT)) == [text(number) for number in range(COUNT)]
    wait_for(lambda: not items(client), 'all messages to be acknowledged')
    inbox.stays(COUNT, 0.5)
    assert proxy.passed < 2.0 * COUNT * SIZE


def test_large_messages_of_an_expired_consumer_are_redelivered(
    connect: Callable[..., Connection], slow: Callable[..., Connection], client: Client
) -> None:
    publish_many(connect(), [text(number) for number in range(COUNT)])
    for number, doc in enumerate(items(client)):
        if number % 2:  # the bodies of unique jobs are in the documents instead of attachments
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
