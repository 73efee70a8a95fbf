"""Documents that nobody replaces: next tasks in the broker's database, and results in other databases on its server.

Results in other databases are those that return to other regions, see `celery_couchdb.regions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, ConfigurationError, DatabaseMissing
from kombu_couchdb.log import get_logger

from .queue_item import QueueItem, Refusal

logger = get_logger(__name__)


def write_new(client: Client, batch: Sequence[QueueItem], *, uncertain: bool) -> list[Refusal]:
    """Store new documents in the database of `client`, in one request, and return those that CouchDB refuses.

    With `uncertain`, an earlier attempt got no response. What it stored is not stored again: a worker may have taken
    and deleted it meanwhile. *Raises* the errors of `kombu_couchdb.errors` for an outage.
    """
    by_id = {item.id: item for item in batch}
    heads = [item.head for item in batch]
    try:
        if uncertain:
            heads = client.never_stored(heads)
        results = client.bulk(heads, texts=[by_id[head['_id']].text for head in heads])
    except (AccessDenied, ConfigurationError) as exc:
        return [(item, exc) for item in batch]
    for result in results:
        if not result.is_refused:
            logger.debug('stored %s in %s', result.id, client.address.database)
    # A conflict means that an earlier attempt was stored.
    return [(by_id[result.id], result.exception(client.address.url)) for result in results if result.is_refused]


class OtherDatabases:
    """The databases beside the broker's in which workers store results."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._clients: dict[str, Client] = {}

    def write(self, database: str, batch: Sequence[QueueItem], *, uncertain: bool) -> list[Refusal]:
        """Store results as `write_new` does. If the database does not exist, all are refused: nobody creates it."""
        try:
            return write_new(self._client(database), batch, uncertain=uncertain)
        except (ConfigurationError, DatabaseMissing) as exc:
            return [(item, exc) for item in batch]

    def close(self) -> None:
        """Close the idle connections."""
        for client in self._clients.values():
            client.close()

    def _client(self, database: str) -> Client:
        if (client := self._clients.get(database)) is None:
            with self._app.connection_for_write() as connection:  # does not connect
                if connection.transport.driver_type != 'couchdb':
                    raise ConfigurationError(
                        f'the database {database} is beside that of the broker, which is not CouchDB'
                    )
                client = self._clients[database] = connection.transport.couchdb.beside(database)
        return client
