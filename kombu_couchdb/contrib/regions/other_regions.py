"""Messages for other regions: a connection stores them as parcels in the database of regions of its own region.

So a region that cannot be reached does not disturb the publisher. A worker of the other region takes the parcel, and
publishes the message there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...couchdb.client import Client
from ...errors import ConfigurationError, Unstorable
from ...options import Options
from ...queues.store import Store
from ...room import Publisher
from ..parcels import parcel
from ..parcels.parcel import Parcel
from . import region

__all__ = ['OtherRegions']


class OtherRegions(Publisher):
    """Makes parcels of the messages of a connection for other regions, and stores them."""

    members, types = region.MEMBERS, frozenset({'Parcel'})

    def __init__(self, options: Options, couchdb: Client) -> None:
        self.own, self._regions, self._couchdb = options.region, options.regions or {}, couchdb
        self._store: Store | None = None

    def documents(
        self, message: Mapping[str, Any], exchange: str, routing_key: str
    ) -> tuple[dict[str, Any], list[Parcel]]:
        """Return a message as it is published, and the parcel of a message that is published in another region.

        *Raises* `ConfigurationError` if the message names an unknown region.
        """
        name, plain = region.route(message)
        fallback = region.fallback(message['properties'], name, self._regions)
        if name is None or name == self.own:
            return plain, []
        if name == region.ANY and self.own:
            if region.may_be_lent(plain['headers']):
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
        plain['headers'].setdefault(parcel.FROM_REGION, self.own)
        if not isinstance(plain['headers'].get('id'), str):
            raise ConfigurationError('a task for another region needs an id')
        if isinstance(plain['body'], str) and len(plain['body']) > parcel.MAX_BODY_BYTES:
            raise Unstorable(
                f'the body of the message has more than {parcel.MAX_BODY_BYTES:,} characters, too many for another '
                f'region'
            )
        doc = parcel.new(plain, exchange, routing_key, self._couchdb.clock.now())
        doc['_id'] = region.record_id(name, plain['headers']['id'], message['properties']['delivery_tag'])
        if fallback:
            doc['fallback'], doc['fallback_at'] = fallback[0], doc['published'] + fallback[1]
        return plain, [doc]

    def store(self, docs: Sequence[Any]) -> None:
        """Store parcels; *raises* what `Store.publish` raises."""
        if self._store is None:
            self._store = Store(self._couchdb.beside(region.database(self._regions, str(self.own))))
        self._store.publish(docs)

    def close(self) -> None:
        """Close the idle connections."""
        if self._store is not None:
            self._store.close()
