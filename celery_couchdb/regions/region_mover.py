"""The mover of a region. One worker, the leader of the region, publishes the messages that arrive from other regions.

As the mover of parcels does, it stores each message under an id that is derived from the parcel's id, if that was never
stored, and then deletes the parcel. CouchDB replicates the deletion to the region that sent the parcel.

The leader also lends messages to other regions, says how many the own region wants (`lending`), and withdraws parcels
that another region has not taken in time (`Fallbacks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import exactly, members, number, text
from kombu_couchdb.documents.types import Document
from kombu_couchdb.log import get_logger
from kombu_couchdb.options import Options
from kombu_couchdb.parcels import parcel
from kombu_couchdb.parcels.parcel import Parcel
from kombu_couchdb.regions import region

from ..parcels.mover import Batch, Mover, attached_body
from ..parcels.parcel_checks import ParcelRefused, message_of
from ..parcels.receipts import write
from .lending import Activity, Demand, Lender, Looks

logger = get_logger(__name__)

#: The maximum number of parcels that are withdrawn together.
_BATCH_DOCS = 20

#: The pause after a batch with documents that cannot be read or were deleted, because the view may be behind.
_PAUSE_SECONDS = 5.0

_ROW = members(id=text, key=exactly(text, number))


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
            region.REGIONS, 'traffic', startkey=[0, self.region], endkey=[0, self.region, {}], **arguments
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


class Fallbacks:
    """Withdraws parcels that their region has not taken in time: their tasks run in another region.

    The message is first stored for the other region, under an id that is derived from the parcel's id, and then the
    parcel is deleted. So a message is not stored twice there if the worker is killed in between. But a region that is
    cut off may have published the message already: then the task runs in both regions.
    """

    def __init__(
        self,
        regions: Client,
        own: str,
        others: Collection[str],
        publish: Callable[[Sequence[Document]], int],
    ) -> None:
        """Use `publish` for parcels that are to run in this region: it publishes their messages and deletes them."""
        self._regions, self._own, self._others, self._publish = regions, own, others, publish
        self._due = inf  # by the server's clock

    @property
    def next_at(self) -> float:
        """The monotonic time at which the next parcel is withdrawn; infinite if there is none."""
        return time.monotonic() + max(0.0, self._due - self._regions.clock.now())

    def read(self) -> None:
        """Read when the next parcel is withdrawn; one request."""
        rows = self._rows({}, limit=1)
        self._due = rows[0][1] if rows else inf

    def step(self) -> None:
        """Withdraw some of the parcels that are due; no request if there are none."""
        now = self._regions.clock.now()
        if now < self._due:
            return
        ids = [doc_id for doc_id, _ in self._rows(now, limit=_BATCH_DOCS)]
        docs = [doc for doc in self._regions.fetch(ids) if doc and isinstance(doc.get('fallback'), str)]
        for doc in docs:
            logger.warning('parcel %s was not taken in time: its task runs in %s', doc['_id'], doc['fallback'])
        self._publish([doc for doc in docs if doc['fallback'] == self._own])
        self._redirect([doc for doc in docs if doc['fallback'] != self._own])
        self.read()
        self._due = max(self._due, now + _PAUSE_SECONDS if len(docs) < len(ids) else 0.0)

    def _rows(self, until: object, **arguments: int) -> list[tuple[str, float]]:
        """Return the ids of parcels and when they are withdrawn, the next one first."""
        rows = self._regions.view(
            region.REGIONS, 'fallbacks', _ROW, startkey=[self._own], endkey=[self._own, until], **arguments
        )
        return [(row['id'], float(row['key'][1])) for row in rows]

    def _redirect(self, docs: Sequence[Document]) -> None:
        """Replace parcels by parcels to their other regions; refuse malformed ones."""
        new, reasons = dict[str, Parcel](), dict[str, str]()  # by the id of the parcel that is replaced
        for doc in docs:
            try:
                new[doc['_id']] = self._parcel_of(doc)
            except (ParcelRefused, ValueError) as exc:
                reasons[doc['_id']] = str(exc)
        for doc_id, result in zip(new, self._regions.create_once([*new.values()]), strict=True):
            if not result.is_stored:
                reasons[doc_id] = result.reason
        now = self._regions.clock.now()
        write(
            self._regions,
            [parcel.refused(doc, reasons[doc['_id']], now) if doc['_id'] in reasons else deletion(doc) for doc in docs],
        )

    def _parcel_of(self, doc: Document) -> Parcel:
        """Return the parcel to the other region. *Raises* `ParcelRefused` or `ValueError` for a malformed one."""
        if doc['fallback'] not in self._others:
            raise ParcelRefused(f'fallback {doc["fallback"]!r:.80} is not one of the regions')
        body = attached_body(self._regions, doc)
        message_of(doc, body)
        message = parcel.with_body(doc['message'], body)
        # The region to which the parcel was sent can write it, too, so any member may be missing or malformed.
        published = doc['published'] if number(doc.get('published')) else 0.0
        found = parcel.new(message, doc.get('exchange') or '', doc.get('routing_key') or '', published)
        tag = doc['_id'].split(':', 3)[3]
        return {**found, '_id': region.parcel_id(doc['fallback'], self._own, tag)}
