"""Consumers: tags, shares of a queue, and the number of messages claimed ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import amqp
import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client
from tests.conftest import PATIENCE, wait_for
from tests.support import Inbox, Request, items, publish, publish_many, run_python

from .conftest import Connect


def drain(connection: Connection, until: Callable[[], bool]) -> None:
    """Drain events until `condition()` is true."""

    def drained() -> bool:
        try:
            connection.drain_events(timeout=0.2)
        except TimeoutError:
            pass
        return until()

    wait_for(drained)


def claimed(client: Client) -> int:
    return sum(item['claimed'] is not None for item in items(client))


# -- consumer tags


def test_each_consumer_without_a_tag_gets_its_own(connection: Connection, client: Client) -> None:
    channel, got = connection.channel(), Counter[str]()

    def consume(name: str) -> str:
        tag: str = channel.basic_consume('q', True, lambda message: got.update([name]), '')
        return tag

    tags = [consume(name) for name in 'ab']
    assert len(set(tags)) == 2
    assert all(tag.startswith('amq.ctag-') for tag in tags)
    publish_many(connection, range(20))
    drain(connection, lambda: got.total() == 20)
    assert got == {'a': 10, 'b': 10}
    channel.basic_cancel(tags[0])
    publish(connection, 'for the other')
    drain(connection, lambda: got.total() == 21)
    assert got == {'a': 10, 'b': 11}


def test_duplicate_tag_on_one_channel(connection: Connection, client: Client) -> None:
    channel, got = connection.channel(), list[Any]()
    channel.basic_consume('q', True, got.append, 'tag')
    with pytest.raises(amqp.NotAllowed):
        channel.basic_consume('r', True, got.append, 'tag')
    publish(connection, 'the first goes on')
    drain(connection, lambda: bool(got))
    channel.basic_cancel('tag')
    assert channel.basic_consume('r', True, got.append, 'tag') == 'tag'


# -- without acknowledgements


def test_prefetch_count_holds_for_no_ack(connect: Connect, client: Client) -> None:
    publish_many(connect(), range(30))
    inbox = Inbox(connect(), no_ack=True, prefetch=1)
    wait_for(lambda: claimed(client) == 1, 'the first claim')
    inbox.wait(1)
    wait_for(lambda: len(items(client)) == 29 and claimed(client) == 1, 'the ack and the next claim')
    assert inbox.wait(30) == list(range(30))
    wait_for(lambda: not items(client), 'the acks')


KILLED = """
import os, sys, kombu, kombu_couchdb
with kombu.Connection(sys.argv[1] if len(sys.argv) > 1 else os.environ['URL'],
                      transport_options={'visibility_timeout': 4, 'request_timeout': 3.9,
                                         'connect_timeout': 3.9}) as connection:
    channel = connection.channel()
    channel.basic_qos(0, 10, False)
    with kombu.Consumer(channel, [kombu.Queue('q')], no_ack=True, on_message=lambda message: os._exit(9)):
        while True:
            if len(connection.transport._mailbox) == 10:
                connection.drain_events()
"""


def test_killed_no_ack_consumer_loses_no_undelivered_message(url: str, connect: Connect, client: Client) -> None:
    publish_many(connect(), range(10))
    assert run_python(KILLED, check=False, URL=url).returncode == 9
    inbox = Inbox(connect(visibility_timeout=3))
    drain(inbox.connection, lambda: not items(client))
    # The first message was delivered before the kill, and may not be deleted yet.
    assert set(range(1, 10)) <= set(inbox.bodies)


# -- without a prefetch limit


def test_fast_consumer_claims_more_messages_ahead(connect: Connect, client: Client, sent: list[Request]) -> None:
    publish_many(connect(), range(300))
    inbox = Inbox(connect())
    assert sorted(inbox.wait(300)) == list(range(300))
    wait_for(lambda: not items(client), 'the acks')
    assert max(sum(bool(doc.get('claimed')) for doc in request.docs) for request in sent) > 32


def test_second_consumer_of_a_queue_that_was_declared_again(connection: Connection, client: Client) -> None:
    """Each channel has its own demand: the second one gets messages although the first one wants none."""
    first, second = (connection.SimpleQueue(name, channel=connection.channel()) for name in 'ab')
    for simple in (first, second):
        simple.put('hello')
        simple.put('again')
    for simple in (first, second, second, first):
        simple.get(timeout=PATIENCE).ack()
    for simple in (first, second):
        simple.close()
    wait_for(lambda: not items(client), 'the acks')


def test_consumer_with_credit_for_one_queue_follows_its_changes(
    connect: Connect, client: Client, sent: list[Request]
) -> None:
    """Also while the messages of another queue wait, of another channel without credit: more than one page of them."""
    publisher, connection, got = connect(), connect(), list[Any]()
    publish_many(publisher, range(200), to='busy')
    for queue, count in (('busy', 1), ('free', 10)):
        channel = connection.channel()
        channel.basic_qos(0, count, False)
        channel.basic_consume(queue, False, got.append, queue)
    drain(connection, lambda: len(got) == 1)
    publish(publisher, 'hello', to='free')
    drain(connection, lambda: len(got) == 2)
    sent.clear()
    publish(publisher, 'again', to='free')  # the feed reports it, and is asked again

    def follows() -> bool:
        return any(request.path.startswith('/_changes') and 'free' in str(request.body) for request in sent)

    drain(connection, follows)
