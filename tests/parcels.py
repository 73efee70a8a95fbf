"""A database of parcels for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from celery import Celery
from kombu import Connection

from celery_couchdb.testing import Server
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.parcels.stored_parcels import Parcels
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import ServerUnavailable

if TYPE_CHECKING:
    from celery_couchdb.contrib.parcels.mover import Mover

AnyMover = TypeVar('AnyMover', bound='Mover')


@contextmanager
def database_of_parcels(server: Server, *members: str) -> Iterator[Client]:
    """Provide an administrator's client for a new database of parcels, which is set up for these members."""
    with server.fresh_database() as name:
        client = server.client(name)
        for step in plan(Wanted(client, parcel.design_documents(), members)):
            if step.do:
                step.do()
        yield client
        client.close()


def kill_between_writes(one: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mover publish the messages of parcels, and be killed before it deletes the parcels."""

    def killed(docs: Any) -> Any:
        raise ServerUnavailable('killed')

    monkeypatch.setattr(one._own.client, 'bulk', killed)
    with pytest.raises(ServerUnavailable):
        settle(one)


def settle(one: Mover) -> None:
    """Let a mover do all that is due."""
    while not one.step():
        pass


def waiting_in(client: Client) -> list[str]:
    """Return the ids of the parcels that wait in a database."""
    return [doc['_id'] for doc in Parcels(client).listing('waiting')]


def receipt_of(parcels: Client, doc_id: str) -> Document:
    """Return a receipt that tells how its task ended; an empty document if there is none yet."""
    doc = parcels.get_or_none(doc_id)
    return doc if doc and doc.get('type') == 'Receipt' and 'done' in doc else {}


def store_nested(client: Client, doc_id: str, levels: int, members: str = '"task":"add"') -> None:
    """Store a parcel that is nested in so many levels. The embedded server refuses it."""
    kwargs = '{"a":' * levels + '1' + '}' * levels
    client.put({'_id': doc_id}, text=f'{{"_id":"{doc_id}",{members},"kwargs":{kwargs}}}'.encode())


@contextmanager
def movers(kind: Callable[..., AnyMover]) -> Iterator[Callable[[Celery], AnyMover]]:
    """Provide a function that returns movers of the class `kind`, each with a connection of its own."""
    made: list[tuple[Connection, AnyMover]] = []

    def make(app: Celery) -> AnyMover:
        connection = app.connection_for_write()
        made.append((connection, kind(app, connection.connection, lambda: None)))
        return made[-1][1]

    yield make
    for connection, one in made:
        one.close()
        connection.release()
