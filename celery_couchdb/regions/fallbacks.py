"""Fallbacks: parcels that their region has not taken in time run in another region.

The message is first stored for the other region, under an id that is derived from the parcel's id, and then the parcel
is deleted. So a message is not stored twice there if the worker is killed in between. But a region that is cut off may
have published the message already: then the task runs in both regions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import inf

from kombu_couchdb.consumer import bodies
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.shapes import exactly, members, number, text
from kombu_couchdb.documents.body import stub
from kombu_couchdb.documents.types import Document
from kombu_couchdb.log import get_logger
from kombu_couchdb.parcels import parcel
from kombu_couchdb.parcels.parcel import Parcel
from kombu_couchdb.regions import region, region_views

from ..parcels.parcel_checks import ParcelRefused
from ..parcels.receipts import write
from .message_checks import message_of

logger = get_logger(__name__)

#: The maximum number of parcels that are withdrawn together.
_BATCH_DOCS = 20

#: The pause after a batch with documents that cannot be read or were deleted, because the view may be behind.
_PAUSE_SECONDS = 5.0

_ROW = members(id=text, key=exactly(text, number))


class Fallbacks:
    """Withdraws parcels that this region has sent, when they are due. The leader uses it."""

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
            region_views.REGIONS, 'fallbacks', _ROW, startkey=[self._own], endkey=[self._own, until], **arguments
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
        body = bodies.read(self._regions, [doc])[0] if stub(doc) else None
        if body and body.content is None:
            raise ParcelRefused(body.reason)
        content = body.content if body else None
        message_of(doc, content)
        message = parcel.with_body(doc['message'], content)
        # The region to which the parcel was sent can write it, too, so any member may be missing or malformed.
        published = doc['published'] if number(doc.get('published')) else 0.0
        found = parcel.new(message, doc.get('exchange') or '', doc.get('routing_key') or '', published)
        tag = doc['_id'].split(':', 3)[3]
        return {**found, '_id': region.parcel_id(doc['fallback'], self._own, tag)}
