"""A database of parcels for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery import Celery
from kombu import Connection

from celery_couchdb.parcels.mover import Mover
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client, Document


@contextmanager
def database_of_parcels(server: Server, *members: str) -> Iterator[Client]:
    """Provide an administrator's client for a new database of parcels, which is set up for these members."""
    with server.fresh_database() as name:
        client = server.client(name)
        for step in plan(Wanted(client, [design.receipts(), design.parcels()], members), {}):
            if step.do:
                step.do()
        yield client
        client.close()


def receipt_of(parcels: Client, doc_id: str) -> Document:
    """Return a receipt that tells how its task ended; an empty document if there is none yet."""
    doc = parcels.get_or_none(doc_id)
    return doc if doc and doc.get('type') == 'Receipt' and 'done' in doc else {}


def store_nested(client: Client, doc_id: str, levels: int) -> None:
    """Store a parcel that is nested in so many levels. The embedded server refuses it."""
    kwargs = '{"a":' * levels + '1' + '}' * levels
    client.put({'_id': doc_id}, text=f'{{"_id":"{doc_id}","task":"add","kwargs":{kwargs}}}'.encode())


@contextmanager
def movers(app: Celery) -> Iterator[Callable[[], Mover]]:
    """Provide a function that returns movers, each with a connection of its own."""
    made: list[tuple[Connection, Mover]] = []

    def make() -> Mover:
        connection = app.connection_for_write()
        made.append((connection, Mover(app, connection.connection, lambda: None)))
        return made[-1][1]

    yield make
    for connection, one in made:
        one.close()
        connection.release()
