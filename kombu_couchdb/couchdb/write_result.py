"""WriteResult: the result of writing one document, including the case that CouchDB did not respond.

And `PendingWrite`: a document to be written, with what follows from each result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from ..errors import Conflict, CouchDBError, DocumentTooLarge, RequestRefused, Unstorable
from .failures import from_answer

#: Errors that the client itself puts in place of a status code that CouchDB gave to a whole request, see `Client.bulk`.
DOCUMENT_TOO_LARGE, REFUSED, MISSING_STUB, UNSTORABLE = 'document_too_large', 'refused', 'missing_stub', 'unstorable'

#: With these errors CouchDB would refuse the document however often it was sent, by the exception of a request with it
#: alone. `forbidden` and `unauthorized` are not among them: an administrator can grant the right.
_PERMANENT: dict[type[CouchDBError], str] = {
    DocumentTooLarge: DOCUMENT_TOO_LARGE,
    RequestRefused: REFUSED,
    Conflict: MISSING_STUB,
    Unstorable: UNSTORABLE,
}


class WriteStatus(str, Enum):
    """The status of a write."""

    #: Stored, and a quorum of the cluster's nodes confirmed it.
    STORED = 'stored'
    #: Stored on fewer nodes than a quorum (CouchDB's status 202): other nodes may have stored another revision.
    UNPROVEN = 'unproven'
    #: Not stored: the document has changed since it was read. Or an earlier attempt of the same write was stored.
    CONFLICT = 'conflict'
    #: Not stored: CouchDB refuses this document.
    REFUSED = 'refused'
    #: No response: the document may have been stored, see `Client.still_writable`.
    UNKNOWN = 'unknown'


class WriteResult(NamedTuple):
    """The result of writing one document."""

    id: str
    status: WriteStatus
    #: The new revision, if the document was stored.
    rev: str = ''
    #: CouchDB's error code, such as `forbidden`, or a constant of this module.
    error: str = ''
    #: CouchDB's description of the error.
    reason: str = ''

    @classmethod
    def from_element(cls, element: Mapping[str, Any]) -> WriteResult:
        """Return the result in one element of CouchDB's response to `_bulk_docs`."""
        doc_id = str(element.get('id'))
        if 'rev' in element and not element.get('error'):
            return cls(doc_id, WriteStatus.UNPROVEN if element.get('accepted') else WriteStatus.STORED, element['rev'])
        error = str(element.get('error'))
        status = WriteStatus.CONFLICT if error == 'conflict' else WriteStatus.REFUSED
        return cls(doc_id, status, error=error, reason=str(element.get('reason') or error))

    @classmethod
    def conflict(cls, doc_id: str, reason: str = 'conflict') -> WriteResult:
        """Return the result of a write that conflicts with another one."""
        return cls(doc_id, WriteStatus.CONFLICT, error='conflict', reason=reason)

    @classmethod
    def refused(cls, doc_id: str, error: str, reason: str) -> WriteResult:
        """Return the result of a write that CouchDB, or the client, refuses."""
        return cls(doc_id, WriteStatus.REFUSED, error=error, reason=reason)

    @classmethod
    def refused_by(cls, doc_id: str, exc: CouchDBError, where: str) -> WriteResult:
        """Return the result of a document that CouchDB never stores: its request raised `exc`, of the URL `where`."""
        error = next(name for kind, name in _PERMANENT.items() if isinstance(exc, kind))
        return cls.refused(doc_id, error, str(exc).removeprefix(f'{where}: '))

    @classmethod
    def unknown(cls, doc_id: str) -> WriteResult:
        """Return the result of a write whose request got no response."""
        return cls(doc_id, WriteStatus.UNKNOWN)

    @property
    def is_stored(self) -> bool:
        """Whether the document was stored, on a quorum of nodes or on fewer."""
        return self.status in (WriteStatus.STORED, WriteStatus.UNPROVEN)

    @property
    def is_proven(self) -> bool:
        """Whether a quorum of nodes stored the document, so that no other process has a proven conflicting write."""
        return self.status is WriteStatus.STORED

    @property
    def is_unproven(self) -> bool:
        """Whether fewer nodes than a quorum stored the document."""
        return self.status is WriteStatus.UNPROVEN

    @property
    def is_conflict(self) -> bool:
        """Whether the document had changed since it was read."""
        return self.status is WriteStatus.CONFLICT

    @property
    def is_refused(self) -> bool:
        """Whether CouchDB refuses the document, for now or for ever."""
        return self.status is WriteStatus.REFUSED

    @property
    def is_permanent(self) -> bool:
        """Whether CouchDB would refuse the document however often it was sent."""
        return self.status is WriteStatus.REFUSED and self.error in _PERMANENT.values()

    def exception(self, where: str) -> CouchDBError:
        """Return our error for a result that is not stored; `where` is the URL that its message begins with."""
        return from_answer({'error': self.error, 'reason': self.reason}, where)


class PendingWrite:
    """A document to be written, and what follows from each result of the write. Each kind of write is a subclass.

    Nothing follows from a result whose method a subclass does not define.
    """

    #: Whether the write creates the document, which has a fixed id, so that it is created once.
    creates = False
    #: Documents that are created before, each once.
    copies: Sequence[Mapping[str, Any]] = ()

    def __init__(self, doc: Mapping[str, Any]) -> None:
        self.doc = doc

    def settle(self, result: WriteResult) -> None:
        """Call the method that has the name of the status. The writer calls this once for each write."""
        follow: Callable[[WriteResult], None] = getattr(self, result.status.value)
        follow(result)

    def stored(self, result: WriteResult) -> None:
        """React to `WriteStatus.STORED`."""

    def unproven(self, result: WriteResult) -> None:
        """React to `WriteStatus.UNPROVEN`: usually as if the document was stored on a quorum of nodes."""
        self.stored(result)

    def conflict(self, result: WriteResult) -> None:
        """React to `WriteStatus.CONFLICT`."""

    def refused(self, result: WriteResult) -> None:
        """React to `WriteStatus.REFUSED`."""

    def unknown(self, result: WriteResult) -> None:
        """React to `WriteStatus.UNKNOWN`."""
