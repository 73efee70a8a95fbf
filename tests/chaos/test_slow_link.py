"""Large messages over a link that takes much longer for them than the time limits of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import Server, wait_for
from tests.support import Inbox, items, publish, publish_many, release_all

from .link import Link

#: The time limits of a request, in seconds, and what the link passes on in a second, in bytes: no time limit fits a megabyte.
LIMITS = {'request_timeout': 2.0, 'connect_timeout': 2.0}
RATE = 400_000

#: So many messages of so many characters are sent.
COUNT, SIZE = 40, 100_000


@pytest.fixture
def link(server: Server) -> Iterator[Link]:
    with Link(server.host, server.port, RATE) as link:
        yield link


@pytest.fixture
def slow(server: Server, client: Client, database: str, link: Link) -> Iterator[Callable[..., Connection]]:
    """Returns a function that connects to the test's database over the link; its arguments are transport options."""
    opened: list[Connection] = []

    def slow(**options: Any) -> Connection:
        url = server.couchdb_url(database).replace(f'@{server.host}:{server.port}/', f'@127.0.0.1:{link.port}/')
        opened.append(Connection(url, transport_options={**LIMITS, **options}))
        return opened[-1]

    yield slow
    release_all(opened)


def text(number: int) -> str:
    return f'{number:05d}' * (SIZE // 5)


def test_publish_takes_as_long_as_its_size_asks_for(
    connect: Callable[..., Connection], slow: Callable[..., Connection]
) -> None:
    connection, body = slow(), 'x' * 3_000_000

    def published() -> bool:
        try:
            publish(connection, body)
        except ServerUnavailable:
            return False  # a machine that stands still for two seconds; the next try is another one
        return True

    wait_for(published, 'the message to be published')
    assert Inbox(connect()).wait(1)[0] == body


def test_large_messages_are_delivered_and_read_once(
    connect: Callable[..., Connection], slow: Callable[..., Connection], link: Link, client: Client
) -> None:
    publish_many(connect(), [text(number) for number in range(COUNT)])
    inbox = Inbox(slow())
    assert sorted(inbox.wait(COUNT)) == [text(number) for number in range(COUNT)]
    wait_for(lambda: not items(client), 'all to be acknowledged')
    inbox.stays(COUNT, 0.5)
    assert link.down.passed + link.up.passed < 2.0 * COUNT * SIZE


@pytest.mark.parametrize('attached', [True, False], ids=['attached', 'inline'])
def test_what_a_dead_consumer_held_of_them_comes_back(
    connect: Callable[..., Connection], slow: Callable[..., Connection], client: Client, attached: bool
) -> None:
    """Those of earlier versions, and unique jobs, have their bodies in their documents."""
    publish_many(connect(), [text(number) for number in range(COUNT)])
    for doc in items(client):
        if not attached:
            body = client.content(f'/{doc["_id"]}/body', {'rev': doc['_rev']}, SIZE + 2).decode()
            doc = {
                **{name: value for name, value in doc.items() if name != '_attachments'},
                'message': {**doc['message'], 'body': body},
            }
        client.put(workitem.claim(doc, 'broker:consumer:gone', 0.0))
    inbox = Inbox(slow())
    assert sorted(inbox.wait(COUNT)) == [text(number) for number in range(COUNT)]
    assert all(message.delivery_info['redelivered'] for message in inbox.messages)
    wait_for(lambda: not items(client), 'all to be acknowledged')


def test_stopped_consumer_gives_back_what_it_has_not_read(
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
