"""Completed messages that are kept, of tasks with a concurrency limit or a rate: the slot is freed all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from chaos.proxy import Proxy
from kombu_couchdb.admin import jobs
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.queues.store import Store
from tests.conftest import wait_for
from tests.patience import PatientConnection
from tests.support import Inbox, Request, items

from .test_concurrency_limits import limited, slots
from .test_keep_done import DAY, kept
from .test_rates import document, now_due, rated


def kept_ids(client: Client) -> list[str | None]:
    """Return the ids of the tasks whose messages are kept."""
    return [workitem.task_id(doc) for doc in kept(client)]


@pytest.mark.parametrize('more', [{}, rated()['headers']], ids=['slot', 'slot and rate'])
def test_one_request_keeps_the_message_and_frees_its_slot(
    app: Celery, connect: Callable[..., Connection], client: Client, sent: list[Request], more: dict[str, Any]
) -> None:
    app.send_task('report', **limited(**more))
    [item] = items(client)
    inbox = Inbox(connect(keep_done=DAY), 'celery', ack=False)
    inbox.wait(1)
    assert slots(client) == ['slot:k:0']
    starts = [row['id'] for row in client.id_range('rate:')]
    assert starts == (['rate:k'] if more else [])
    del sent[:]
    inbox.messages[0].ack()
    wait_for(lambda: kept(client), 'the acknowledgement')
    [written] = [
        {doc['_id']: doc.get('status') or doc.get('_deleted') for doc in request.docs}
        for request in sent
        if any(doc.get('type') == 'DoneItem' for doc in request.docs)
    ]
    assert written == {item['_id']: 'done', 'slot:k:0': True}
    assert not any('rate:k' in str(request.body) for request in sent)
    assert not slots(client)


def test_message_that_waited_for_the_slot_of_a_kept_one(
    app: Celery, connect: Callable[..., Connection], client: Client
) -> None:
    ids = [app.send_task('report', **limited()).id for _ in range(3)]
    inbox = Inbox(connect(keep_done=DAY), 'celery', ack=False)
    for number in range(3):
        inbox.wait(number + 1)
        assert len(slots(client)) == 1
        inbox.messages[number].ack()
    wait_for(lambda: not items(client) and not slots(client), 'the last slot to be freed')
    assert sorted(map(str, kept_ids(client))) == sorted(ids)
    assert not any('parked' in doc for doc in kept(client))
    assert not Store(client).leases()['parked']


def test_message_that_waited_for_a_start_is_kept_and_starts_once(
    app: Celery, connect: Callable[..., Connection], client: Client
) -> None:
    ids = [app.send_task('report', **rated()).id for _ in range(2)]
    first = Inbox(connect(keep_done=DAY), 'celery')
    first.wait(1)
    first.drain_until(lambda: len(kept(client)) == 1 and Store(client).leases()['parked'], 'the other to be parked')
    now_due(client)
    second = Inbox(connect(keep_done=DAY, visibility_timeout=2), 'celery')
    second.wait(1)
    wait_for(lambda: not items(client), 'the second acknowledgement')
    assert sorted(map(str, kept_ids(client))) == sorted(ids)
    assert not any('parked' in doc for doc in kept(client))
    now_due(client)
    following = document(client)['next']
    Inbox(connect(visibility_timeout=2), 'celery').stays(0, 3.0)  # several sweeps
    assert document(client)['next'] == following  # nobody has taken a start for a message that is done


@pytest.mark.parametrize('removes', [True, False], ids=['removed', 'edited in the database'])
def test_acknowledgement_in_conflict_keeps_the_message_and_frees_its_slot(
    app: Celery, connect: Callable[..., Connection], client: Client, sent: list[Request], removes: bool
) -> None:
    """An operator has changed the document of a message that a worker holds, so its revision is another one."""
    first, second = (app.send_task('report', **limited()).id for _ in range(2))
    inbox = Inbox(connect(keep_done=DAY), 'celery', ack=False)
    inbox.wait(1)
    [held] = [doc for doc in items(client) if doc['claimed']]
    first, second = (first, second) if workitem.task_id(held) == first else (second, first)
    inbox.drain_until(lambda: any(doc.get('parked') for doc in items(client)), 'the other to be parked')
    if removes:
        assert len(jobs.remove(client, first).running) == 1
    else:
        client.put({**held, 'note': 'seen'})
    changed = client.get(held['_id'])
    del sent[:]
    inbox.messages[0].ack()
    assert [message.headers['id'] for message in inbox.messages] == [first]
    inbox.wait(2)
    wait_for(lambda: kept_ids(client) == [first], 'the message to be kept')
    tried = [doc['_rev'] for request in sent for doc in request.docs if doc.get('type') == 'DoneItem']
    assert tried == [held['_rev'], changed['_rev']]
    [done] = kept(client)
    assert {name: done.get(name) for name in ('removed', 'note')} == {
        name: changed.get(name) for name in ('removed', 'note')
    }
    inbox.messages[1].ack()
    wait_for(lambda: not items(client) and not slots(client), 'the second acknowledgement')
    assert sorted(map(str, kept_ids(client))) == sorted([first, second])


def test_acknowledgement_after_a_lost_lease_keeps_nothing_and_frees_no_slot(
    app: Celery, connect: Callable[..., Connection], client: Client, url: str
) -> None:
    """Another consumer has the message and its slot: only its own acknowledgement counts."""
    address, options = client.address, {'visibility_timeout': 2, 'keep_done': DAY}
    task_id = app.send_task('report', **limited()).id
    with Proxy(address.host, address.port) as proxy:
        behind = url.replace(f':{address.port}/', f':{proxy.port}/')
        with PatientConnection(behind, transport_options=options) as connection:
            channel = connection.channel()
            message = channel.basic_get('celery')
            unacked = channel.connection.unacked
            proxy.refuse()
            other = Inbox(connect(**options), 'celery', ack=False)
            other.wait(1)
            message.ack()
            assert unacked.writes.unstored
            proxy.restore()
            wait_for(lambda: not unacked.writes.unstored, 'the first consumer to drop its acknowledgement')
            [item] = items(client)
            assert (kept(client), slots(client)) == ([], ['slot:k:0'])
            other.messages[0].ack()
            wait_for(lambda: not items(client) and not slots(client), 'the acknowledgement of the other')
    [done] = kept(client)
    assert (workitem.task_id(done), done['consumer'], done['attempts']) == (task_id, item['claimed']['by'], 2)
