"""A silent cluster node that the others do not know to be down: clients avoid requests that wait for it.

Measured on three nodes of CouchDB 3.5 after one was cut off: the other two respond to most requests. Two kinds of
requests hang for a minute, until the node is known to be down: a write in conflict, and `_bulk_get` of a document that
never existed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, states
from kombu import Connection

from celery_couchdb.backend import CouchDBBackend
from kombu_couchdb.couchdb.call import Call
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.server import Server
from kombu_couchdb.errors import Conflict, ServerUnavailable
from tests.support import Inbox, items, publish


class SilentNode:
    """Simulates a silent node for the clients of one database."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
        #: Whether the node is silent.
        self.silent = False
        #: The requests that would hang on a cluster.
        self.unanswered: list[tuple[str, str | None]] = []
        #: Returns whether the response to a write of a document is lost; called until it returns true once.
        self.lose: Callable[[Document], bool] | None = None
        send = Server.send

        def altered(server: Server, call: Call, connections: Any) -> Any:
            if not connections[0].url.endswith(f'/{database}'):
                return send(server, call, connections)
            try:
                response = send(server, call, connections)
            except Conflict as exc:
                raise self._no_answer(call) if self.silent else exc from exc
            if self.lose is not None and any(self.lose(doc) for doc in _written(call)):
                self.lose = None
                self.silent = True
                raise ServerUnavailable('no answer within the time limit')
            if self.silent and _waits_for_all(call.path, response):
                raise self._no_answer(call)
            return response

        monkeypatch.setattr(Server, 'send', altered)

    def _no_answer(self, call: Call) -> ServerUnavailable:
        self.unanswered.append((call.method, call.path))
        return ServerUnavailable('no answer within the time limit')


def _written(call: Call) -> list[Document]:
    if call.method == 'GET' or call.path == '/_bulk_get' or call.body is None:
        return []
    sent = json.loads(call.body)
    docs: list[Document] = sent.get('docs', [sent])
    return docs


def _waits_for_all(path: str | None, response: Any) -> bool:
    if path == '/_bulk_docs':
        return any(answer.get('error') == 'conflict' for answer in response.json())
    return path == '/_bulk_get' and any(
        (leaf.get('error') or {}).get('reason') == 'missing'  # the embedded server has no such response
        for result in response.json()['results']
        for leaf in result['docs']
    )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, database: str, client: Client) -> SilentNode:
    return SilentNode(monkeypatch, database)


def is_ack(doc: Document) -> bool:
    return bool(doc.get('_deleted')) and len(doc['_id']) >= 30


def is_heartbeat(doc: Document) -> bool:
    return doc.get('type') == 'Consumer'


def is_claim(doc: Document) -> bool:
    return bool(doc.get('claimed'))


@pytest.mark.parametrize('lost', [is_ack, is_heartbeat, is_claim])
def test_consumer_continues_after_a_lost_response(
    node: SilentNode,
    connect: Callable[..., Connection],
    client: Client,
    lost: Callable[[Document], bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox = Inbox(connect(visibility_timeout=3.0))
    publish(connect(), 'before')
    inbox.wait(1)
    inbox.drain_until(lambda: not items(client), 'the first ack')
    node.lose = lost
    publisher = connect()
    publish(publisher, 'meanwhile')
    assert inbox.wait(2) == ['before', 'meanwhile']
    inbox.drain_until(lambda: node.silent, 'the response to be lost')
    publish(publisher, 'after')
    assert inbox.wait(3) == ['before', 'meanwhile', 'after']
    inbox.drain_until(lambda: not items(client), 'the last ack')
    assert node.unanswered == []
    assert not [record for record in caplog.records if 'lost its lease' in record.message]


def test_new_connection_sends_no_request_that_hangs(node: SilentNode, connect: Callable[..., Connection]) -> None:
    first = Inbox(connect())
    publish(connect(), 'before')
    first.wait(1)
    first.connection.release()
    node.silent = True
    publish(connect(), 'meanwhile')
    assert Inbox(connect()).wait(1) == ['meanwhile']
    assert node.unanswered == []


def test_result_whose_response_was_lost(node: SilentNode, url: str) -> None:
    backend: CouchDBBackend = Celery('silent', set_as_current=False, broker='memory://', backend=url).backend
    node.lose = lambda doc: doc.get('type') == 'Result'
    backend.mark_as_done('a', 1)
    assert node.silent
    backend.mark_as_done('b', 2)
    assert [backend.get_state(task) for task in 'abc'] == [states.SUCCESS, states.SUCCESS, states.PENDING]
    assert node.unanswered == []
