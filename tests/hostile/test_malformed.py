"""Many malformed documents in one database: workers continue, and valid documents are processed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_couchdb.worker.expiry import sweep
from kombu_couchdb.couchdb.client import Client, chunks
from tests.conftest import PATIENCE
from tests.support import Inbox, items, publish

from .documents import BROKER, RESULTS
from .strategies import found, retyped

FOREIGN: list[dict[str, Any]] = [
    {'_id': 'invoice', 'total': 5},
    {'_id': 'type is a list', 'type': ['WorkItem']},
    {'_id': 'broker:', 'type': None},
    {'_id': 'celery-task-meta-', 'type': 'Result'},
    {'_id': 'job:', 'type': 'WorkItem'},
    {'_id': 'chord-unlock-', 'type': 'Chord'},
    {'_id': 'broker:consumer:', 'type': 'WorkItem', 'queue': 'q'},
    {'_id': '_design/other', 'views': {'all': {'map': 'function (doc) { emit(doc.nothing.at.all, null); }'}}},
    {'_id': '_design/celery-mine', 'language': 'query', 'views': {}},
]


def spoil(client: Client, kinds: dict[str, dict[str, Any]]) -> int:
    """Store malformed documents of these kinds, with ids that have the prefix of the kind; return their number."""
    malformed = [doc for kind in kinds.values() for doc in found(retyped(kind), 15)]
    docs = [{**doc, '_id': f'{doc["_id"]} {number}'} for number, doc in enumerate(malformed)]
    # Malformed documents with ids that are in use, too.
    used = ('broker:queue', 'broker:binding', 'chord-unlock', 'celery-task')
    docs += [doc for doc in malformed if doc['_id'].startswith(used)][:100:9]
    unique = {doc['_id']: doc for doc in [*docs, *FOREIGN]}
    # Bindings are stored valid and changed afterwards, because their first revision is not read again.
    bindings = [kind for kind in kinds.values() if kind['_id'] in unique and kind['_id'].startswith('broker:binding')]
    for result in client.bulk(bindings) if bindings else ():
        unique[result.id]['_rev'] = result.rev
    for part in chunks(list(unique.values()), 500):
        client.bulk(part)
    return len(unique)


def nothing_failed(caplog: pytest.LogCaptureFixture) -> None:
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


def test_consumer_continues_and_delivers(
    connect: Callable[..., Connection], client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect()
    connection.connect()
    assert spoil(client, BROKER) > 100
    topic, direct = Exchange('topic', type='topic'), Exchange('direct', type='direct')
    worker = connect(visibility_timeout=2.0)
    inbox = Inbox(
        worker,
        'q',
        Queue('bound', direct, routing_key='a'),
        Queue('topical', topic, routing_key='a.#'),
        Queue('short', max_length=100),
        Queue('fan', Exchange('fanout', type='fanout')),
    )
    producer = connection.Producer()
    caplog.set_level(logging.WARNING)

    def round_trip(text: str) -> None:
        publish(connection, text + ' straight')
        producer.publish(text + ' bound', exchange=direct, routing_key='a', serializer='json')
        producer.publish(text + ' topical', exchange=topic, routing_key='a.b', serializer='json')
        publish(connection, text + ' short', 'short')
        wanted = {f'{text} {kind}' for kind in ('straight', 'bound', 'topical', 'short')}
        inbox.drain_until(lambda: wanted <= {str(_text(message)) for message in inbox.messages}, f'{wanted}')

    round_trip('first')
    # All items are delivered or become dead letters, including those claimed by ended consumers.
    inbox.drain_until(
        lambda: (
            not [
                doc
                for doc in items(client)
                if doc.get('queue') == 'q' and not doc.get('status') and not isinstance(doc.get('claimed'), dict)
            ]
        ),
        'the queue to be empty',
    )
    round_trip('last')
    assert any(doc.get('status') == 'fail' and str(doc.get('reason')).startswith('malformed') for doc in items(client))
    channel = connection.channel()
    channel.queue_purge('q')
    for name in ('limited', 'bound'):
        channel.queue_delete(name)
    for name in ('direct', 'topic'):
        channel.exchange_delete(name)
    assert client.get('invoice')['total'] == 5
    nothing_failed(caplog)


def _text(message: Any) -> Any:
    try:
        return message.decode()
    except Exception:
        return None  # the content type is malformed


def test_results_are_stored_read_and_swept(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    backend = app.backend
    backend.store.database.set_up()
    backend.store_result('first', 1, 'SUCCESS')
    spoil(backend.client, RESULTS)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        unfinished = sweep(backend.store, backend.chords, lambda: False)
        backend.complete_unfinished_chords(unfinished)
    backend.store_result('second', 2, 'SUCCESS')
    assert [app.AsyncResult(task_id).get(timeout=PATIENCE) for task_id in ('first', 'second')] == [1, 2]
    assert backend.client.get('invoice')['total'] == 5
    nothing_failed(caplog)
