"""Many documents in requests of bounded size: bulk writes, with a `WriteResult` for each document, and reads.

`Unusable` has the documents that CouchDB refuses for ever, so that nobody tries to write them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import md5
from typing import Any, TypeVar

from .. import errors
from ..log import get_logger
from .http import encoded
from .pacing import RequestKind, TooManyUnits
from .shapes import Document, Shape, items, members, revision, text
from .write_result import UNSTORABLE, WriteResult, WriteStatus

logger = get_logger(__name__)

#: The maximum bytes of documents in one request of several documents: at first, and the smallest limit after timeouts.
MAX_REQUEST_BYTES, MIN_REQUEST_BYTES = 1_000_000, 64_000

#: The maximum number of documents in one request that reads or writes many, unless something needs another number.
BATCH_DOCS = 250

#: How often a change of a document is tried while other processes change it.
ATTEMPTS = 200

#: After this many requests of at least half the maximum size with a response in time, the maximum is doubled.
_STEADY_REQUESTS = 16

#: The maximum number of documents in `Unusable`.
_MAX_UNUSABLE = 10_000

#: CouchDB refuses a whole request with these errors because of one document in it.
_REFUSALS = (errors.DocumentTooLarge, errors.RequestRefused, errors.Conflict)

#: Elements of the response to `_bulk_docs`: of a document that is stored, and of one that is not.
_STORED, _REFUSED = members(id=text, rev=revision), members(id=text, error=text)

#: The shapes of the responses to a write of revisions, which lists no stored ones, and to one of changes.
_REFUSALS_ONLY, _RESULTS = items(_REFUSED), items(lambda element: _STORED(element) or _REFUSED(element))

_Found = TypeVar('_Found')


class RequestSize:
    """The maximum of bytes of documents in one request.

    It is halved after a request without a response, and doubled after `_STEADY_REQUESTS` with one.
    """

    def __init__(self) -> None:
        self.bytes = MAX_REQUEST_BYTES
        self._answered = 0

    def learn(self, size: int, *, answered: bool) -> None:
        """Adapt `bytes` after a request that transferred `size` bytes, with or without a response in time."""
        if not answered:
            if size > MIN_REQUEST_BYTES:
                self.bytes, self._answered = max(MIN_REQUEST_BYTES, min(self.bytes, size) // 2), 0
        elif 2 * size >= self.bytes:
            self._answered += 1
            if self._answered >= _STEADY_REQUESTS:
                self.bytes, self._answered = min(MAX_REQUEST_BYTES, 2 * self.bytes), 0


class BulkWrite:
    """One write of many documents: changes, or with `once` revisions as they are, as replication writes them."""

    def __init__(self, client: Any, *, once: bool = False) -> None:
        """`client` is a `Client`, which imports this module."""
        self._client, self._once = client, once

    def write(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes] | None) -> list[WriteResult]:
        """Write documents, see `Client.bulk`."""
        if texts is not None:
            return self.in_parts(docs, texts)
        texts, unstorable = _encode(docs)
        if not unstorable:
            return self.in_parts(docs, texts)
        kept = [index for index in range(len(docs)) if index not in unstorable]
        found = iter(self.in_parts([docs[index] for index in kept], [texts[index] for index in kept]))
        return [unstorable.get(index) or next(found) for index in range(len(docs))]

    def in_parts(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes]) -> list[WriteResult]:
        """Write documents in requests of bounded size."""
        results: list[WriteResult] = []
        while (start := len(results)) < len(docs):
            end, size = start + 1, len(texts[start])
            pace = self._client.pace
            most = min(len(docs), start + pace.most(RequestKind.WRITE)) if pace else len(docs)
            while end < most and size + len(texts[end]) <= self._client.request_size.bytes:
                size, end = size + len(texts[end]), end + 1
            try:
                results += self._write_part(docs[start:end], texts[start:end], size)
            except TooManyUnits:
                pass  # the next part is smaller
            except errors.CouchDBError as exc:
                exc.answered = results
                raise
        return results

    def _write_part(self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes], size: int) -> list[WriteResult]:
        """Write documents in one request of `size` bytes, or in several if CouchDB refuses it because of one."""
        body = b'{%b"docs":[%b]}' % (b'"new_edits":false,' * self._once, b','.join(texts))
        shape = _REFUSALS_ONLY if self._once else _results_of([doc['_id'] for doc in docs])
        try:
            # A second copy of a request for revisions changes nothing, so it may be repeated as a read is.
            answer = self._client.request(
                'POST', '/_bulk_docs', body=body, repeat=self._once, size=len(docs), shape=shape
            )
        except errors.ServerUnavailable:
            self._client.request_size.learn(size, answered=False)
            raise
        except _REFUSALS as exc:
            return self._separate(docs, texts, exc)
        self._client.request_size.learn(size, answered=True)
        results = [WriteResult.from_element(element) for element in answer]
        for result in results:
            # The server has a problem, instead of a reason to refuse this document.
            if result.is_refused and isinstance(error := result.exception(self._client.address.url), errors.RETRIED):
                raise error
        if not self._once:
            return results
        refused = {result.id: result for result in results}
        return [refused.get(doc['_id'], WriteResult(doc['_id'], WriteStatus.STORED, doc['_rev'])) for doc in docs]

    def _separate(
        self, docs: Sequence[Mapping[str, Any]], texts: Sequence[bytes], exc: errors.CouchDBError
    ) -> list[WriteResult]:
        """Write documents whose request CouchDB refused because of one of them; find that one by halving."""
        if len(docs) == 1:
            return [WriteResult.refused_by(docs[0]['_id'], exc, self._client.address.url)]
        half = len(docs) // 2
        results = self.in_parts(docs[:half], texts[:half])
        results += self.in_parts(docs[half:], texts[half:])
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
        found = next((leaf for leaf in self._client.leaves(doc['_id']) if _content(leaf) == _content(doc)), None)
        if found is None:
            return result
        # It is unknown how many nodes of a cluster stored it.
        return WriteResult(
            doc['_id'], WriteStatus.UNPROVEN if self._client.replicas > 1 else WriteStatus.STORED, found['_rev']
        )


class Unusable:
    """The documents of one database that cannot be written. Thread-safe."""

    def __init__(self) -> None:
        #: By document id, the revision.
        self._known: dict[str, str] = {}
        self._new: list[tuple[str, str]] = []

    def add(self, doc_id: str, rev: str, reason: str) -> None:
        """Record an unusable document and log it once: it cannot be written over this revision.

        `reason` is the end of a sentence in the log.
        """
        known = self.has(doc_id, rev)
        self._known[doc_id] = rev
        if known:
            return
        if len(self._known) > _MAX_UNUSABLE:
            self._known.pop(next(iter(self._known)), None)
        self._new.append((doc_id, reason))
        logger.error('document %s is skipped: %s', doc_id, reason)

    def has(self, doc_id: str, rev: str) -> bool:
        """Return whether `add` was called with this id and revision."""
        return self._known.get(doc_id) == rev

    def take(self) -> list[tuple[str, str]]:
        """Return the ids and reasons that were recorded since the last call."""
        new, self._new = self._new, []
        return new


def read_in_parts(read: Callable[[Sequence[str]], list[_Found]], ids: Sequence[str]) -> list[_Found]:
    """Return what `read` returns for these ids, in several requests if the documents are too large for one.

    *Raises* `AnswerTooLarge` if a single one is.
    """
    try:
        return read(ids)
    except errors.AnswerTooLarge:
        if len(ids) == 1:
            raise
    half = len(ids) // 2
    return [*read_in_parts(read, ids[:half]), *read_in_parts(read, ids[half:])]


def first_revision(doc_id: str) -> str:
    """Return the first revision of a document that is created under this id, see `Client.create_once`."""
    return f'1-{md5(doc_id.encode(), usedforsecurity=False).hexdigest()}'


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


def _results_of(ids: list[str]) -> Shape:
    """Return the shape of CouchDB's response to a write of documents with these ids: one result each, in this order."""
    return lambda answer: _RESULTS(answer) and [element['id'] for element in answer] == ids


def _content(doc: Mapping[str, Any]) -> Document:
    return {name: value for name, value in doc.items() if name not in ('_rev', '_attachments')}
