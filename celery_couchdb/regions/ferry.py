"""The ferry of a region. One worker, the leader of the region, publishes the messages that arrive from other regions.

As the mover of parcels does, it stores each message under an id that is derived from the parcel's id, if that was never
stored, and then deletes the parcel. CouchDB replicates the deletion to the region that sent the parcel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu_couchdb import design
from kombu_couchdb.documents import region
from kombu_couchdb.documents.types import Document
from kombu_couchdb.options import Options

from ..parcels.mover import Mover
from .arrived import message_of

__all__ = ['Ferry']


class Ferry(Mover):
    """Publishes the messages that arrive from other regions. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    done_by_leader = 'this worker publishes what other regions send to %s from now on'

    def _place(self, options: Options) -> tuple[str, str, dict[str, Any]]:
        assert options.region, 'the thread is started only with this option'
        assert options.regions, 'the transport checks that'
        self.region, prefix = options.region, region.arriving(options.region)
        # `;` is the character after `:`. A tombstone has no members beside its id, so `status` does not exclude it.
        selector = {'_id': {'$gt': prefix, '$lt': f'{prefix[:-1]};'}, 'type': 'Parcel', 'status': {'$exists': False}}
        return f'region:{self.region}', region.database(options.regions, self.region), selector

    def _rows(self, **arguments: Any) -> Sequence[Any]:
        return self._client.view(
            design.REGIONS, 'traffic', startkey=[0, self.region], endkey=[0, self.region, {}], **arguments
        )

    def _has_receipts(self, options: Options) -> bool:
        return False

    def _is_waiting(self, doc: Document) -> bool:
        return not doc.get('status')  # whatever its type: the id says that it is a parcel

    def _publish(self, doc: Document) -> None:
        self._publish_message(doc, message_of)
