"""Lending: messages that may run in any region are moved from their home to regions that want them.

Each message is moved in three writes: its item becomes a LentItem, by revision, so that no consumer can claim it; the
parcel is stored under an id that is derived from the item's id and the region; the item is deleted. The next leader
finishes what a killed one has begun.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from kombu_couchdb import design
from kombu_couchdb.consumer import bodies
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.conflicts import SYNC
from kombu_couchdb.documents import validation, workitem
from kombu_couchdb.documents.body import stub
from kombu_couchdb.documents.types import Document
from kombu_couchdb.log import get_logger
from kombu_couchdb.parcels.parcel import Parcel
from kombu_couchdb.regions import lent, region, region_views

from .demand import waiting
from .message_checks import may_be_in_header
from .polling import Looks

logger = get_logger(__name__)

#: The maximum number of messages that are lent together, and of bytes of their bodies (but it is one message at least).
_BATCH_DOCS, _BATCH_BYTES = 100, 1_000_000

#: How many more messages are read: some cannot be lent.
_MORE_DOCS = 10

#: The shortest interval at which waiting messages are counted.
_LOOK_SECONDS = 1.0

#: Messages with a larger body are not lent.
_MAX_BODY_BYTES = 64_000_000


class Lender:
    """Lends messages of this region to other regions, for the leader."""

    def __init__(
        self,
        broker: Client,
        regions: Client,
        own: str,
        others: Sequence[str],
        lend_after: float,
        content: Collection[str],
        looks: Looks,
    ) -> None:
        """Lend messages that wait for `lend_after` seconds. `content` is the app's `accept_content`."""
        self._broker, self._regions, self._own, self._others = broker, regions, own, others
        self._lend_after, self._content, self._looks = lend_after, content, looks
        self.reset()

    def reset(self) -> None:
        """Forget everything: another process may have been the leader."""
        self._wants: dict[str, dict[str, int]] = {}  # by region and queue, what is not lent yet
        self._seen: dict[str, str] = {}  # by region, the revision of its document
        self._looks.reset()
        self._finish_at: float | None = 0.0

    @property
    def next_at(self) -> float:
        """The monotonic time of the next step; infinite if only a change makes one useful."""
        looks = self._looks.next_at if any(any(want.values()) for want in self._wants.values()) else float('inf')
        return looks if self._finish_at is None else min(looks, self._finish_at)

    def read_wants(self) -> None:
        """Read what the other regions want; one request. What a document asks for is lent once."""
        docs = self._regions.find([region.region_id(name) for name in self._others])
        for name, doc in zip(self._others, docs, strict=True):
            if doc is None:
                self._wants.pop(name, None)
            elif self._seen.get(name) != doc['_rev']:
                self._seen[name], self._wants[name] = doc['_rev'], region.wants_of(doc)
                self._looks.soon(0.0)

    def note_activity(self) -> None:
        """Note that a message may wait now: it can be lent `lend_after` seconds after it was published."""
        self._looks.soon(min(_LOOK_SECONDS, self._lend_after))

    def step(self) -> None:
        """Finish what was begun, and lend what other regions want, if it is time."""
        now = time.monotonic()
        if self._finish_at is not None and now >= self._finish_at:
            self._finish_at = now + SYNC
            if self._finish():
                self._finish_at = None
        if now >= self.next_at:
            self._looks.begin(max(_LOOK_SECONDS, self._lend_after))
            wanted = {queue for want in self._wants.values() for queue, count in want.items() if count}
            found = wanted & waiting(self._broker).keys()
            for queue in sorted(found):
                self._lend(queue)
            self._looks.end(found=bool(found))

    def _lend(self, queue: str) -> None:
        """Lend the messages of a queue that have waited longest."""
        left = {name: want[queue] for name, want in self._wants.items() if want.get(queue)}
        before, key = self._broker.clock.now() - self._lend_after, design.key_of(queue)
        rows = self._broker.view(
            region_views.LENDING,
            'lendable',
            startkey=[key],
            endkey=[key, before],
            limit=min(_BATCH_DOCS, 2 * sum(left.values()) + _MORE_DOCS),
            # The index is updated afterwards: a long queue delays nothing. Each document is read and checked.
            update='lazy',
        )
        prepared, size = list[tuple[Document, Parcel]](), 0
        for doc in self._broker.fetch([row['id'] for row in rows]):
            to = max(left, key=lambda name: left[name])
            if not left[to] or (prepared and size + (_size(doc) if doc else 0) > _BATCH_BYTES):
                break
            if doc and lent.is_lendable(doc, before) and (made := self._parcel_of(doc, to, is_marked=False)):
                left[to], size = left[to] - 1, size + _size(doc)
                prepared.append((doc, made))
        if prepared:
            self._move(prepared)

    def _move(self, prepared: Sequence[tuple[Document, Parcel]]) -> None:
        """Mark items as lent, and send those whose marks are proven."""
        now = self._broker.clock.now()
        destinations = [made['_id'].split(':')[1] for _, made in prepared]
        self._finish_at = time.monotonic() + SYNC  # if a request fails
        results = self._broker.bulk(
            [lent.made_of(doc, to, now) for (doc, _), to in zip(prepared, destinations, strict=True)]
        )
        marked = list[tuple[Document, Parcel]]()
        for (doc, made), to, result in zip(prepared, destinations, results, strict=True):
            if result.is_proven:
                self._wants[to][doc['queue']] -= 1
                marked.append(({**lent.made_of(doc, to, now), '_rev': result.rev}, made))
        self._send(marked)
        if not any(result.is_unproven for result in results):
            self._finish_at = None

    def _finish(self) -> bool:
        """Send the messages that a killed leader, or a failed request, has left; return whether none is left."""
        rows = self._broker.view(
            region_views.LENDING, 'lendable', startkey=[None], endkey=[None, {}], limit=_BATCH_DOCS
        )
        if not rows:
            return True
        settled = SYNC if self._broker.is_cluster() else 0.0
        now, found = self._broker.clock.now(), list[tuple[Document, Parcel]]()
        for leaves in self._broker.fetch_leaves([row['id'] for row in rows]):
            rivals = [leaf for leaf in leaves if not (leaf.get('_deleted') and leaf.get('void'))]
            is_settled = len(rivals) == 1 and _is_lent(doc := rivals[0]) and abs(now - doc['lent']) >= settled
            if is_settled and (made := self._parcel_of(doc, doc['region'], is_marked=True)):
                found.append((doc, made))
        self._send(found)
        return len(found) == len(rows) < _BATCH_DOCS

    def _send(self, lending: Sequence[tuple[Document, Parcel]]) -> None:
        """Store the parcels of LentItems, and delete the items; those that CouchDB refuses stay at home."""
        if not lending:
            return
        results = self._regions.create_once([made for _, made in lending])
        self._broker.bulk(
            [
                deletion(doc) if result.is_stored else lent.returned(doc)
                for (doc, _), result in zip(lending, results, strict=True)
            ]
        )
        for (doc, made), result in zip(lending, results, strict=True):
            if result.is_stored:
                logger.debug('message %s of queue %s was lent: parcel %s', doc['_id'], doc['queue'], made['_id'])
            else:
                logger.warning('message %s of queue %s cannot be lent: %s', doc['_id'], doc['queue'], result.reason)

    def _parcel_of(self, doc: Document, to: str, *, is_marked: bool) -> Parcel | None:
        """Return the parcel with the message of an item; None if it has to stay at home, or has no valid body.

        An item that is marked as lent must leave: its parcel may be stored already.
        """
        attachment = stub(doc)
        if attachment and not is_marked and attachment['length'] > _MAX_BODY_BYTES:
            return None
        body = bodies.read(self._broker, [doc])[0].content if attachment else None
        if attachment and body is None:
            return None
        if not is_marked and may_be_in_header(doc['message'], body, self._content):
            return None
        return lent.parcel_of(doc, self._own, to, body, self._broker.clock.now())


def _is_lent(doc: Mapping[str, object]) -> bool:
    return doc.get('type') == 'LentItem' and isinstance(doc.get('lent'), (int, float)) and validation.flaw(doc) is None


def _size(doc: Document) -> int:
    attachment = stub(doc)
    return int(attachment['length']) if attachment else workitem.size(doc)
