"""The watched documents: for which mailboxes, which are watched ahead, and which were not read yet. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from kombu_couchdb.errors import CouchDBError

from ..results.documents import Document, is_final
from .expectation import Expectation
from .mailbox import Mailbox
from .received import Ahead, Received

__all__ = ['Watched']

#: The pause between two requests that ask for documents, at least, in seconds for each document. For 1,000 documents
#: that do not exist, such a request costs the server 12 ms, measured on CouchDB 3.5.
_PAUSE_PER_DOC_SECONDS = 0.0005


class Watched:
    """The documents that one subscriber watches. Thread-safe; `changed` guards it, and may be held by the caller."""

    def __init__(self, received: Received) -> None:
        self.changed = threading.Condition()
        #: By document id: the mailboxes of the threads that wait for the document.
        self.mailboxes: dict[str, set[Mailbox]] = {}
        #: The documents that nothing waits for yet.
        self.ahead = Ahead(received)
        #: By document id: the monotonic time at which the wait for the result began.
        self._began: dict[str, float] = {}
        self.expectation = Expectation()
        #: Watched ids whose documents were not read yet.
        self.unread: set[str] = set()
        #: The monotonic time at which the last thread stopped waiting.
        self.left_at = 0.0

    def __bool__(self) -> bool:
        """Return whether anything is watched."""
        return bool(self.mailboxes or self.ahead)

    @property
    def ids(self) -> set[str]:
        """The ids of all watched documents."""
        return self.mailboxes.keys() | self.ahead.keys()

    def add(
        self, mailbox: Mailbox, ids: Iterable[str], ahead: Iterable[str], take: Callable[[str], Document | None]
    ) -> bool:
        """Watch documents for `mailbox`, and others ahead; tell whether one of them must be read.

        `take(doc_id)` returns a document that was received before. What is known of `ids` is delivered at once.
        """
        with self.changed:
            is_new = False
            for doc_id in ids:
                self.mailboxes.setdefault(doc_id, set()).add(mailbox)
                known = take(doc_id)
                if known is None and doc_id in self.ahead:
                    known = self.ahead.pop(doc_id)  # later changes are delivered to the mailbox
                elif known is None:
                    self.unread.add(doc_id)
                    is_new = True
                if known is not None:
                    mailbox.deliver(known)
                if known is None or not is_final(known):
                    self._began.setdefault(doc_id, time.monotonic())
            if is_new:
                self.unread |= self.ahead.extend(doc_id for doc_id in ahead if doc_id not in self.mailboxes)
            return is_new

    def remove(self, mailbox: Mailbox, ids: Iterable[str]) -> None:
        """Watch these documents for `mailbox` no more."""
        with self.changed:
            for doc_id in ids:
                mailboxes = self.mailboxes.get(doc_id, set())
                mailboxes.discard(mailbox)
                mailbox.forget_revision(doc_id)
                if not mailboxes:
                    self.mailboxes.pop(doc_id, None)
                    self._began.pop(doc_id, None)
                    self.unread.discard(doc_id)
            if not self.mailboxes:
                self.left_at = time.monotonic()

    def has(self, mailbox: Mailbox, doc_id: str) -> bool:
        """Tell whether a document is watched for `mailbox`."""
        return mailbox in self.mailboxes.get(doc_id, ())

    def take_unread(self) -> set[str]:
        """Return the ids whose documents were not read yet, and count them as read."""
        with self.changed:
            unread, self.unread = self.unread, set()
            return unread

    def read_again(self, ids: set[str]) -> None:
        """Count those of these documents that are watched as not read."""
        with self.changed:
            self.unread |= ids & self.ids

    def deliver(self, docs: Iterable[Document | None], asked: float | None = None) -> int:
        """Deliver documents to their mailboxes, or keep those that are watched ahead; return the number of results.

        `asked` is the monotonic time at which they were asked for before. Without it, they come from the feed.
        """
        with self.changed:
            number = len(self.ahead)
            for doc in docs:
                if doc is not None and not doc.get('_deleted'):
                    for mailbox in tuple(self.mailboxes.get(doc['_id'], ())):
                        mailbox.deliver(doc)
                    self.ahead.keep(doc)
                    if is_final(doc) and (began := self._began.pop(doc['_id'], None)) is not None:
                        number += 1
                        most = time.monotonic() - began
                        self.expectation.learn(most if asked is None else max(0.0, asked - began), most)
            return number - len(self.ahead)

    def due(self, asked: float) -> float:
        """Return the monotonic time at which to ask for the documents, if they were asked for last at the time `asked`.

        It is the time for the first of the awaited results, and later if there are many documents.
        """
        with self.changed:
            first = min(
                (began + self.expectation.next(max(0.0, asked - began)) for began in self._began.values()),
                default=time.monotonic() + 1.0,  # everything was delivered
            )
            return max(first, asked + len(self.ids) * _PAUSE_PER_DOC_SECONDS)

    def fail(self, errors: Mapping[str, CouchDBError]) -> None:
        """Deliver errors, by document id, in the place of documents, which are not watched any more."""
        with self.changed:
            failed = {(mailbox, errors[doc_id]) for doc_id in errors for mailbox in self.mailboxes.pop(doc_id, ())}
            self.unread -= errors.keys()
            for doc_id in errors:
                self._began.pop(doc_id, None)
        for mailbox, error in failed:
            mailbox.deliver(error)

    def drop(self, doc_id: str) -> None:
        """Forget what was received of a document."""
        with self.changed:
            self.ahead.drop(doc_id)
            if doc_id not in self.mailboxes:
                self.unread.discard(doc_id)

    def forget_states(self, ids: Iterable[str] | None = None) -> None:
        """Forget what is known of the documents that are watched ahead: of these, or of all."""
        with self.changed:
            self.ahead.forget_states(list(self.ahead) if ids is None else ids)

    def clear_ahead(self) -> None:
        """Watch only what threads wait for."""
        with self.changed:
            self.unread -= self.ahead.keys() - self.mailboxes.keys()
            self.ahead.clear()

    def others(self) -> int:
        """Return how many documents are watched besides one for each waiting thread."""
        with self.changed:
            return len(self.ahead) + len(self.mailboxes) - len(set().union(*self.mailboxes.values()))
