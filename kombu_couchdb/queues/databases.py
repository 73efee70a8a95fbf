"""The two databases of a broker: their creation, and what a process knows of the second one, the broadcasts database.

Each changes feed costs CouchDB 0.4 ms for each update of its database, so the feeds of many consumers on the broker's
database are expensive. Every consumer follows the broadcasts database instead, which rarely changes. It contains

* the broadcasts (see `fanout`),
* one Notice, which is overwritten when something was changed that every consumer has to know: pauses, limits, and
  bindings, queues and exchanges that others use,
* and Bells, by which consumers call others to a queue.

If it is missing or locked, broadcasts are stored in the broker's database, and every consumer follows that one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

from .. import design
from ..couchdb.client import Client, Document, Row
from ..couchdb.fork_safety import Shared
from ..documents.ids import BELL, BROADCAST, NOTICE, QUEUE
from ..errors import AccessDenied, BrokenAnswer, CouchDBError, DatabaseMissing, NotFound, access_denied
from ..log import get_logger
from ..outage import Outage

logger = get_logger(__name__)

T = TypeVar('T')

#: The most rows that are read when a connection is established.
MAX_SEEN_ROWS = 200
#: CouchDB's `_revs_limit`: how many revisions of a document it remembers. Heartbeats and broadcasts are written
#: repeatedly, and each would have 1,000 revisions without this.
REVS_LIMIT = 20

#: How long a missing or locked database is not used before a process tries again, in seconds: less than broadcasts are
#: kept, so that a consumer receives those that others have stored meanwhile.
LOOK_SECONDS = 10.0


def ensure(client: Client, create: bool, others: Collection[str] = ()) -> tuple[list[Row], str | None]:
    """Check that the database and its design document exist, in one request; if not, create them if `create` is true.

    Return exchanges, bindings and queues, the first `MAX_SEEN_ROWS` rows of `_all_docs` without documents. If it is a
    database of another kind, which has one of the design documents `others` instead, return its name, too; otherwise
    None. These names must sort after `design.NAME`.

    *Raises* `AccessDenied`, `DatabaseMissing`, `NotCouchDB`, `ServerUnavailable`.
    """
    wanted = f'_design/{design.NAME}'
    rows, missing = list[Row](), None
    try:
        rows = client.id_range(wanted, to=QUEUE, limit=MAX_SEEN_ROWS)
        other = next((name for name in others for row in rows if row['id'] == f'_design/{name}'), None)
        if other or (rows and rows[0]['id'] == wanted):
            return rows, other
    except BrokenAnswer:
        client.welcome()
        raise
    except (NotFound, DatabaseMissing) as exc:
        missing = exc
    client.welcome()
    if not create:
        raise DatabaseMissing(
            f'{client.address.url}: the database is not set up, and the transport option create_database is off'
        ) from missing
    try:
        client.create()
    except AccessDenied as exc:
        # A member of the database may not create databases, but the database may exist.
        if isinstance(exc.__context__, DatabaseMissing):
            raise
    try:
        for document in design.documents():
            client.try_put(document)  # in conflict, another process has stored the same
    except (AccessDenied, DatabaseMissing) as exc:
        raise access_denied(
            client.address.url,
            client.who,
            'set up the database',
            'let an administrator run "celery -A your_app couchdb setup" once',
        ) from exc
    _limit_revisions(client)
    return rows, None


def _limit_revisions(client: Client) -> None:
    with suppress(CouchDBError):  # without the rights of an administrator, and on the embedded server
        client.request('PUT', '/_revs_limit', body=REVS_LIMIT)


class BroadcastsDatabase:
    """The broadcasts database of one connection to the database `broker`.

    With `create` it is created if it is missing and the user has the right.
    """

    def __init__(self, broker: Client, *, create: bool = False) -> None:
        self.broker, self._create = broker, create
        self._outage = _outages.of((os.getpid(), broker.address.url), _new_outage)

    @cached_property
    def client(self) -> Client:
        """The client of this database."""
        return broadcasts_of(self.broker)

    @property
    def next_look(self) -> float:
        """The monotonic time from which on it is used, if it was missing or locked."""
        return self._outage.until

    def ask(self, request: Callable[[Client], T], *, create: bool = True) -> T | None:
        """Return `request(client)`, or None if the database is missing or locked.

        Without `create` a missing database is not created. *Raises* `ServerUnavailable`, and errors of single
        documents.
        """
        if time.monotonic() < self._outage.until:
            return None
        try:
            try:
                result = request(self.client)
            except DatabaseMissing:
                if not create:
                    return None
                if not self._create:
                    raise
                self._make()
                result = request(self.client)
        except (AccessDenied, DatabaseMissing) as exc:
            self._outage.failed(exc, least=LOOK_SECONDS)
            return None
        self._outage.recovered()
        return result

    def store(self, write: Callable[[Client], bool]) -> None:
        """Call `write(client)`, which returns True: for this database, or for the broker's if this one is unusable."""
        if not self.ask(write):
            write(self.broker)

    def stored(self) -> list[Document]:
        """Return all stored broadcasts, also those in the broker's database."""

        def read(client: Client) -> list[Document]:
            return [row['doc'] for row in client.id_range(BROADCAST, docs=True)]

        return (self.ask(read) or []) + read(self.broker)

    def notify(self) -> None:
        """Let all consumers read what is declared: it has changed, and the change is stored.

        An error is only logged: they read it from time to time anyway, the more rarely the more of them there are.
        """
        self._overwrite({'_id': NOTICE, 'type': 'Notice'})

    def ring(self, queue: str) -> None:
        """Call consumers to a queue: it has messages that nobody takes. An error is only logged."""
        self._overwrite({'_id': BELL + queue, 'type': 'Bell', 'queue': queue})

    def close(self) -> None:
        """Close idle connections."""
        if 'client' in self.__dict__:
            self.client.close()

    def _overwrite(self, doc: Mapping[str, Any]) -> None:
        def write(client: Client) -> None:
            stored = client.find([doc['_id']])[0]
            rev = {'_rev': stored['_rev']} if stored else {}
            # In conflict, another process has written the same after our change was stored: that suffices.
            client.try_put({**doc, **rev, 'date': client.clock.now()})

        try:
            self.ask(write, create=False)  # nobody follows a missing database
        except CouchDBError as exc:
            level = logging.WARNING if doc['_id'] == NOTICE else logging.DEBUG
            logger.log(
                level, 'consumers learn late of a change, because the document %s was not stored: %s', doc['_id'], exc
            )

    def _make(self) -> None:
        self.client.create()
        with suppress(CouchDBError):  # without rights to read them the new database is for administrators
            security = self.broker.request('GET', '/_security', repeat=True)
            self.client.request('PUT', '/_security', body=security)
        _limit_revisions(self.client)


def _new_outage() -> Outage:
    return Outage(
        logger,
        'the database of broadcasts cannot be used (%s), so every consumer follows the database of the broker, '
        'which costs CouchDB more with many workers; let an administrator run "celery -A your_app couchdb setup"',
        'the database of broadcasts is used again',
        level=logging.WARNING,
    )


#: What a process knows of a missing or locked database; its connections share it.
_outages: Shared[tuple[int, str], Outage] = Shared({})


def broadcasts_of(broker: Client) -> Client:
    """Return a client for the broadcasts database that belongs to the database `broker`."""
    return broker.beside(broadcasts_name(broker.address.database))


def broadcasts_name(database: str) -> str:
    """Return the name of the broadcasts database that belongs to a broker's database."""
    return f'{database}-broadcasts'
