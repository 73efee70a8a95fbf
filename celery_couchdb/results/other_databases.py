"""Documents that nobody replaces: next tasks in the broker's database, and results in other databases on its server.

Results in other databases are those that return to other regions, see `celery_couchdb.contrib.regions`. Those that are
stored at the same time for the same region are one document, with the documents of all in its member `together`.
The documents of an optional room that writes them into others, as receipts are, it stores itself (`Room.complete`).
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.http import encoded
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError, DatabaseMissing
from kombu_couchdb.log import get_logger

from ..room import Room
from ..rooms import rooms
from .queue_item import QueueItem, Refusal

logger = get_logger(__name__)

#: The maximum size of several results in one document, in bytes.
_MAX_BYTES = 500_000


def write_new(client: Client, batch: Sequence[QueueItem]) -> list[Refusal]:
    """Store new documents in the database of `client`, in one request, and return those that CouchDB refuses.

    What an earlier attempt has stored is not stored again: a worker may have taken and deleted it meanwhile. *Raises*
    the errors of `kombu_couchdb.errors` for an outage.
    """
    by_id = {item.id: item for item in batch}
    try:
        results = client.create_once([item.head for item in batch], texts=[item.text for item in batch])
    except (AccessDenied, ConfigurationError) as exc:
        return [(item, exc) for item in batch]
    for result in results:
        if not result.is_refused:
            logger.debug('stored %s in %s', result.id, client.address.database)
    return [(by_id[result.id], result.exception(client.address.url)) for result in results if result.is_refused]


class OtherDatabases:
    """The databases beside the broker's in which workers store results."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._clients: dict[str, Client] = {}

    def write(self, database: str, batch: Sequence[QueueItem]) -> list[Refusal]:
        """Store results as `write_new` does. If the database does not exist, all are refused: nobody creates it.

        If it may accept them later, because somebody has changed its rights for example, they wait in the broker's
        database, where the reader of the other one finds them.
        """
        for room in rooms():
            if completing := [item for item in batch if item.head['type'] == room.completed_type]:
                self._complete(room, database, completing)
                batch = [item for item in batch if item not in completing]
        refusals = self._write(database, batch) if batch else []
        waiting = [item for item, error in refusals if isinstance(error, AccessDenied)]
        if not waiting:
            return refusals
        refused = {item.id for item, _ in write_new(self._client(''), waiting)}
        text = '%s refuses the result of %s, which waits in the database of the broker'
        for item in waiting:
            logger.warning(text, database, item.head.get('task'))
        return [(item, error) for item, error in refusals if item not in waiting or item.id in refused]

    def _complete(self, room: Room, database: str, batch: Sequence[QueueItem]) -> None:
        """Let a room store its documents. *Raises* an error only if the server does not respond.

        One database that fails must not keep the results of all tasks from being stored.
        """
        docs = [json.loads(item.text) for item in batch]
        for _ in range(2):  # the first failure may be a connection that was cut
            try:
                room.complete(self._client(database), docs)
                return
            except (AccessDenied, ConfigurationError, DatabaseMissing) as exc:
                reason = str(exc)
                break
            except CouchDBError as exc:
                reason = str(exc)
                self._client(database).welcome()  # it raises if the server does not respond
        logger.warning('%s cannot be written in %s, and is left as it is: %s', room.completed_type, database, reason)

    def _write(self, database: str, batch: Sequence[QueueItem]) -> list[Refusal]:
        groups = {joined.id: (joined, items) for joined, items in _together(batch)}
        try:
            client = self._client(database)
            refusals = write_new(client, [joined for joined, _ in groups.values()])
            one_by_one = [item for joined, _ in refusals for item in groups[joined.id][1] if item is not joined]
            alone = [(joined, error) for joined, error in refusals if groups[joined.id][1] == [joined]]
            return alone + (write_new(client, one_by_one) if one_by_one else [])
        except (ConfigurationError, DatabaseMissing) as exc:
            return [(item, exc) for item in batch]

    def close(self) -> None:
        """Close the idle connections."""
        for client in self._clients.values():
            client.close()

    def _client(self, database: str) -> Client:
        """Return the client for a database; '' is that of the broker."""
        if (client := self._clients.get(database)) is None:
            with self._app.connection_for_write() as connection:  # does not connect
                if connection.transport.driver_type != 'couchdb':
                    raise ConfigurationError(
                        f'the database {database} is beside that of the broker, which is not CouchDB'
                    )
                broker = connection.transport.couchdb
                client = self._clients[database] = broker.beside(database or broker.address.database)
        return client


def _together(batch: Sequence[QueueItem]) -> Iterator[tuple[QueueItem, list[QueueItem]]]:
    """Yield the documents to store, each with the results in it: one result, or several for the same region.

    The id of a document is made of all ids in it. So it is known whether an earlier attempt has stored exactly these.
    """
    by_region = defaultdict[str, list[list[QueueItem]]](list)
    for item in batch:
        groups = by_region[_region_of(item)]
        if not groups or sum(other.size for other in groups[-1]) + item.size > _MAX_BYTES:
            groups.append([])
        groups[-1].append(item)
    for group in itertools.chain.from_iterable(by_region.values()):
        yield (group[0] if len(group) == 1 else _joined(group)), group


def _joined(group: Sequence[QueueItem]) -> QueueItem:
    names = sha256('\n'.join(item.id for item in group).encode()).hexdigest()[:32]
    head = {'_id': f'{_region_of(group[0])}:{len(group)}:{names}', 'type': group[0].head['type']}
    text = encoded(head)[:-1] + b',"together":[' + b','.join(item.text for item in group) + b']}'
    return QueueItem(head, text, database=group[0].database)


def _region_of(item: QueueItem) -> str:
    """Return the beginning of an id, `r:<region>`: see `kombu_couchdb.contrib.regions.region`."""
    return ':'.join(item.id.split(':')[:2])
