"""Hostile parcels in a database of regions: each is refused with a reason, and the parcels beside it arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from celery_couchdb.regions.ferry import Ferry
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from tests.hostile.documents import WORKITEM
from tests.regions import Regions, regions_on
from tests.support import items

MESSAGE = WORKITEM['message']

#: A parcel that arrives.
GOOD: dict[str, Any] = {
    'type': 'Parcel',
    'task': 'add',
    'id': 'task-1',
    'exchange': '',
    'routing_key': 'celery',
    'published': 1.0,
    'message': MESSAGE,
}

#: Members of malformed parcels, and a part of the reason.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    'no message': ({'message': None}, 'message'),
    'a message that is text': ({'message': 'x' * 100_000}, 'message'),
    'no properties': ({'message': {**MESSAGE, 'properties': None}}, 'properties'),
    'no headers': ({'message': {**MESSAGE, 'headers': []}}, 'headers'),
    'no task': ({'message': {**MESSAGE, 'headers': {'id': 'a'}}}, 'no task'),
    'a task that is a list': ({'message': {**MESSAGE, 'headers': {'id': 'a', 'task': ['add']}}}, 'no task'),
    'no body': ({'message': {**MESSAGE, 'body': None}}, 'body'),
    'a body that is a number': ({'message': {**MESSAGE, 'body': 7}}, 'body'),
    'not base64': (
        {'message': {**MESSAGE, 'body': '*', 'properties': {**MESSAGE['properties'], 'body_encoding': 'base64'}}},
        'cannot be read',
    ),
    'another encoding': (
        {'message': {**MESSAGE, 'properties': {**MESSAGE['properties'], 'body_encoding': 'rot13'}}},
        'rot13',
    ),
    'nested deeply': (
        {'message': {**MESSAGE, 'headers': {**MESSAGE['headers'], 'a': json.loads('[' * 150 + ']' * 150)}}},
        '',
    ),
    'an exchange without queues': ({'exchange': 'nowhere'}, 'no queue'),
    'an exchange that is a list': ({'exchange': ['']}, 'exchange'),
    'a long queue name': ({'routing_key': 'q' * 100_000}, 'routing key'),
    'a job key that is a list': (
        {'message': {**MESSAGE, 'headers': {**MESSAGE['headers'], 'job_key': ['a']}}},
        'job',
    ),
    'a concurrency limit that is text': (
        {'message': {**MESSAGE, 'headers': {**MESSAGE['headers'], 'concurrency_key': 'a', 'concurrency_limit': 'b'}}},
        'concurrency_limit',
    ),
}


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us') as regions:
        yield regions


@pytest.fixture
def ferry(regions: Regions) -> Iterator[Ferry]:
    with regions['eu'].app.connection_for_write() as connection:
        ferry = Ferry(regions['eu'].app, connection.connection, lambda: None)
        yield ferry
        ferry.close()


def store(client: Client, docs: list[dict[str, Any]]) -> None:
    assert all(result.is_stored for result in client.bulk(docs))


def waiting(client: Client) -> list[str]:
    return [row['id'] for row in client.id_range('p:', docs=True) if not row['doc'].get('status')]


def test_hostile_parcels_are_refused_and_the_others_arrive(regions: Regions, ferry: Ferry) -> None:
    eu = regions['eu']
    names = {f'p:eu:us:{n:03}': name for n, name in enumerate(HOSTILE)}
    store(eu.regions, [{**GOOD, **HOSTILE[name][0], '_id': doc_id} for doc_id, name in names.items()])
    store(eu.regions, [{**GOOD, '_id': f'p:eu:us:9{n}'} for n in range(3)])
    ferry.step()
    assert waiting(eu.regions) == []
    assert len(items(eu.broker)) == 3
    for doc, name in zip(eu.regions.fetch(list(names)), names.values(), strict=True):
        assert doc is not None, name
        assert doc['status'] == 'fail'
        assert HOSTILE[name][1] in doc['reason'], name


def test_foreign_ids_are_left_alone(regions: Regions, ferry: Ferry) -> None:
    eu = regions['eu']
    foreign = ['p:us:eu:1', 'p:eu', 'p:eu:us', 'p:', 'p:eus:us:1', 'q:eu:us:1', 'region:us', 'p:EU:us:1', 'p;eu;us;1']
    store(eu.regions, [{**GOOD, '_id': doc_id} for doc_id in foreign])
    before = eu.regions.fetch(foreign)
    ferry.step()
    assert eu.regions.fetch(foreign) == before
    assert items(eu.broker) == []


def test_sender_cannot_set_what_belongs_to_the_transport(regions: Regions, ferry: Ferry) -> None:
    eu = regions['eu']
    forged = {'delivery_tag': 'broker:consumer:x', 'delivery_info': {'exchange': 'celery.pidbox'}, 'priority': 99}
    store(
        eu.regions,
        [{**GOOD, '_id': 'p:eu:us:1', 'message': {**MESSAGE, 'properties': {**MESSAGE['properties'], **forged}}}],
    )
    ferry.step()
    [item] = items(eu.broker)
    assert item['_id'].startswith('parcel:')
    assert item['message']['properties']['delivery_info'] == {'exchange': '', 'routing_key': 'celery'}
    assert item['priority'] == 9


def test_parcel_with_many_conflicts_runs_once(regions: Regions, ferry: Ferry) -> None:
    eu = regions['eu']
    docs = [{**GOOD, '_id': 'p:eu:us:1', '_rev': f'1-{n:032x}', 'published': float(n)} for n in range(300)]
    eu.regions.request('POST', '/_bulk_docs', {}, {'docs': docs, 'new_edits': False})
    store(eu.regions, [{**GOOD, '_id': 'p:eu:us:2'}])
    ferry.step()
    assert len(items(eu.broker)) == 2
    assert waiting(eu.regions) == []
