"""Late requests: a copy of each write that a program has sent reaches CouchDB when everything is over.

The network, a proxy or a silent node of a cluster may keep a request for a long time and then deliver it. It must not
change anything: in the worst case, a message that was completed would run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_couchdb.contrib.beat import Schedules
from kombu_couchdb.admin import dead, jobs, queues
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.errors import Conflict
from tests.support import Inbox, Request, eta, items, publish, record_requests

from .conftest import Connect

#: The types of documents that a late request may make anew. A consumer that has ended has no claims any more, and a
#: sweep deletes its heartbeat. A queue, a binding or an exchange that is declared late exists, as in every broker.
HARMLESS = {'Consumer', 'Queue', 'Binding', 'Exchange'}


TASK: dict[str, Any] = {'headers': {'id': 'a-task', 'task': 'add'}}


def job(task_id: str, key: str = 'k') -> dict[str, Any]:
    return {'headers': {'id': task_id, 'task': 'report', 'job_key': key}}


def complete(connection: Connection, client: Client, *queue_names: str) -> None:
    """Receive and acknowledge all messages."""
    inbox = Inbox(connection, *queue_names)
    inbox.drain_until(lambda: not items(client), 'all messages to be completed')


def complete_one(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **TASK)
    complete(connect(), client)


def complete_a_large_one(connect: Connect, client: Client) -> None:
    publish(connect(), 'x' * 50_000, **TASK)
    complete(connect(), client)


def complete_one_of_each_queue(connect: Connect, client: Client) -> None:
    connection, topics = connect(), Exchange('topics', type='topic')
    bound = [Queue(name, topics, routing_key='#') for name in 'ab']
    connection.Producer().publish('a', exchange=topics, routing_key='x', declare=bound, serializer='json')
    complete(connect(), client, 'a', 'b')


def complete_an_idempotent_one(connect: Connect, client: Client) -> None:
    with idempotent('due at noon'):
        publish(connect(), 'a', **TASK)
    complete(connect(), client)


def requeue_and_complete(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **TASK)
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.messages[0].requeue()
    inbox.wait(2)
    inbox.messages[1].ack()
    inbox.drain_until(lambda: not items(client), 'the ack')


def reject_replay_and_complete(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **TASK)
    reject_one(connect(), client)
    assert len(dead.replay(client, items(client))[0]) == 1
    complete(connect(), client)


def reject_and_drop(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **TASK)
    reject_one(connect(), client)
    assert len(dead.drop(client, items(client))) == 1


def reject_one(connection: Connection, client: Client) -> None:
    inbox = Inbox(connection, ack=False)
    inbox.wait(1)
    inbox.messages[0].reject()
    inbox.drain_until(lambda: any(item.get('status') for item in items(client)), 'the dead letter')
    inbox.channel.close()


def purge_a_planned_one(connect: Connect, client: Client) -> None:
    connection = connect()
    publish(connection, 'a', headers={**TASK['headers'], **eta(3600)})
    assert connection.channel().queue_purge('q') == 1


def remove_one(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **TASK)
    assert jobs.remove(client, [items(client)[0]['_id']])


def complete_a_job(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **job('first'))
    complete(connect(), client)


def complete_a_job_again_and_again(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect())
    for name in ('first', 'second', 'third'):
        publish(connect(), 'a', **job(name))
        inbox.drain_until(lambda: not items(client), 'the job to be completed')
    assert len(inbox.messages) == 3


def complete_a_job_with_a_next_message(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect(), ack=False)
    publish(connect(), 'a', **job('first'))
    inbox.wait(1)
    publish(connect(), 'b', **job('second'))
    inbox.messages[0].ack()
    inbox.wait(2)
    inbox.messages[1].ack()
    inbox.drain_until(lambda: not items(client), 'both to be completed')


def complete_an_idempotent_job(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **job('before'))
    with idempotent('due at noon'):
        publish(connect(), 'a', **job('first'))
    complete(connect(), client)


def publish_over_a_dead_job(connect: Connect, client: Client) -> None:
    publish(connect(), 'a', **job('first'))
    reject_one(connect(), client)
    publish(connect(), 'b', **job('second'))
    complete_and_drop(connect, client)


def reject_a_job_with_a_next_message(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect(), ack=False)
    publish(connect(), 'a', **job('first'))
    inbox.wait(1)
    publish(connect(), 'b', **job('second'))
    inbox.messages[0].reject()
    inbox.wait(2)
    inbox.messages[1].ack()
    complete_and_drop(connect, client)


def complete_and_drop(connect: Connect, client: Client) -> None:
    inbox = Inbox(connect())
    inbox.drain_until(lambda: all(item.get('status') for item in items(client)), 'the other message to be completed')
    assert len(dead.drop(client, items(client))) == 1


def pause_and_resume(connect: Connect, client: Client) -> None:
    for _ in range(2):
        assert queues.pause(client, 'q')
        assert queues.resume(client, 'q')


@pytest.mark.parametrize(
    'life',
    [
        complete_one,
        complete_a_large_one,
        complete_one_of_each_queue,
        complete_an_idempotent_one,
        requeue_and_complete,
        reject_replay_and_complete,
        reject_and_drop,
        purge_a_planned_one,
        remove_one,
        complete_a_job,
        complete_a_job_again_and_again,
        complete_a_job_with_a_next_message,
        complete_an_idempotent_job,
        publish_over_a_dead_job,
        reject_a_job_with_a_next_message,
        pause_and_resume,
    ],
)
def test_late_copies_of_all_writes_change_nothing(
    connect: Connect, client: Client, sent: list[Request], life: Callable[[Connect, Client], None]
) -> None:
    life(connect, client)
    send_again(client, sent)


def test_schedule_entry_that_was_deleted_stays_deleted(app: Celery, client: Client, sent: list[Request]) -> None:
    schedules = Schedules(app)
    for _ in range(2):
        schedules.add('entry', 'add', {'every': 30})
        schedules.delete('entry')
    send_again(client, sent)


def test_late_broadcast_is_not_received_again(
    connect: Connect, client: Client, broadcasts: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, news = record_requests(monkeypatch, broadcasts.address.database), Exchange('news', type='fanout')
    inbox = Inbox(connect(), Queue('listener', news))
    connect().Producer().publish('a', exchange=news, declare=[news], serializer='json')
    inbox.wait(1)
    for row in broadcasts.id_range('', docs=True):
        if row['doc'].get('type') == 'Broadcast':
            broadcasts.bulk([{**row['doc'], '_deleted': True}])  # it has expired
    send_again(broadcasts, sent)


def send_again(client: Client, sent: list[Request]) -> None:
    """Send a copy of each write, the oldest first; fail the test if a document changes by it."""
    before = documents(client)
    writes = [request for request in sent if request.docs]
    assert writes
    for request in writes:
        try:
            client.request(request.method, request.path, body=request.body)
        except Conflict:
            pass
        assert documents(client) == before, f'the late copy of {request} changed a document'


def documents(client: Client) -> dict[str, str]:
    """Return the revisions of all documents that matter, by id."""
    rows = client.request('GET', '/_all_docs', {'include_docs': True})['rows']
    docs = [row['doc'] for row in rows if not row['id'].startswith('_design/')]
    return {doc['_id']: doc['_rev'] for doc in docs if doc.get('type') not in HARMLESS}
