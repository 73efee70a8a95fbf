"""What an inbox returns: each document once at the start, then those that have changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from celery_couchdb.contrib.parcels import inbox
from celery_couchdb.contrib.parcels.inbox import Inbox
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.conflicts import SYNC
from tests.conftest import wait_for


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.fresh_database() as name:
        client = server.client(name)
        client.create()
        yield client
        client.close()


@pytest.fixture(params=[0.0, 0.01], ids=['followed', 'polled'])
def one(client: Client, request: pytest.FixtureRequest) -> Iterator[Inbox]:
    one = Inbox(client, lambda: None, 'p:', 'r:', poll=request.param)
    yield one
    one.close()


def put(client: Client, *names: str) -> None:
    client.bulk([{'_id': name} for name in names])


def test_all_are_read_although_those_before_are_deleted(
    client: Client, one: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, '_PAGE_IDS', 3)
    names = [f'{kind}:{number:02}' for kind in 'pr' for number in range(10)]
    put(client, *names, 'q:1', 'region:us', 'p;', 'P:1')
    found = list[str]()
    while one.next_at == 0.0:
        docs = [doc for doc in one.take(2).values() if doc]
        found += [doc['_id'] for doc in docs]
        client.bulk([deletion(doc) for doc in docs])
    assert found == names


def test_change_comes_before_the_backlog(client: Client, one: Inbox) -> None:
    put(client, 'p:1', 'p:2', 'p:3')
    assert list(one.take(1)) == ['p:1']
    one.put_back(['p:1'])
    assert list(one.take(1)) == ['p:1']
    put(client, 'q:1', 'r:1')
    wait_for(lambda: 'r:1' in one.take(9), 'the change')


def test_deleted_document_is_reported(client: Client, one: Inbox) -> None:
    put(client, 'r:1')
    assert list(one.take(9)) == ['r:1']
    client.bulk([deletion(client.get('r:1'))])
    assert wait_for(lambda: one.take(9), 'the deletion') == {'r:1': None}


def test_all_are_read_again_after_reset(client: Client, one: Inbox) -> None:
    put(client, 'p:1')
    for _ in range(2):
        assert list(one.take(9)) == ['p:1']
        assert one.take(9) == {}
        one.reset()


def test_cluster_is_read_once_more_when_its_nodes_have_synchronised(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that answers the first read may not have the document yet."""
    one = Inbox(client, lambda: None, 'p:')
    now = time.monotonic()
    learn = client.sequence

    def sequence() -> Any:
        found = learn()
        client.replicas = 3
        return found

    monkeypatch.setattr(client, 'sequence', sequence)
    monkeypatch.setattr('celery_couchdb.contrib.parcels.inbox.time.monotonic', lambda: now)
    put(client, 'p:1')
    assert list(one.take(9)) == ['p:1']
    assert one.take(9) == {}
    assert one.next_at == now + SYNC
    now += SYNC
    assert list(one.take(9)) == ['p:1']
    one.close()
