"""Bulk writes: many documents in requests of bounded size, with a `WriteResult` for each document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import md5
from typing import Any, cast

from .. import errors
from .http import encoded
from .reads import Document, Reads, path_of
from .shapes import Shape, equal, exactly, items, members, revision, text
from .write_result import DOCUMENT_TOO_LARGE, MISSING_STUB, REFUSED, UNSTORABLE, WriteResult, WriteStatus

__all__ = ['Bulk', 'Document', 'deletion', 'path_of']

#: A function that writes documents in one request, given as objects and as JSON, and returns a result for each.
Write = Callable[[Sequence[Mapping[str, Any]], Sequence[bytes]], list[WriteResult]]

#: The maximum bytes of documents in one request of several documents: at first, and the smallest limit after timeouts.
MAX_REQUEST_BYTES, MIN_REQUEST_BYTES = 1_000_000, 64_000

#: After this many requests of at least half the maximum size with a response in time, the maximum is doubled.
_STEADY_REQUESTS = 16

#: Errors of single documents of `_bulk_docs`. Any other error means that the server has a problem.
_DECISIONS = frozenset({'conflict', 'forbidden', 'unauthorized', DOCUMENT_TOO_LARGE})

#: CouchDB refuses a whole request with these errors because of one document in it. The values are the errors of that
#: document's `WriteResult`.
_REFUSALS: dict[type[errors.CouchDBError], str] = {
    errors.DocumentTooLarge: DOCUMENT_TOO_LARGE,
    errors.RequestRefused: REFUSED,
    errors.Conflict: MISSING_STUB,
}


class Bulk(Reads):
    """Writes to one database. *Every* method raises the errors of `kombu_couchdb.errors`."""

    #: The current maximum of bytes of documents in one request: halved after a request without a response, doubled
    #: after `_STEADY_REQUESTS` with one.
    request_bytes = MAX_REQUEST_BYTES
    _answered = 0

    def put(self, doc: Mapping[str, Any], *, text: bytes | None = None) -> str:
        """Write a document under its `_id` and return the new revision. `text` is the document as JSON, if known.

        *Raises* `Conflict` if the document exists and `_rev` is missing or is not its current revision;
        `DocumentTooLarge`, `Unstorable`, `RequestRefused` if CouchDB cannot store it; `ServerUnavailable` if it is
        unknown whether CouchDB stored it.
        """
        stored = members(id=equal(doc['_id']), rev=revision)
        return cast(str, self.request('PUT', path_of(doc['_id']), body=text or doc, shape=stored)['rev'])

    def try_put(self, doc: Mapping[str, Any]) -> str | None:
        """Write a document like `put` and return the new revision; return None on a conflict.

        *Raises* the errors of `put` except `Conflict`.
        """
        try:
            return self.put(doc)
        except errors.Conflict:
            return None

    def bulk(self, docs: Sequence[Mapping[str, Any]], *, texts: Sequence[bytes] | None = None) -> list[WriteResult]:
        """Write many documents and return the result for each, in the same order; some may be stored and others not.

        `texts` are the documents as JSON, if the caller has encoded them. Documents that exceed the size of one request
        are written in several requests.

        If CouchDB refuses a request because of one document (status 413, 400 or 412), the result of that document is
        refused with the error `document_too_large`, `refused` or `missing_stub`, and the others are written. A document
        that cannot be encoded is refused as `unstorable`.

        *Raises* `ServerUnavailable` if CouchDB did not decide about each document; the attribute `answered` of the
        error contains the results of earlier requests.
        """
        if texts is None:
            texts, unstorable = _encode(docs)
            if unstorable:
                kept = [index for index in range(len(docs)) if index not in unstorable]
                found = iter(self.bulk([docs[index] for index in kept], texts=[texts[index] for index in kept]))
                return [unstorable.get(index) or next(found) for index in range(len(docs))]
        return self._in_parts(docs, texts, self._write)

    def create_once(self, docs: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
        """Create the documents whose ids were never used, and return a result for each, as `bulk` does.

        An existing document stays unchanged, and a deleted one stays deleted, however late a request arrives. The first
        revision is computed from the id alone and written as replication writes it (`new_edits: false`). CouchDB
        ignores a revision that the document has in its history: the newest 20 revisions, see `queues.database`, until
        the document is purged (measured on CouchDB 3.5 and PouchDB 9). The result is "stored" in either case.
        """
        docs = [{**doc, '_rev': f'1-{md5(doc["_id"].encode(), usedforsecurity=False).hexdigest()}'} for doc in docs]
        return self._in_parts(docs, [encoded(doc) for doc in docs], self._create)

    def _in_parts(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes], write: Write) -> list[WriteResult]:
        """Write documents in requests of bounded size."""
        results: list[WriteResult] = []
        while (start := len(results)) < len(docs):
            end, size = start + 1, len(texts[start])
            while end < len(docs) and size + len(texts[end]) <= self.request_bytes:
                size, end = size + len(texts[end]), end + 1
            try:
                results += self._write_part(docs[start:end], texts[start:end], write)
            except errors.CouchDBError as exc:
                exc.answered = results
                raise
        return results

    def learn(self, size: int, *, answered: bool) -> None:
        """Adapt `request_bytes` after a request that transferred `size` bytes, with or without a response in time."""
        if not answered:
            if size > MIN_REQUEST_BYTES:
                self.request_bytes, self._answered = max(MIN_REQUEST_BYTES, min(self.request_bytes, size) // 2), 0
        elif 2 * size >= self.request_bytes:
            self._answered += 1
            if self._answered >= _STEADY_REQUESTS:
                self.request_bytes, self._answered = min(MAX_REQUEST_BYTES, 2 * self.request_bytes), 0

    def _write_part(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes], write: Write) -> list[WriteResult]:
        size = sum(map(len, texts))
        try:
            results = write(docs, texts)
        except errors.ServerUnavailable:
            self.learn(size, answered=False)
            raise
        except tuple(_REFUSALS) as exc:
            return self._separate(docs, texts, exc, write)
        self.learn(size, answered=True)
        for result in results:
            if result.is_refused and result.error not in _DECISIONS:
                raise result.exception(self.address.url)
        return results

    def _write(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes]) -> list[WriteResult]:
        body = b'{"docs":[' + b','.join(texts) + b']}'
        shape = exactly(*(_shape_of_result(doc['_id']) for doc in docs))
        return [WriteResult.of(element) for element in self.request('POST', '/_bulk_docs', body=body, shape=shape)]

    def _create(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes]) -> list[WriteResult]:
        body = b'{"new_edits":false,"docs":[' + b','.join(texts) + b']}'
        refused = self.request('POST', '/_bulk_docs', body=body, shape=items(members(id=text, error=text)))
        # CouchDB does not list stored documents in this response.
        results = {element['id']: WriteResult.of(element) for element in refused}
        return [results.get(doc['_id'], WriteResult(doc['_id'], WriteStatus.STORED, doc['_rev'])) for doc in docs]

    def _separate(
        self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes], exc: errors.CouchDBError, write: Write
    ) -> list[WriteResult]:
        """Write documents whose request CouchDB refused because of one of them; find that one by halving."""
        if len(docs) == 1:
            error = next(name for kind, name in _REFUSALS.items() if isinstance(exc, kind))
            return [WriteResult.refused(docs[0]['_id'], error, str(exc).removeprefix(f'{self.address.url}: '))]
        half = len(docs) // 2
        results = self._write_part(docs[:half], texts[:half], write)
        results += self._write_part(docs[half:], texts[half:], write)
        if not isinstance(exc, errors.Conflict):
            return results
        # One shard, or a lagging node, does not have the attachment that a stub refers to. Other shards have stored
        # their documents in the first attempt.
        return [
            self._resolve_own_conflict(doc, result) if result.is_conflict else result
            for doc, result in zip(docs, results, strict=True)
        ]

    def _resolve_own_conflict(self, doc: Mapping[str, Any], result: WriteResult) -> WriteResult:
        """Return the result for a document in conflict, which may be in conflict with its own earlier attempt."""
        found = next((leaf for leaf in self.leaves(doc['_id']) if _content(leaf) == _content(doc)), None)
        if found is None:
            return result
        # It is unknown how many nodes of a cluster stored it.
        return WriteResult(doc['_id'], WriteStatus.UNPROVEN if self.replicas > 1 else WriteStatus.STORED, found['_rev'])


def deletion(doc: Mapping[str, Any]) -> Document:
    """Return the deletion of a document: CouchDB keeps only its id and revision."""
    return {'_id': doc['_id'], '_rev': doc['_rev'], '_deleted': True}


def _encode(docs: Sequence[Mapping[str, Any]]) -> tuple[list[bytes], dict[int, WriteResult]]:
    """Return documents as JSON, and the results of those that cannot be encoded, by their positions in `docs`."""
    found, unstorable = list[bytes](), dict[int, WriteResult]()
    for index, doc in enumerate(docs):
        try:
            found.append(encoded(doc))
        except errors.Unstorable as exc:
            found.append(b'')
            unstorable[index] = WriteResult.refused(doc['_id'], UNSTORABLE, str(exc))
    return found, unstorable


def _shape_of_result(doc_id: str) -> Shape:
    """Return the shape of an element of CouchDB's response to `_bulk_docs`."""
    has_id, is_stored, is_refused = members(id=equal(doc_id)), members(rev=revision), members(error=text)
    return lambda element: has_id(element) and (is_stored(element) or is_refused(element))


def _content(doc: Mapping[str, Any]) -> Document:
    return {name: value for name, value in doc.items() if name not in ('_rev', '_attachments')}
