"""Queue item: a result, a part of a chord or a message, encoded for its way to the process that stores it.

The values of results stay encoded: that process reads only their heads, which decide whether a stored result is newer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from socket import socket
from typing import Any

from kombu_couchdb.couchdb.http import encoded
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.errors import CouchDBError

from .documents import ChordPart, Document

#: The members of a document that carry the encoded value.
_VALUE = frozenset({'value', 'base64', 'content_type', 'request'})

#: What the task that waits reads if its chord is complete.
COMPLETE = b'1'


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
    #: If the worker's process counts the part: the id of the chord's group.
    group_id: str = ''
    #: The socket of a task that waits until this is done. It is closed then; a byte says that the chord is complete.
    waiting: socket | None = None
    #: The database beside the broker's in which it is stored; '': that of the results.
    database: str = ''
    #: The revision that the document is written over, if it is known.
    rev: str | None = None
    #: Whether it is stored; the chord that it belongs to may not be counted yet.
    is_stored: bool = False
    #: Its place in the queue.
    number: int = 0

    @classmethod
    def encode(
        cls,
        doc: Mapping[str, Any],
        part: ChordPart | None = None,
        group_id: str = '',
        waiting: socket | None = None,
    ) -> QueueItem:
        """Encode a document and its part of a chord; *raises* `Unstorable` if one cannot be encoded."""
        return cls(
            {name: value for name, value in doc.items() if name not in _VALUE},
            encoded(doc),
            part['_id'] if part else '',
            encoded(part) if part else b'',
            group_id,
            waiting,
        )

    @classmethod
    def of_returned(cls, database: str, doc: Document) -> QueueItem:
        """Encode a document of another database, with a result in its member `result`; *raises* `Unstorable`."""
        head = {name: value for name, value in doc['result'].items() if name not in _VALUE}
        return cls({**head, '_id': doc['_id'], 'type': doc['type']}, encoded(doc), database=database)

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
        self.size = len(self.text) + len(self.part)

    def take_part(self, other: QueueItem) -> None:
        """Take over the part of a chord of another result of the same task."""
        self.part_id, self.part, self.group_id, self.waiting = other.part_id, other.part, other.group_id, other.waiting
        other.waiting = None

    def docs(self) -> tuple[list[Document], list[bytes]]:
        """Return the documents to write, without their values, and the same documents as JSON."""
        text, head = self.text, self.head
        if self.rev:
            text, head = b'{"_rev":' + json.dumps(self.rev).encode() + b',' + text[1:], {**head, '_rev': self.rev}
        return ([head, {'_id': self.part_id}], [text, self.part]) if self.part else ([head], [text])

    def tell_waiting(self) -> bool:
        """Tell the task that waits that its chord is complete; return False if none waits any more."""
        try:
            return self.waiting is not None and self.waiting.send(COMPLETE) > 0
        except OSError:  # it was killed, or has waited for too long
            return False

    def end_waiting(self) -> None:
        """Let the task that waits go on."""
        if self.waiting is not None:
            self.waiting.close()
            self.waiting = None

    def to_bytes(self) -> bytes:
        """Return it as one message; JSON texts contain no line breaks."""
        head = encoded([self.head, self.part_id, self.group_id, self.database])
        return b'\n'.join([head, self.text, self.part])

    @classmethod
    def from_bytes(cls, message: bytes) -> QueueItem:
        """Return what `to_bytes` has made a message of; *raises* `ValueError` for anything else."""
        head, text, part = message.split(b'\n')
        found, part_id, group_id, database = json.loads(head)
        return cls(found, text, part_id, part, group_id, database=database)


#: Something handed over that is not stored, and why.
Refusal = tuple[QueueItem, CouchDBError]
