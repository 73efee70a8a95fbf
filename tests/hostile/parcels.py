"""Hostile parcels, for databases of publishers and for records in a database of regions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kombu_couchdb.couchdb.client import Client
from tests.hostile.documents import WORKITEM

__all__ = ['GOOD', 'HOSTILE', 'MESSAGE', 'check_refusals', 'store']

MESSAGE: dict[str, Any] = WORKITEM['message']

#: A parcel that is moved.
GOOD: dict[str, Any] = {
    'type': 'Parcel',
    'task': 'add',
    'id': 'task-1',
    'exchange': '',
    'routing_key': 'celery',
    'published': 1.0,
    'message': MESSAGE,
}

#: Members of malformed parcels, and a part of the reason. (The unit tests of parcels have those that a publisher's
#: message may contain.)
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    'no message': ({'message': None}, 'message'),
    'a message that is text': ({'message': 'x' * 100_000}, 'message'),
    'no properties': ({'message': {**MESSAGE, 'properties': None}}, 'properties'),
    'no task': ({'message': {**MESSAGE, 'headers': {'id': 'a'}}}, 'no task'),
    'an encoding that is a compression': ({'message': {**MESSAGE, 'content-encoding': 'bz2'}}, 'content-encoding must'),
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
}


def store(client: Client, docs: list[dict[str, Any]]) -> None:
    assert all(result.is_stored for result in client.bulk(docs))


def check_refusals(client: Client, prefix: str, step: Callable[[], object]) -> None:
    """Store hostile parcels and three good ones. `step` has to refuse the hostile ones, and to move the others."""
    names = {f'{prefix}{n:03}': name for n, name in enumerate(HOSTILE)}
    store(client, [{**GOOD, **HOSTILE[name][0], '_id': doc_id} for doc_id, name in names.items()])
    store(client, [{**GOOD, '_id': f'{prefix}9{n}'} for n in range(3)])
    step()
    assert [row['id'] for row in client.id_range(prefix, docs=True)] == list(names)
    for doc, name in zip(client.fetch(list(names)), names.values(), strict=True):
        assert doc is not None, name
        assert doc['status'] == 'refused', name
        assert HOSTILE[name][1] in doc['reason'], name
