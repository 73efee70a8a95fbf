"""Messages whose bodies are attachments, including attachments forged by others."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.jobs import Jobs
from kombu_couchdb import errors
from kombu_couchdb.admin import dead
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import body, workitem
from tests.conftest import wait_for
from tests.support import Inbox, Request, items, publish, publish_many, replace_in_clients

LARGE = body.MAX_INLINE + 100


def of(number: int, size: int = LARGE) -> str:
    return f'{number:05d}' + 'x' * size


def test_body_is_transferred_only_to_publish_and_to_deliver(
    connection: Connection, client: Client, sent: list[Request]
) -> None:
    publish(connection, of(1))
    [item] = items(client)
    assert item['message']['body'] is None
    assert item['_attachments']['body']['length'] == len(of(1)) + 2
    sent.clear()
    inbox = Inbox(connection, ack=False)
    assert inbox.wait(1) == [of(1)]
    inbox.messages[0].requeue()
    inbox.wait(2)
    inbox.messages[1].reject()
    [letter] = wait_for(lambda: list(dead.letters(client)), 'the dead letter')
    assert dead.replay(client, [letter]) == ([letter], {})
    assert inbox.wait(3) == [of(1)] * 3
    inbox.messages[2].ack()
    wait_for(lambda: not items(client), 'the ack')
    assert all(len(json.dumps(request.body)) < 5_000 for request in sent)


def test_text_and_bytes_survive_a_round_trip(connection: Connection) -> None:
    given = ['é€𝄞\x00' * LARGE, bytes(range(256)) * (LARGE // 128)]
    publish(connection, given[0])
    publish(connection, given[1], serializer=None, content_type='application/data', content_encoding='binary')
    inbox = Inbox(connection)
    assert inbox.wait(2)[0] == given[0]
    assert inbox.messages[1].body == given[1]


def test_body_larger_than_max_document_size(connection: Connection, client: Client) -> None:
    """CouchDB's `max_document_size` does not limit attachments."""
    publish(connection, 'x' * 9_000_000)
    inbox = Inbox(connection, ack=False)
    inbox.wait(1)
    inbox.messages[0].requeue()
    assert len(inbox.wait(2)[1]) == 9_000_000
    inbox.messages[1].reject()
    wait_for(lambda: dead.count(client), 'the dead letter')


@pytest.mark.parametrize('size', [LARGE, 80_000])
@pytest.mark.parametrize('no_ack', [False, True])
def test_many_are_delivered_in_order_with_few_requests(
    connection: Connection, client: Client, sent: list[Request], size: int, no_ack: bool
) -> None:
    publish_many(connection, [of(number, size) for number in range(40)])
    sent.clear()
    assert Inbox(connection, no_ack=no_ack).wait(40) == [of(number, size) for number in range(40)]
    reads = [request for request in sent if '/body' in str(request.path) or request.path == '/_bulk_get']
    assert len(reads) < (25 if size == LARGE else 55)
    wait_for(lambda: not items(client), 'the messages to be deleted')


@pytest.mark.parametrize('no_ack', [True, False])
def test_basic_get_of_a_large_message(connection: Connection, client: Client, no_ack: bool) -> None:
    publish(connection, of(1))
    channel = connection.channel()
    message = channel.basic_get('q', no_ack=no_ack)
    if not no_ack:
        message.requeue()
        message = wait_for(lambda: channel.basic_get('q'), 'the message to be released')
        message.ack()
    assert message.decode() == of(1)
    wait_for(lambda: not items(client), 'the message to be deleted')


def test_cancel_releases_messages_whose_bodies_were_not_read(
    connection: Connection, client: Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(self: Client, *args: Any) -> bytes:
        raise errors.ServerUnavailable('no answer within the time limit')

    publish_many(connection, [of(number, 70_000) for number in range(3)])
    replace_in_clients(monkeypatch, database, 'content', unavailable)
    inbox = Inbox(connection, prefetch=10)
    wait_for(lambda: all(workitem.claimant(doc) for doc in items(client)), 'the claims')
    inbox.consumer.cancel()
    wait_for(lambda: all(workitem.is_waiting(doc) for doc in items(client)), 'the release of the messages')
    assert [doc['attempts'] for doc in items(client)] == [0, 0, 0]
    assert (inbox.channel.credit.held, inbox.channel.credit.waiting) == (0, 0)


def test_only_a_unique_job_keeps_its_large_body_in_its_document(app: Celery, client: Client, report: Any) -> None:
    report.apply_async(['x' * LARGE], job_key='k')
    [item] = items(client)
    assert 'x' * LARGE in item['message']['body']
    assert '_attachments' not in item
    app.send_task('t', ['x' * LARGE])
    [large] = [doc for doc in items(client) if '_attachments' in doc]
    assert Jobs(app).decode(large)[0] == ['x' * LARGE]


#: Members of a forged item, by what is wrong with its attachment.
FORGERIES: dict[str, Callable[[Any], Document]] = {
    'named otherwise': lambda item: {'_attachments': {'other': item['_attachments']['body']}},
    'beside a body': lambda item: {'message': {**item['message'], 'body': '"forged"'}},
    'among others': lambda item: {'_attachments': {**item['_attachments'], 'x': item['_attachments']['body']}},
    'of a unique job': lambda item: {'_id': 'job:["q","t","k"]', 'key': 'k'},
    'of a unique job with others behind it': lambda item: {
        '_id': 'job:["q","t","l"]',
        'key': 'l',
        'status': 'fail',
        'reason': 'x',
        'failed': 1.0,
        'next': [{'_foo': 1, 'message': item['message'], 'attempts': 0}],
    },
    'empty': lambda item: {'_attachments': {'body': {'content_type': 'x/y', 'data': ''}}},
    'no text': lambda item: {
        '_attachments': {'body': {'content_type': 'x/y', 'data': b64encode(b'\xff').decode()}},
    },
    'in a message of bytes': lambda item: {
        'message': {**item['message'], 'properties': {**item['message']['properties'], 'body_encoding': 'rot13'}},
    },
    'missing': lambda item: {'_attachments': {}},
}


def test_forged_attachments_block_no_other_message(
    connection: Connection, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    content = {
        'body': '"' + 'x' * LARGE + '"',
        'headers': {'task': 't', 'id': 'i'},
        'content-type': 'application/json',
        'content-encoding': 'utf-8',
        'properties': {'delivery_tag': 'x', 'body_encoding': 'utf-8'},
    }
    item = workitem.new('forged', 'q', content, 1.0)
    client.bulk([{**item, '_id': name, **forge(item)} for name, forge in FORGERIES.items()])
    assert len(items(client)) == len(FORGERIES)
    inbox = Inbox(connection)
    publish(connection, 'plain')
    publish(connection, of(1))
    others = {b'"plain"', json.dumps(of(1)).encode()}
    inbox.drain_until(lambda: others <= {message.body for message in inbox.messages}, 'the other messages')
    # A forged message is delivered or becomes a dead letter.
    inbox.drain_until(lambda: all(doc.get('status') for doc in items(client)), 'the forged messages to leave the queue')
    dead.drop(client, list(dead.letters(client)))
    assert not [record for record in caplog.records if record.exc_info]
