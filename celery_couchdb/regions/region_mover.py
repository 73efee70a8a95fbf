"""The mover of a region. One worker, the leader of the region, publishes the messages that arrive from other regions.

As the mover of parcels does, it stores each message under an id that is derived from the parcel's id, if that was never
stored, and then deletes the parcel. CouchDB replicates the deletion to the region that sent the parcel.

The leader also lends messages to other regions (`lending`), says how many the own region wants (`demand`), and
withdraws parcels that another region has not taken in time (`fallbacks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kombu_couchdb.documents.types import Document
from kombu_couchdb.options import Options
from kombu_couchdb.regions import region, region_views

from ..parcels.inbox import Batch
from ..parcels.mover import Mover
from .demand import Demand
from .fallbacks import Fallbacks
from .lending import Lender
from .message_checks import message_of
from .polling import Activity, Looks


class RegionMover(Mover):
    """Publishes the messages that arrive from other regions. Use it in one thread.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    done_by_leader = 'this worker publishes what other regions send to %s from now on'

    def __init__(self, app: Any, transport: Any, wake: Callable[[], None], concurrency: int = 1) -> None:
        """Use the connected `transport`. The worker runs up to `concurrency` tasks at once."""
        super().__init__(app, transport, wake)
        options, broker = transport.options, transport.couchdb
        others = sorted({*options.regions} - {self.region})
        self._activity = Activity(broker, wake)
        self._wants = Demand(broker, self._client, self.region, concurrency, Looks(self._activity))
        self._lender = Lender(
            broker,
            self._client,
            self.region,
            others,
            options.lend_after,
            app.conf.accept_content,
            Looks(self._activity),
        )
        self._fallbacks = Fallbacks(self._client, self.region, others, self._move)
        self._changed = False

    def begin(self) -> None:
        """Forget what a former term of this process knew."""
        super().begin()
        self._wants.reset()
        self._lender.reset()

    def rest(self) -> float:
        """Follow nothing."""
        self._activity.pause()
        return super().rest()

    def work(self, *, stale: bool) -> float:
        """Publish, withdraw and lend what is due."""
        seconds = super().work(stale=stale)
        if self._changed:
            self._lender.read_wants()
            self._fallbacks.read()
            self._changed = False
        if self._activity.take():
            self._wants.note_activity()
            self._lender.note_activity()
        self._fallbacks.step()
        self._lender.step()
        self._wants.step()
        due = min(self._wants.next_at, self._lender.next_at, self._fallbacks.next_at)
        return min(seconds, due - time.monotonic())

    def close(self) -> None:
        """Release the lead to another process, and close the connections."""
        self._activity.close()
        super().close()

    def do_batch(self) -> Batch:
        """Publish or refuse the oldest parcels."""
        self._changed = True
        return super().do_batch()

    def do_these(self, ids: Sequence[str]) -> None:
        """Publish or refuse these parcels, or note that the others of these documents have changed."""
        arrived = [doc_id for doc_id in ids if doc_id.startswith(region.arriving(self.region))]
        self._changed |= len(arrived) < len(ids)
        if arrived:
            super().do_these(arrived)

    def _place(self, options: Options) -> tuple[str, str, dict[str, Any]]:
        assert options.region, 'the thread is started only with this option'
        assert options.regions, 'the transport checks that'
        self.region, prefix = options.region, region.arriving(options.region)
        # `;` is the character after `:`. A tombstone has no members beside its id, so `status` does not exclude it.
        selector = {
            '$or': [
                {
                    '_id': {'$gt': prefix, '$lt': f'{prefix[:-1]};'},
                    '_deleted': {'$exists': False},
                    'status': {'$exists': False},
                },
                {'_id': {'$gt': 'region:', '$lt': 'region;', '$ne': region.region_id(self.region)}, 'type': 'Region'},
                {'_id': {'$regex': f'^p:[^:]+:{self.region}:'}, 'fallback': {'$exists': True}},
            ]
        }
        return f'region:{self.region}', region.database(options.regions, self.region), selector

    def _rows(self, **arguments: Any) -> Sequence[Any]:
        return self._client.view(
            region_views.REGIONS, 'traffic', startkey=[0, self.region], endkey=[0, self.region, {}], **arguments
        )

    def _has_receipts(self, options: Options) -> bool:
        return False

    def _is_waiting(self, doc: Document) -> bool:
        return not doc.get('status')  # whatever its type: the id says that it is a parcel

    def _move(self, docs: Sequence[Document]) -> int:
        count = super()._move(docs)
        self._wants.note_arrived(sum(1 for doc in docs if doc.get('lent')))
        return count

    def _publish(self, doc: Document) -> None:
        self._publish_message(doc, message_of)
