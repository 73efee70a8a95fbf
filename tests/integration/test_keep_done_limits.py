"""Completed messages that are kept, of tasks with a concurrency limit or a rate: the slot is freed all the same."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.queues.store import Store
from tests.conftest import wait_for
from tests.support import Inbox, Request, items

from .conftest import Connect
from .test_concurrency_limits import limited, slots
from .test_keep_done import DAY, kept
from .test_rates import rated


def kept_ids(client: Client) -> list[str | None]:
    """Return the ids of the tasks whose messages are kept."""
    return [workitem.task_id(doc) for doc in kept(client)]


@pytest.mark.parametrize('more', [{}, rated()['headers']], ids=['slot', 'slot and rate'])
def test_one_request_keeps_the_message_and_frees_its_slot(
    app: Celery, connect: Connect, client: Client, sent: list[Request], more: dict[str, Any]
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


def test_message_that_waited_for_the_slot_of_a_kept_one(app: Celery, connect: Connect, client: Client) -> None:
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
