"""Next tasks that a task has handed over: each is stored once, also if a request got no response."""

from __future__ import annotations

from celery_couchdb.results.queue_item import QueueItem
from celery_couchdb.results.result_queue import write_messages
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


def test_messages_are_stored_in_one_request(client: Client) -> None:
    batch = [message(client) for _ in range(3)]
    assert write_messages(client, batch, uncertain=False) == []
    assert [item['_id'] for item in items(client)] == [each.id for each in batch]


def test_message_that_was_stored_and_done_is_not_stored_again(client: Client) -> None:
    done, waiting, unsent = (message(client) for _ in range(3))
    assert write_messages(client, [done, waiting], uncertain=False) == []
    [found] = client.fetch([done.id])
    assert found is not None
    client.bulk([deletion(found)])
    assert write_messages(client, [done, waiting, unsent], uncertain=True) == []
    assert [item['_id'] for item in items(client)] == [waiting.id, unsent.id]


def test_message_keeps_its_content_on_its_way(client: Client) -> None:
    given = message(client, 'ünï')
    assert write_messages(client, [QueueItem.from_bytes(given.to_bytes())], uncertain=False) == []
    [item] = items(client)
    assert item['message']['body'] == 'ünï'
    assert item['attempts'] == 0
