"""Writing many documents: in requests of bounded size, with an answer for each document whatever the server refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import md5
from typing import Any, cast
from urllib.parse import quote

from .. import errors
from .http import Http, encoded
from .shapes import Shape, document, equal, exactly, items, maybe, members, revision, text

__all__ = ['REFUSALS', 'Bulk', 'Document', 'path_of']

#: A document or a part of one.
Document = dict[str, Any]

#: Writes documents, which are encoded already, in one request, and returns an answer for each.
Write = Callable[[Sequence[Document], Sequence[bytes]], 'list[Document]']

#: The most bytes of documents in one request, if it is not one document alone: at first, and after time-outs at the least.
MOST_BYTES, LEAST_BYTES = 1_000_000, 64_000

#: After so many requests that were about as large as they may be, and were answered, the next ones may be larger.
_STEADY = 16

#: The errors in an answer to `_bulk_docs` that are the server's decision; any other is its trouble.
_DECIDED = frozenset({'conflict', 'forbidden', 'unauthorized', 'document_too_large'})

#: What the server refuses in one document it refuses for all in the request; and as what a document alone is answered then.
_REFUSALS: dict[type[errors.CouchDBError], str] = {
    errors.DocumentTooLarge: 'document_too_large',
    errors.RequestRefused: 'refused',
    errors.Conflict: 'missing_stub',
}


#: The answers for a document that the server would refuse however often it were sent.
REFUSALS = frozenset({*_REFUSALS.values(), 'unstorable'})


class Bulk(Http):
    """Writes to one database; *every* method raises the errors of `kombu_couchdb.errors`."""

    #: The most bytes of documents in one request just now: half as many after a request that was not answered, and twice as many
    #: after some that were.
    request_bytes = MOST_BYTES
    _answered = 0

    def leaves(self, doc_id: str, **params: Any) -> list[Document]:
        """Return all leaves of a document, deleted ones too; none if there never was one."""
        try:
            found = self.request(
                'GET',
                path_of(doc_id),
                {'open_revs': 'all', **params},
                repeat=True,
                shape=items(members(ok=maybe(document(doc_id)))),
            )
        except errors.NotFound:
            return []
        return [answer['ok'] for answer in found if answer.get('ok')]

    def put(self, doc: Document, *, text: bytes | None = None) -> str:
        """Write a document under its `_id` and return the new revision; *raises* `Conflict`. For the rest see `bulk`."""
        stored = members(id=equal(doc['_id']), rev=revision)
        return cast(str, self.request('PUT', path_of(doc['_id']), body=text or doc, shape=stored)['rev'])

    def try_put(self, doc: Document) -> str | None:
        """Write a document like `put` and return the new revision, or None if the write is in conflict."""
        try:
            return self.put(doc)
        except errors.Conflict:
            return None

    def bulk(self, docs: Sequence[Document], *, texts: Sequence[bytes] | None = None) -> list[Document]:
        """Write many documents and return CouchDB's answer for each, in the same order.

        An answer is `{'ok': true, 'id', 'rev'}`, with `accepted` where a cluster stored it on too few nodes to prove
        anything, or `{'id', 'error', 'reason'}`. Some may be stored and others not. *Raises* `ServerUnavailable` also if
        the server could not say so of each; its `answered` has the answers to the requests before.

        What is too much for one request goes in several. If the server refuses a request of many for one document in it (413,
        400, 412), that document has it for its answer, `document_too_large`, `refused` or `missing_stub`, and the others are
        written. So they are if one cannot be encoded: its answer is `unstorable`. `texts` are the documents if they are encoded
        already.
        """
        if texts is None:
            texts, unstorable = _texts(docs)
            if unstorable:
                kept = [index for index in range(len(docs)) if index not in unstorable]
                found = iter(self.bulk([docs[index] for index in kept], texts=[texts[index] for index in kept]))
                return [unstorable.get(index) or next(found) for index in range(len(docs))]
        return self._in_parts(docs, texts, self._write)

    def create_once(self, docs: Sequence[Document]) -> list[Document]:
        """Create documents, those under whose ids there never was one, and return an answer for each, as `bulk` does.

        A document that is there stays as it is, and one that was deleted stays deleted: however late a request arrives, it
        creates nothing a second time. For the first revision is made of the id alone, and is written as replication writes it:
        CouchDB leaves a document alone that has this revision in its history (the newest 20, see `queues.database`, until it is
        purged; measured on CouchDB 3.5 and PouchDB 9). The answer is the same either way.
        """
        docs = [{**doc, '_rev': f'1-{md5(doc["_id"].encode(), usedforsecurity=False).hexdigest()}'} for doc in docs]
        return self._in_parts(docs, [encoded(doc) for doc in docs], self._create)

    def _in_parts(self, docs: Sequence[Document], texts: Sequence[bytes], write: Write) -> list[Document]:
        """Write documents in requests of bounded size."""
        answers: list[Document] = []
        while (start := len(answers)) < len(docs):
            end, size = start + 1, len(texts[start])
            while end < len(docs) and size + len(texts[end]) <= self.request_bytes:
                size, end = size + len(texts[end]), end + 1
            try:
                answers += self._learning(docs[start:end], texts[start:end], write)
            except errors.CouchDBError as exc:
                exc.answered = answers
                raise
        return answers

    def learn(self, size: int, *, answered: bool) -> None:
        """Note whether a request that sent, or asked for, `size` bytes was answered: that limits those that follow."""
        if not answered:
            if size > LEAST_BYTES:
                self.request_bytes, self._answered = max(LEAST_BYTES, min(self.request_bytes, size) // 2), 0
        elif 2 * size >= self.request_bytes:
            self._answered += 1
            if self._answered >= _STEADY:
                self.request_bytes, self._answered = min(MOST_BYTES, 2 * self.request_bytes), 0

    def _learning(self, docs: Sequence[Document], texts: Sequence[bytes], write: Write) -> list[Document]:
        size = sum(map(len, texts))
        try:
            answers = write(docs, texts)
        except errors.ServerUnavailable:
            self.learn(size, answered=False)
            raise
        except tuple(_REFUSALS) as exc:
            return self._separate(docs, texts, exc, write)
        self.learn(size, answered=True)
        for answer in answers:
            if answer.get('error', 'conflict') not in _DECIDED:
                raise errors.from_answer(answer, self.address.url)
        return answers

    def _write(self, docs: Sequence[Document], texts: Sequence[bytes]) -> list[Document]:
        return cast(
            'list[Document]',
            self.request(
                'POST',
                '/_bulk_docs',
                body=b'{"docs":[' + b','.join(texts) + b']}',
                shape=exactly(*(_decided(doc['_id']) for doc in docs)),
            ),
        )

    def _create(self, docs: Sequence[Document], texts: Sequence[bytes]) -> list[Document]:
        body = b'{"new_edits":false,"docs":[' + b','.join(texts) + b']}'
        refused = {
            answer['id']: answer
            for answer in self.request('POST', '/_bulk_docs', body=body, shape=items(members(id=text, error=text)))
        }
        return [refused.get(doc['_id'], {'ok': True, 'id': doc['_id'], 'rev': doc['_rev']}) for doc in docs]

    def _separate(
        self, docs: Sequence[Document], texts: Sequence[bytes], exc: errors.CouchDBError, write: Write
    ) -> list[Document]:
        """Write documents of which the server refused one, and all in its request for it: that one is found by halving."""
        if len(docs) == 1:
            error = next(name for kind, name in _REFUSALS.items() if isinstance(exc, kind))
            return [{'id': docs[0]['_id'], 'error': error, 'reason': str(exc).removeprefix(f'{self.address.url}: ')}]
        half = len(docs) // 2
        answers = self._learning(docs[:half], texts[:half], write) + self._learning(docs[half:], texts[half:], write)
        if not isinstance(exc, errors.Conflict):
            return answers
        # A stub is missed by a shard, or by the node of a cluster that has not caught up yet; others have stored their part.
        return [
            self._own(doc, answer) if answer.get('error') == 'conflict' else answer
            for doc, answer in zip(docs, answers, strict=True)
        ]

    def _own(self, doc: Document, answer: Document) -> Document:
        """Return the answer for a document in conflict, which may be with itself."""
        found = next((leaf for leaf in self.leaves(doc['_id']) if _content(leaf) == _content(doc)), None)
        if found is None:
            return answer
        # How many nodes of a cluster have it nobody knows.
        return {'ok': True, 'id': doc['_id'], 'rev': found['_rev'], **({'accepted': True} if self.replicas > 1 else {})}


def path_of(doc_id: str) -> str:
    """Return the path of a document below its database."""
    # The slash after _design is part of the path, not of a name: CouchDB redirects if it is encoded.
    prefix, slash, name = doc_id.partition('/') if doc_id.startswith(('_design/', '_local/')) else ('', '', doc_id)
    # A part of a path that is '.' or '..' means another path: to clients, proxies and servers, unless it is encoded.
    quoted = name.replace('.', '%2E') if name in ('.', '..') else quote(name, safe='')
    return f'/{prefix}{slash}{quoted}'


def _texts(docs: Sequence[Document]) -> tuple[list[bytes], dict[int, Document]]:
    """Return documents as JSON, and the answers for those that cannot be written so, by their places."""
    found, unstorable = list[bytes](), dict[int, Document]()
    for index, doc in enumerate(docs):
        try:
            found.append(encoded(doc))
        except errors.Unstorable as exc:
            found.append(b'')
            unstorable[index] = {'id': doc['_id'], 'error': 'unstorable', 'reason': str(exc)}
    return found, unstorable


def _decided(doc_id: str) -> Shape:
    """The answer for one document of `_bulk_docs`."""
    is_its, is_stored, is_refused = members(id=equal(doc_id)), members(rev=revision), members(error=text)
    return lambda answer: is_its(answer) and (is_stored(answer) or is_refused(answer))


def _content(doc: Document) -> Document:
    return {name: value for name, value in doc.items() if name not in ('_rev', '_attachments')}
