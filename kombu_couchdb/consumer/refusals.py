"""Refused slots and starts: what becomes of a message whose slot or start CouchDB refuses to store.

A refusal that can pass, such as that of a `validate_doc_update` function, is logged, and the messages of the key wait:
one of them is tried again after `PAUSE_SECONDS`. Other keys go on. If CouchDB would refuse the document however often
it was sent, the message becomes a dead letter.
"""

from __future__ import annotations

import time

from ..couchdb.client import Client, Document
from ..couchdb.write_result import WriteResult
from ..documents import dead_letter
from ..documents.dead_letter import malformed
from ..log import get_logger
from .pending_writes import PendingWrite

__all__ = ['PAUSE_SECONDS', 'Refusals']

logger = get_logger(__name__)

#: How long the messages of a key wait after a refusal that can pass, in seconds.
PAUSE_SECONDS = 30.0


class Refusals:
    """The refusals of one kind of documents, `what` in log lines; for the I/O thread of one consumer alone."""

    def __init__(self, client: Client, what: str) -> None:
        self._client, self._what = client, what
        #: By key: the monotonic time of the next attempt.
        self._until: dict[str, float] = {}
        self._permanent: dict[str, str] = {}  # by message id: the reason
        self._logged_at = float('-inf')

    def note(self, key: str, message_ids: list[str], result: WriteResult) -> None:
        """Note that CouchDB refused the document of a key, which was written for these messages."""
        if result.is_permanent:
            self._permanent.update(dict.fromkeys(message_ids, result.reason))
            return
        now = time.monotonic()
        self._until = {name: at for name, at in self._until.items() if at > now}
        self._until[key] = now + PAUSE_SECONDS
        if now - self._logged_at >= PAUSE_SECONDS:
            self._logged_at = now
            logger.error(
                '%s of key %r was not stored, and its messages wait: CouchDB refuses it (%s); trying again every %d s',
                self._what,
                key,
                result.reason,
                PAUSE_SECONDS,
            )

    def until(self, key: str) -> float:
        """Return the monotonic time until which the messages of a key wait; in the past if they need not wait."""
        return self._until.get(key, float('-inf'))

    def waits(self, key: str) -> bool:
        """Whether the messages of a key wait."""
        return self.until(key) > time.monotonic()

    def concerns(self, doc: Document, key: str) -> bool:
        """Whether a document for a message of this key was refused."""
        return doc['_id'] in self._permanent or self.waits(key)

    def set_aside(self, doc: Document) -> PendingWrite | None:
        """Return the write that makes a message a dead letter; None if its document was not refused for good."""
        refused = self._permanent.pop(doc['_id'], None)
        if refused is None:
            return None
        reason = malformed(f'{self._what} of this message cannot be stored: {refused}')

        def on_result(result: WriteResult) -> None:
            if result.is_stored:
                logger.error('message %s in queue %r was made a dead letter: %s', doc['_id'], doc.get('queue'), reason)
            elif result.is_refused:
                self._client.unusable.note(doc['_id'], doc['_rev'], result.reason)

        return dead_letter.made_of(doc, reason, self._client.clock.now()), on_result
