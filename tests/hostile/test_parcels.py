"""Hostile documents in a database of parcels: each is refused with a reason, and the others are moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_couchdb.parcels import mover as module
from celery_couchdb.parcels.mover import Mover
from kombu_couchdb.couchdb.client import Client
from tests.support import items, leave_leaf

from .documents import BROKER
from .parcels import GOOD, MESSAGE, check_refusals, store


def test_hostile_messages_are_refused_and_the_others_are_moved(
    mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    check_refusals(parcels, 'p:', mover().step)
    assert len(items(client)) == 3


def test_huge_parcels(
    mover: Callable[[], Mover], client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, '_MAX_BODY_BYTES', 100_000)
    body = {'_attachments': {'body': {'content_type': 'text/plain', 'data': 'QUFB' * 40_000}}}
    headers = {**MESSAGE['headers'], 'note': 'x' * 3_000_000}
    store(parcels, [{**GOOD, **body, '_id': 'attached', 'message': {**MESSAGE, 'body': None}}])
    store(parcels, [{**GOOD, '_id': 'a', 'message': {**MESSAGE, 'headers': headers}}])
    mover().step()
    assert len(items(client)) == 1
    assert parcels.get('attached')['reason'] == 'its body is larger than 100,000 bytes'


def test_ids_of_the_brokers_documents(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    """The id of a message is derived from that of its parcel, so a parcel overwrites no document of the broker."""
    foreign = [doc['_id'] for doc in BROKER.values()] + ['p:eu:us:1', 'region:us', 'parcel:' + '0' * 32, 'once:x']
    store(client, [{'_id': doc_id} for doc_id in foreign])
    before = client.fetch(foreign)
    store(parcels, [{'_id': doc_id, 'task': 'add', 'args': [1, 2]} for doc_id in foreign])
    mover().step()
    assert client.fetch(foreign) == before
    assert len(items(client)) == len(foreign)


def test_parcels_with_conflicts_run_once(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    docs: list[dict[str, Any]] = [{'_id': 'a', 'task': 'add', 'args': [1, 2]}, {**GOOD, '_id': 'b'}]
    for doc in docs:
        for number in range(20):
            leave_leaf(parcels, doc['_id'], f'1-{number:032x}', **{**doc, 'published': float(number)})
    store(parcels, [{**GOOD, '_id': 'c'}])
    mover().step()
    assert len(items(client)) == 3
    assert [doc and doc['type'] for doc in parcels.find(['a', 'b', 'c'])] == ['Receipt', None, None]


def test_parcel_for_a_queue_that_is_not_for_publishers(
    mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    store(parcels, [{**GOOD, '_id': 'a', 'routing_key': 'celery@host.celery.pidbox'}, {**GOOD, '_id': 'b'}])
    mover().step()
    assert len(items(client)) == 1
    assert 'is not in task_queues' in parcels.get('a')['reason']
