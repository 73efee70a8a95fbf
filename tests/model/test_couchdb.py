"""The model of CouchDB compared with a real server: the responses are the same, except for the digests of revisions."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb import errors
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.design.rows import WaitingRow
from kombu_couchdb.documents import workitem
from kombu_couchdb.queues import waiting
from kombu_couchdb.queues.databases import ensure
from kombu_couchdb.queues.store import Store

from .couchdb import CouchDB, ModelClient
from .world import QUEUE, START

Document = dict[str, Any]

REVISION = re.compile('[0-9]+-[0-9a-f]{32}')


def item(name: str, published: float, **more: Any) -> Document:
    message = {'body': '', 'headers': {}, 'properties': {}}
    return {**workitem.new(name, QUEUE, message, published), **more}


def consumer(name: str) -> Document:
    return {'_id': name, 'type': 'Consumer', 'expires': 5.0}


def generations(answer: Any) -> Any:
    """Return a response with each revision replaced by its generation."""
    if isinstance(answer, (WaitingRow, waiting.WaitingPage)):
        return generations(answer._asdict())
    if isinstance(answer, tuple):
        return generations(list(answer))
    if isinstance(answer, dict):
        return {name: generations(value) for name, value in answer.items() if name != 'reason'}
    if isinstance(answer, str) and REVISION.fullmatch(answer):
        return answer.partition('-')[0]
    return [generations(one) for one in answer] if isinstance(answer, list) else answer


def story(client: Client) -> list[Any]:
    """Send the requests of the protocol, and return all responses."""
    store, told = Store(client), list[Any]()

    def tell(ask: Callable[[], Any]) -> Any:
        try:
            answer = ask()
        except errors.CouchDBError as exc:
            answer = type(exc).__name__
        told.append(generations(answer))
        return answer

    tell(lambda: client.bulk([item('a', 1.0), item('b', 2.0, priority=5), item('c', 3.0, date=9e9), consumer('w')]))
    tell(lambda: list(store.each_ready(QUEUE, [10])))
    [page] = tell(lambda: waiting.read(client, [waiting.Ask(QUEUE, 1)], START))
    tell(lambda: waiting.read(client, [waiting.Ask(QUEUE, 2, page.last)], START))
    tell(lambda: store.planned([QUEUE], 1))
    tell(lambda: (store.size(QUEUE), store.exceeds(QUEUE, 2)))
    [a, b] = tell(lambda: client.fetch(['a', 'b']))
    claimed = [workitem.claim(doc, 'w', 4.0) for doc in (a, b)]
    tell(lambda: client.bulk(claimed))
    tell(lambda: client.bulk(claimed))  # again: a conflict with itself
    tell(lambda: store.leases())
    [claim_of_a, claim_of_b] = sorted(tell(lambda: list(store.claims('w'))), key=lambda doc: str(doc['_id']))
    tell(lambda: store.release([claim_of_b]))
    tell(lambda: client.bulk([workitem.deleted(claim_of_a)]))
    tell(lambda: client.bulk([workitem.deleted(claim_of_a)]))  # a conflict
    tell(lambda: client.fetch(['a', 'b', 'unknown']))
    tell(lambda: [client.leaves(name) for name in ('a', 'unknown')])
    tell(lambda: client.get('a'))
    tell(lambda: client.known(['a', 'unknown']))
    tell(lambda: client.put(item('b', 1.0)))  # a conflict: it exists
    tell(lambda: client.put(item('a', 7.0)).partition('-')[0])  # after its deletion
    tell(lambda: list(store.each_ready(QUEUE, [10])))
    for _ in range(2):  # the second one is a late copy
        tell(lambda: client.create_once([item('d', 1.0)]))
        tell(lambda: client.bulk([workitem.deleted(client.leaves('d')[0])]))
        tell(lambda: client.known_leaves('d'))
    tell(lambda: client.bulk([{**item('d', 1.0), '_rev': client.leaves('d')[0]['_rev']}]))  # a tombstone is no parent
    [tombstone] = client.leaves('d')
    for _ in range(2):
        tell(lambda: client.write_anew(item('d', 1.0), tombstone))
        tell(lambda: client.known_leaves('d'))
    tell(lambda: client.write_anew(item('e', 1.0), None))
    tell(lambda: client.id_range('w', docs=True))
    tell(client.is_cluster)
    return told


def test_responses_of_the_model_equal_those_of_the_server(client: Client, apache_couchdb: bool) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server does not return deleted leaf revisions')
    ensure(client, create=True)
    model = ModelClient(client.address)
    model.database, model.clock = CouchDB(1), SimpleNamespace(now=lambda: START)
    client.clock.now = lambda: START  # type: ignore[method-assign]
    for number, (modelled, answered) in enumerate(zip(story(model), story(client), strict=True)):
        assert modelled == answered, f'response {number}'
