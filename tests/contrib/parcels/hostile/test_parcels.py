"""Hostile documents in a database of parcels: each is refused with a reason, and the others are moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from celery_couchdb.contrib.parcels.mover import Mover
from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.hostile.documents import BROKER
from tests.hostile.parcels import GOOD, MESSAGE, check_refusals, store
from tests.parcels import settle
from tests.support import items, leave_leaf


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_hostile_messages_are_refused_and_the_others_are_moved(
    mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    check_refusals(parcels, 'p:', partial(settle, mover()))
    assert len(items(client)) == 3


def test_huge_parcels(
    mover: Callable[[], Mover], client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('kombu_couchdb.contrib.parcels.parcel.MAX_BODY_BYTES', 100_000)
    body = {'_attachments': {'body': {'content_type': 'text/plain', 'data': 'QUFB' * 40_000}}}
    headers = {**MESSAGE['headers'], 'note': 'x' * 3_000_000}
    store(parcels, [{**GOOD, **body, '_id': 'attached', 'message': {**MESSAGE, 'body': None}}])
    store(parcels, [{**GOOD, '_id': 'a', 'message': {**MESSAGE, 'headers': headers}}])
    settle(mover())
    assert len(items(client)) == 1
    assert parcels.get('attached')['reason'] == 'its body is larger than 100,000 bytes'


def test_ids_of_the_brokers_documents(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    """The id of a message is derived from that of its parcel, so a parcel overwrites no document of the broker."""
    foreign = [doc['_id'] for doc in BROKER.values()] + ['p:eu:us:1', 'region:us', 'parcel:' + '0' * 32, 'once:x']
    store(client, [{'_id': doc_id} for doc_id in foreign])
    before = client.fetch(foreign)
    store(parcels, [{'_id': doc_id, 'task': 'add', 'args': [1, 2]} for doc_id in foreign])
    settle(mover())
    assert client.fetch(foreign) == before
    assert len(items(client)) == len(foreign)


def test_parcels_with_conflicts_run_once(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    docs: list[dict[str, Any]] = [{'_id': 'a', 'task': 'add', 'args': [1, 2]}, {**GOOD, '_id': 'b'}]
    for doc in docs:
        for number in range(20):
            leave_leaf(parcels, doc['_id'], f'1-{number:032x}', **{**doc, 'published': float(number)})
    store(parcels, [{**GOOD, '_id': 'c'}])
    one = mover()

    def moved() -> bool:
        settle(one)  # each leaf that is deleted uncovers another one
        return [doc and doc['type'] for doc in parcels.find(['a', 'b', 'c'])] == ['Receipt', None, None]

    wait_for(moved, 'the end of all leaves')
    assert len(items(client)) == 3


def test_parcel_for_a_queue_that_is_not_for_publishers(
    mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    store(parcels, [{**GOOD, '_id': 'a', 'routing_key': 'celery@host.celery.pidbox'}, {**GOOD, '_id': 'b'}])
    settle(mover())
    assert len(items(client)) == 1
    assert 'is not in task_queues' in parcels.get('a')['reason']


def test_sender_of_many_parcels_does_not_delay_the_others(
    mover: Callable[[], Mover], client: Client, parcels: Client, stack: ExitStack
) -> None:
    """A device writes 500 parcels, which claim to be old. Another one writes one."""
    for name, count in (('busy', 500), ('idle', 1)):
        device = client.beside(f'{parcels.address.database}-{name}')
        device.create()
        stack.callback(device.delete)
        members = {'task': 'add', 'args': [1, 2], 'published': -1e300}
        store(device, [{'_id': f'{name}-{n:04}', 'id': f'{name}-{n:04}', **members} for n in range(count)])
        database = device.address.database
        store(
            client, [{'_id': f'broker:device:{name}', 'type': 'Device', 'name': name, 'database': database, 'date': 1}]
        )
    one = mover()
    one.step()
    moved = [item['message']['headers']['id'] for item in items(client)]
    assert 'idle-0000' in moved
    assert len(moved) < 250
    settle(one)
    assert len(items(client)) == 501


def test_forged_receipts_run_nothing_and_stop_nobody(
    mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    wrong: list[Any] = [None, 5, 'x', [], {}, [['x']], -1e300, 1e300, True]
    names = ('id', 'task', 'kept_until', 'state', 'done', 'moved', 'result', 'status', 'message')
    forged = [{'type': 'Receipt', 'task': 'add', 'id': 'x', name: value} for name in names for value in wrong]
    store(parcels, [{**doc, '_id': f'forged-{n:03}'} for n, doc in enumerate(forged)])
    store(parcels, [{**GOOD, '_id': 'z'}])
    one = mover()
    settle(one)
    assert len(items(client)) == 1
