"""Batch writer: stores many results in one request, and keeps the results that must not be replaced.

The values of results stay encoded: the worker's process reads only their heads, which decide whether a stored result is
newer. The messages of next tasks that were handed over with the results are stored before them, as Celery does: in one
request to the database of the broker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.http import encoded
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError
from kombu_couchdb.log import get_logger

from .documents import ChordPart, Document, Packed, is_expired, is_outdated
from .result_store import ResultStore

logger = get_logger(__name__)

#: How often a result is tried while other processes change the same document.
_ATTEMPTS = 100

#: The members of a document that carry the encoded value.
_VALUE = frozenset({'value', 'base64', 'content_type'})


@dataclass(eq=False)
class QueueItem:
    """A result, a part of a chord whose task stores no result, or a message, on its way through the result queue."""

    #: The document without its value.
    head: Document
    #: The whole document as JSON, without a revision.
    text: bytes
    #: The part of a chord that is stored in the same request: its id, and the document as JSON.
    part_id: str = ''
    part: bytes = b''
    #: If the worker's process counts the part: the id of the chord's group, and the encoded body as JSON.
    group_id: str = ''
    body: bytes = b''
    #: The revision that the document is written over, if it is known.
    rev: str | None = None
    #: Whether it is stored; the chord that it belongs to may not be counted yet.
    is_stored: bool = False
    #: Its place in the queue.
    number: int = 0

    @classmethod
    def of(
        cls,
        doc: Mapping[str, Any],
        part: ChordPart | None = None,
        group_id: str = '',
        body: Packed | None = None,
    ) -> QueueItem:
        """Encode a document and its part of a chord; *raises* `Unstorable` if one cannot be encoded."""
        return cls(
            {name: value for name, value in doc.items() if name not in _VALUE},
            encoded(doc),
            part['_id'] if part else '',
            encoded(part) if part else b'',
            group_id,
            encoded(body) if body is not None else b'',
        )

    @classmethod
    def of_message(cls, item: WorkItem) -> QueueItem:
        """Encode the message of a next task; *raises* `Unstorable` if it cannot be encoded."""
        headers = item['message']['headers']
        head = {'_id': item['_id'], 'type': item['type'], 'queue': item['queue']}
        return cls({**head, 'task': headers.get('task'), 'task_id': headers.get('id')}, encoded(item))

    @property
    def is_message(self) -> bool:
        """Whether it is a message for the broker."""
        return bool(self.head['type'] == 'WorkItem')

    @property
    def id(self) -> str:
        """The id of the document."""
        return str(self.head['_id'])

    def __post_init__(self) -> None:
        #: The number of bytes that it occupies.
        self.size = len(self.text) + len(self.part) + len(self.body)

    def take_part(self, other: QueueItem) -> None:
        """Take over the part of a chord of another result of the same task."""
        self.part_id, self.part, self.group_id, self.body = other.part_id, other.part, other.group_id, other.body

    def docs(self) -> tuple[list[Document], list[bytes]]:
        """Return the documents to write, without their values, and the same documents as JSON."""
        text, head = self.text, self.head
        if self.rev:
            text, head = b'{"_rev":' + json.dumps(self.rev).encode() + b',' + text[1:], {**head, '_rev': self.rev}
        return ([head, {'_id': self.part_id}], [text, self.part]) if self.part else ([head], [text])

    def packed_body(self) -> Packed:
        """Return the encoded body of the chord."""
        body: Packed = json.loads(self.body)
        return body

    def to_bytes(self) -> bytes:
        """Return it as one message; JSON texts contain no line breaks."""
        return b'\n'.join([encoded([self.head, self.part_id, self.group_id]), self.text, self.part, self.body])

    @classmethod
    def from_bytes(cls, message: bytes) -> QueueItem:
        """Return what `to_bytes` has made a message of; *raises* `ValueError` for anything else."""
        head, text, part, body = message.split(b'\n')
        found, part_id, group_id = json.loads(head)
        return cls(found, text, part_id, part, group_id, body)


#: Something handed over that is not stored, and why.
Refusal = tuple[QueueItem, CouchDBError]


class BatchWriter:
    """Writes results and messages, which have different ids, to one store and to the database `broker`."""

    def __init__(self, store: ResultStore, broker: Client | None) -> None:
        self._store, self.broker = store, broker

    def write(self, batch: Sequence[QueueItem], *, uncertain: bool = False) -> list[Refusal]:
        """Store messages, and results unless newer ones are stored; return those that CouchDB refuses.

        With `uncertain`, an earlier attempt got no response: what it has stored is not written again. One request for
        the messages, and one for the results if nothing is in conflict. *Raises* the errors of `kombu_couchdb.errors`:
        then it is unknown what is stored.
        """
        refusals: list[Refusal] = []
        messages = [each for each in batch if each.is_message]
        if messages:
            assert self.broker is not None
            refusals += write_messages(self.broker, messages, uncertain=uncertain)
            batch = [each for each in batch if not each.is_message]
        left = self._newer_than_stored(batch) if uncertain else [self._with_known_revision(each) for each in batch]
        for _ in range(_ATTEMPTS):
            if not left:
                return refusals
            left = self._newer_than_stored(self._write(left, refusals))
        return refusals + [(each, self._store.too_many_conflicts(each.id)) for each in left]

    def _write(self, batch: Sequence[QueueItem], refusals: list[Refusal]) -> list[QueueItem]:
        """Write results, add the refused ones to `refusals` and return those in conflict."""
        docs: list[Document] = []
        texts: list[bytes] = []
        for each in batch:
            some, its_texts = each.docs()
            docs += some
            texts += its_texts
        results = iter(self._store.write_texts(docs, texts))
        where, conflicting = self._store.client.address.url, list[QueueItem]()
        for each in batch:
            result = next(results)
            part = next(results) if each.part else None
            if part is not None and not part.is_refused:  # in conflict: it is stored already
                each.part = b''
            if result.is_conflict:
                conflicting.append(each)
                continue
            refused = next((one for one in (result, part) if one is not None and one.is_refused), None)
            if refused is not None:
                refusals.append((each, refused.exception(where)))
            else:
                self._store.note_stored(each.head, result.rev)
        return conflicting

    def _with_known_revision(self, each: QueueItem) -> QueueItem:
        each.rev = self._store.known_revision(each.head)
        return each

    def _newer_than_stored(self, batch: Sequence[QueueItem]) -> list[QueueItem]:
        """Return the results that must replace what is stored, with the revisions to be replaced."""
        if not batch:
            return []
        now, left = self._store.client.clock.now(), list[QueueItem]()
        for each, current in zip(batch, self._store.current_many([each.id for each in batch]), strict=True):
            if current is not None and each.head.get('type') == 'Part':
                continue  # a part is never replaced
            if current is not None and not is_expired(current, now) and is_outdated(each.head, current):
                logger.debug('%s keeps the state %s: %s is outdated', each.id, current['status'], each.head['status'])
                if not each.part:
                    continue
                each.head = {**each.head, '_id': each.part_id, 'type': 'Part'}  # only its part is still to be stored
                each.text, each.part, each.rev = each.part, b'', None
            else:
                each.rev = current['_rev'] if current else None
            left.append(each)
        return left


def write_messages(client: Client, batch: Sequence[QueueItem], *, uncertain: bool) -> list[Refusal]:
    """Store messages in the database of `client`, in one request, and return those that CouchDB refuses.

    With `uncertain`, an earlier attempt got no response. What it stored is not stored again: a worker may have run it,
    and deleted its message, meanwhile. *Raises* the errors of `kombu_couchdb.errors` for an outage.
    """
    by_id = {each.id: each for each in batch}
    heads = [each.head for each in batch]
    try:
        if uncertain:
            heads = client.never_stored(heads)
        results = client.bulk(heads, texts=[by_id[head['_id']].text for head in heads])
    except (AccessDenied, ConfigurationError) as exc:
        return [(each, exc) for each in batch]
    for result in results:
        if not result.is_refused:
            logger.debug('published message %s to queue %s', result.id, by_id[result.id].head['queue'])
    # A conflict means that an earlier attempt was stored.
    return [(by_id[result.id], result.exception(client.address.url)) for result in results if result.is_refused]
