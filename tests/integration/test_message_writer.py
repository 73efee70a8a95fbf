"""Next tasks that a task has handed over: each is stored once, also if a request got no response."""

from __future__ import annotations

from celery_couchdb.results.other_databases import write_new
from celery_couchdb.results.queue_item import QueueItem
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from tests.support import items


def message(client: Client, body: str = 'W10=') -> QueueItem:
    now = client.clock.now()
    content = {
        'body': body,
        'headers': {'id': 'a-task', 'task': 'add'},
        'properties': {'delivery_tag': 'tag', 'priority': 0},
        'content-type': 'application/json',
        'content-encoding': 'utf-8',
    }
    return QueueItem.of_message(workitem.new(workitem.new_id(now), 'celery', content, now))


def test_messages_are_stored_once_and_unchanged(client: Client) -> None:
    """The first request is repeated because it got no response; a consumer has completed one message since."""
    done, waiting, unsent = message(client), message(client, 'ünï'), message(client)
    batch = [done, QueueItem.from_bytes(waiting.to_bytes())]
    assert write_new(client, batch) == []
    client.bulk([deletion(client.get(done.id))])
    assert write_new(client, [*batch, unsent]) == []
    first, second = items(client)
    assert (first['_id'], second['_id']) == (waiting.id, unsent.id)
    assert (first['message']['body'], first['attempts']) == ('ünï', 0)
