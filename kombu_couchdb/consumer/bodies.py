"""Reading the bodies that are attachments (see `body`): after the claim, in requests of bounded size, some each turn.

A large body is read alone, as the bytes it has: CouchDB 3.5 takes three times as long, and sends a third more, if it makes base64
of it (measured with 250 kB). Small ones share a request, which costs more than their bytes.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import errors
from ..couchdb.client import Client, Document, path_of
from ..couchdb.shapes import items, members, text
from ..documents.body import NAME, stub
from ..documents.reasons import malformed
from .delivery import Delivery
from .unacked import Unacked

__all__ = ['Bodies', 'Body', 'read']

#: The size from which on a body is read alone, in bytes.
_ALONE = 64_000

#: So often a body is tried to be read that the server refuses to give, or gives wrongly, while it answers other requests.
_TRIES, _WRONG = 10, (errors.BrokenAnswer, errors.RequestRefused)

_RESULT = members(id=text, docs=items(members()))


class Body(NamedTuple):
    """What an attachment has, or in one sentence why nobody will ever read it."""

    content: bytes | None
    reason: str = ''


class Bodies:
    """Reads the bodies of what one consumer has claimed; for the I/O thread alone."""

    def __init__(self, client: Client, unacked: Unacked) -> None:
        self._client, self._unacked = client, unacked
        #: How often a body could not be read, by delivery tag: it makes way for the others.
        self._failures: Counter[str] = Counter()

    def deliver_some(self) -> None:
        """Read bodies of about as many bytes as a request may have, and deliver their messages.

        *Raises* `ServerUnavailable`: what was not read stays held, and is tried again.
        """
        unread, size = self._unacked.unread(), 0
        if not unread:
            self._failures.clear()
        unread.sort(key=lambda delivery: self._failures[delivery.tag])
        while unread and (not size or size + _size(unread[0].doc) <= self._client.request_bytes):
            failed = self._failures[unread[0].tag]  # what failed together is tried alone
            count = 1 if failed else _shared([delivery.doc for delivery in unread], self._client.request_bytes - size)
            batch, unread = unread[:count], unread[count:]
            size += sum(_size(delivery.doc) for delivery in batch)
            for delivery, body in zip(batch, self._read(batch), strict=True):
                self._unacked.was_read(delivery, *body)

    def _read(self, batch: list[Delivery]) -> list[Body]:
        try:
            return read(self._client, [delivery.doc for delivery in batch])
        except errors.CouchDBError as exc:
            self._failures.update(delivery.tag for delivery in batch)
            if len(batch) == 1 and self._failures[batch[0].tag] > _TRIES and isinstance(exc, _WRONG):
                return [Body(None, malformed(f'the attachment with the body cannot be read ({exc})'))]
            raise


def read(client: Client, docs: Sequence[Document]) -> list[Body]:
    """Return the bodies that are attachments of documents, of these very revisions, in one request; see `Client` for errors."""
    size = sum(map(_size, docs))
    try:
        bodies = [_alone(client, docs[0])] if len(docs) == 1 else _together(client, docs)
    except errors.ServerUnavailable:
        client.learn(size, answered=False)
        raise
    client.learn(size, answered=True)
    return bodies


def _alone(client: Client, doc: Document) -> Body:
    try:
        return Body(client.content(f'{path_of(doc["_id"])}/{NAME}', {'rev': doc['_rev']}, _size(doc)))
    except errors.NotFound:
        return _MISSING


def _together(client: Client, docs: Sequence[Document]) -> list[Body]:
    wanted = [{'id': doc['_id'], 'rev': doc['_rev']} for doc in docs]
    results = client.request(
        'POST',
        '/_bulk_get',
        {'attachments': True},
        {'docs': wanted},
        repeat=True,
        shape=members(results=items(_RESULT)),
    )['results']
    found = {result['id']: result['docs'][0] for result in results if result['docs']}
    if found.keys() != {doc['_id'] for doc in docs}:
        raise errors.BrokenAnswer(f'{client.address.url}: a broken answer to POST /_bulk_get')
    return [_of(client, doc, found[doc['_id']]) for doc in docs]


def _of(client: Client, doc: Document, found: Document) -> Body:
    if not isinstance(leaf := found.get('ok'), dict):
        error = found.get('error') or {'error': 'not_found'}  # the embedded server says `missing` then
        if isinstance(error, dict) and error.get('error') != 'not_found':
            raise errors.from_answer(error, client.address.url)
        return _MISSING
    content: Any = None
    try:
        content = (
            base64.b64decode(leaf['_attachments'][NAME]['data'], validate=True) if leaf['_rev'] == doc['_rev'] else None
        )
    except (ValueError, TypeError, LookupError):
        pass
    if content is None or len(content) != _size(doc):
        raise errors.BrokenAnswer(f'{client.address.url}: a broken answer to POST /_bulk_get')
    return Body(content)


_MISSING = Body(None, malformed('the attachment with the body is missing'))


def _size(doc: Document) -> int:
    found = stub(doc)
    return int(found['length']) if found else 0


def _shared(docs: Sequence[Document], most: int) -> int:
    """Return how many of the documents, from the first on, have their bodies read in one request."""
    count, size = 0, 0
    for doc in docs:
        # Whoever put other attachments into it: they would come along.
        if _size(doc) >= _ALONE or len(doc['_attachments']) > 1 or (count and size + _size(doc) > most):
            break
        count, size = count + 1, size + _size(doc)
    return max(1, count)
