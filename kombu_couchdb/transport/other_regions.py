"""Messages for other regions: a connection stores them as parcels in the database of regions of its own region.

So a region that cannot be reached does not disturb the publisher. CouchDB replicates the parcel, and a worker of the
other region publishes the message there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..couchdb.client import Client
from ..documents import lent, parcel, region
from ..documents.types import Parcel
from ..errors import ConfigurationError
from ..log import get_logger
from ..options import Options
from ..queues.store import Store

logger = get_logger(__name__)


class OtherRegions:
    """Makes parcels of the messages of a connection for other regions, and stores them."""

    def __init__(self, options: Options, couchdb: Client) -> None:
        self.own, self._regions, self._couchdb = options.region, options.regions or {}, couchdb
        self._store: Store | None = None

    def parcels_of(self, message: Mapping[str, Any], exchange: str, routing_key: str) -> tuple[Any, list[Parcel]]:
        """Return a message as it is published, and the parcel of a message that is published in another region.

        *Raises* `ConfigurationError` if the message names an unknown region.
        """
        name, plain = region.route(message)
        fallback = region.fallback(message['properties'], name, self._regions)
        if name is None or name == self.own:
            return plain, []
        if name == region.ANY and self.own:
            if lent.may_be_lent(plain['headers']):
                plain['properties']['region'] = region.ANY
            return plain, []
        if not isinstance(name, str) or name not in self._regions:
            raise ConfigurationError(
                f'region {name!r:.80} is unknown; transport option regions has: '
                f'{", ".join(sorted(self._regions)) or "no regions"}'
            )
        assert self.own, 'options are checked'
        if not isinstance(plain['headers'].get('task'), str):
            raise ConfigurationError('only tasks can be published in another region')
        plain['headers'].setdefault(region.FROM_REGION, self.own)
        doc = parcel.new(plain, exchange, routing_key, self._couchdb.clock.now())
        doc['_id'] = region.parcel_id(name, self.own, message['properties']['delivery_tag'])
        if fallback:
            doc['fallback'], doc['fallback_at'] = fallback[0], doc['published'] + fallback[1]
        return plain, [doc]

    def store(self, docs: Sequence[Parcel], *, again: bool = False) -> None:
        """Store parcels; *raises* what `Store.publish` raises. `again` says that they may be stored already."""
        if self._store is None:
            self._store = Store(self._couchdb.beside(region.database(self._regions, str(self.own))))
        store_parcels(self._store, docs, again=again)

    def close(self) -> None:
        """Close the idle connections."""
        if self._store is not None:
            self._store.close()


def store_parcels(store: Store, docs: Sequence[Parcel], *, again: bool) -> None:
    """Store parcels; *raises* what `Store.publish` raises. `again` says that they may be stored already."""
    store.publish(store.unpublished(docs) if again else docs)
    for doc in docs:
        logger.debug('published message %s as a parcel', doc['_id'])
