"""Bodies that are attachments (see `documents.body`): read after the claim, a limited number of bytes in each cycle.

For a `basic_get` the body of its message is read before the claim.

A large body is read alone, as plain bytes: in base64 CouchDB 3.5 takes three times as long and sends a third more
(measured with 250 kB). Small bodies share a request, because a request costs more than their bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import errors
from ..couchdb.client import Client, Document, path_of
from ..couchdb.failures import from_answer
from ..couchdb.shapes import items, members, text
from ..documents.body import NAME, body_stub
from ..documents.dead_letter import malformed
from .delivery import Delivery
from .unacked import Unacked

#: Bodies of at least this size are read alone, in bytes.
_MIN_ALONE_BYTES = 64_000

#: A body counts as unreadable, and its message becomes a dead letter, if more than this many reads of it failed with
#: one of these errors. Reads that failed because CouchDB did not respond do not count.
_MAX_FAILURES, _FINAL_ERRORS = 10, (errors.BrokenAnswer, errors.RequestRefused)

_RESULT = members(id=text, docs=items(members()))


class Body(NamedTuple):
    """The content of an attachment, or None and the reason why it can never be read."""

    content: bytes | None
    reason: str = ''


def deliver_some(client: Client, unacked: Unacked) -> None:
    """Read bodies of up to `Client.request_size` bytes together (or one larger body), and deliver their messages.

    *Raises* `CouchDBError` if a read failed: its messages stay claimed, and the next cycle tries again.
    """
    size, maximum = 0, client.request_size.bytes
    unread = sorted(unacked.awaiting_bodies(), key=lambda delivery: delivery.failures)
    while unread and (not size or size + _size(unread[0].doc) <= maximum):
        # Bodies that could not be read together are read alone.
        count = 1 if unread[0].failures else _batch_size([delivery.doc for delivery in unread], maximum - size)
        batch, unread = unread[:count], unread[count:]
        size += sum(_size(delivery.doc) for delivery in batch)
        for delivery, body in zip(batch, _read_for(client, batch), strict=True):
            unacked.set_body(delivery, *body)


def _read_for(client: Client, batch: list[Delivery]) -> list[Body]:
    try:
        return read(client, [delivery.doc for delivery in batch])
    except errors.CouchDBError as exc:
        for delivery in batch:
            delivery.failures += 1
            delivery.final_failures += isinstance(exc, _FINAL_ERRORS)
        if len(batch) == 1 and batch[0].final_failures > _MAX_FAILURES and isinstance(exc, _FINAL_ERRORS):
            return [Body(None, malformed(f'the attachment with the body cannot be read ({exc})'))]
        raise


def read(client: Client, docs: Sequence[Document]) -> list[Body]:
    """Return the attached bodies of these revisions of documents, in one request; *raises* the errors of `Client`."""
    size = sum(map(_size, docs))
    try:
        bodies = [_read_one(client, docs[0])] if len(docs) == 1 else _read_many(client, docs)
    except errors.ServerUnavailable:
        client.request_size.learn(size, answered=False)
        raise
    client.request_size.learn(size, answered=True)
    return bodies


def _read_one(client: Client, doc: Document) -> Body:
    try:
        return Body(client.content(f'{path_of(doc["_id"])}/{NAME}', {'rev': doc['_rev']}, _size(doc)))
    except errors.NotFound:
        return _MISSING


def _read_many(client: Client, docs: Sequence[Document]) -> list[Body]:
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
        raise errors.BrokenAnswer(f'{client.address.url}: unexpected response to POST /_bulk_get')
    return [_body_of(client, doc, found[doc['_id']]) for doc in docs]


def _body_of(client: Client, doc: Document, found: Document) -> Body:
    if not isinstance(leaf := found.get('ok'), dict):
        error = found.get('error') or {'error': 'not_found'}  # the embedded server says `missing` instead
        if isinstance(error, dict) and error.get('error') != 'not_found':
            raise from_answer(error, client.address.url)
        return _MISSING
    content: Any = None
    try:
        content = (
            base64.b64decode(leaf['_attachments'][NAME]['data'], validate=True) if leaf['_rev'] == doc['_rev'] else None
        )
    except (ValueError, TypeError, LookupError):
        pass
    if content is None or len(content) != _size(doc):
        raise errors.BrokenAnswer(f'{client.address.url}: unexpected response to POST /_bulk_get')
    return Body(content)


_MISSING = Body(None, malformed('the attachment with the body is missing'))


def _size(doc: Document) -> int:
    found = body_stub(doc)
    return int(found['length']) if found else 0


def _batch_size(docs: Sequence[Document], max_bytes: int) -> int:
    """Return for how many of the documents, from the first on, one request reads the bodies."""
    count, size = 0, 0
    for doc in docs:
        # `_bulk_get` would also send other attachments that somebody added to the document.
        if _size(doc) >= _MIN_ALONE_BYTES or len(doc['_attachments']) > 1 or (count and size + _size(doc) > max_bytes):
            break
        count, size = count + 1, size + _size(doc)
    return max(1, count)
