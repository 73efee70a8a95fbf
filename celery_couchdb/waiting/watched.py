"""The watched documents: the mailboxes of the threads that wait for them, and those that are watched ahead.

Also when a result may be expected, and how long results are collected. No I/O.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from queue import Empty, SimpleQueue

from kombu_couchdb.errors import CouchDBError

from ..results.documents import Document, is_final
from .read_ahead import Cache, is_success

#: The most documents that are watched although nothing waits for them yet.
_MAX_AHEAD = 1000

#: If results come quickly, the next response shall have about `_RESULTS_PER_LOOK` of them. The pause for that is at the
#: most `_COLLECT_SECONDS`, and there is none if fewer than one result would come in that time.
_COLLECT_SECONDS, _RESULTS_PER_LOOK = 0.04, 10


class ResultMailbox:
    """Documents for one waiting thread or coroutine, from the subscriber's thread."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Document | CouchDBError | None] = SimpleQueue()
        #: The ids of the documents that are watched for it, each with the revision that was delivered last.
        self.revs: dict[str, str] = {}

    def deliver(self, item: Document | CouchDBError) -> None:
        """Put in a document, unless the same revision was delivered before; or the error that prevents delivery."""
        if isinstance(item, dict):
            if self.revs.get(item['_id']) == item['_rev']:
                return
            self.revs[item['_id']] = item['_rev']
        self._put(item)

    def interrupt(self) -> None:
        """End a running `receive` early, or else the next one."""
        self._put(None)

    def _put(self, item: Document | CouchDBError | None) -> None:
        self._items.put(item)

    def receive(self, timeout: float | None) -> list[Document]:
        """Return the delivered documents, waiting up to `timeout` seconds for the first.

        *Raises* a delivered error once no document is left to return.
        """
        docs: list[Document] = []
        try:
            item = self._items.get(timeout != 0, timeout)  # Python 3.10 may block for ever in get(True, 0)
            while True:
                if isinstance(item, CouchDBError):
                    if not docs:
                        raise item
                    self._items.put(item)  # the next call raises it, after these documents
                    return docs
                if item is not None:
                    docs.append(item)
                item = self._items.get_nowait()
        except Empty:
            return docs


class Watched:
    """The documents that one subscriber watches. Thread-safe; `changed` guards it, and may be held by the caller.

    Successes that arrive before a thread waits for them are put into `cache`.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.changed = threading.Condition()
        #: By document id: the mailboxes of the threads that wait for the document.
        self.mailboxes: dict[str, set[ResultMailbox]] = {}
        #: The documents that nothing waits for yet, by id: the latest state that was received, or None.
        self.ahead: dict[str, Document | None] = {}
        #: By document id: the monotonic time at which the wait for the result began.
        self._began: dict[str, float] = {}
        self.expectation = Expectation()
        #: Watched ids whose documents were not read yet.
        self.unread: set[str] = set()
        #: The monotonic time at which the last thread stopped waiting.
        self.left_at = 0.0

    @property
    def ids(self) -> set[str]:
        """The ids of all watched documents."""
        return self.mailboxes.keys() | self.ahead.keys()

    def add(self, mailbox: ResultMailbox, ids: Iterable[str], ahead: Iterable[str]) -> bool:
        """Watch documents for `mailbox`, and others ahead; tell whether one of them must be read.

        What is known of `ids` is delivered at once.
        """
        with self.changed:
            is_new = False
            for doc_id in ids:
                is_read = doc_id in self.ahead
                known = self.ahead.pop(doc_id, None)  # later changes are delivered to the mailbox
                # What was read ahead before the end is forgotten: after the wait nobody must be told an earlier state.
                cached = self._cache.take(doc_id) or {}
                if known is None and is_success(cached):
                    known = cached
                self.mailboxes.setdefault(doc_id, set()).add(mailbox)
                mailbox.revs.setdefault(doc_id, '')
                if known is not None:
                    mailbox.deliver(known)
                elif not is_read:
                    self.unread.add(doc_id)
                    is_new = True
                if known is None or not is_final(known):
                    self._began.setdefault(doc_id, time.monotonic())
            if is_new:
                self._extend(ahead)
            return is_new

    def _extend(self, ahead: Iterable[str]) -> None:
        watched = self.ids
        new = [doc_id for doc_id in ahead if doc_id not in watched and doc_id not in self._cache]
        added = new[: max(0, _MAX_AHEAD - len(self.ahead))]
        self.ahead.update(dict.fromkeys(added))
        self.unread.update(added)

    def remove(self, mailbox: ResultMailbox, ids: Iterable[str]) -> None:
        """Watch these documents for `mailbox` no more."""
        with self.changed:
            for doc_id in list(ids):
                if mailbox.revs.pop(doc_id, None) is not None:
                    self.mailboxes[doc_id].discard(mailbox)
                    if not self.mailboxes[doc_id]:
                        del self.mailboxes[doc_id]
                        self._began.pop(doc_id, None)
                        self.unread.discard(doc_id)
            if not self.mailboxes:
                self.left_at = time.monotonic()

    def take_unread(self) -> set[str]:
        """Return the ids whose documents were not read yet, and count them as read."""
        with self.changed:
            unread, self.unread = self.unread, set()
            return unread

    def deliver(self, docs: Iterable[tuple[str, Document | None]]) -> None:
        """Deliver documents to their mailboxes, or keep those that are watched ahead.

        They are given with their ids; None was deleted.
        """
        with self.changed:
            for doc_id, doc in docs:
                if doc_id in self.ahead:
                    self._keep(doc_id, doc)
                elif doc is not None:
                    for mailbox in tuple(self.mailboxes.get(doc_id, ())):
                        mailbox.deliver(doc)
                    if is_final(doc) and (began := self._began.pop(doc_id, None)) is not None:
                        self.expectation.learn(time.monotonic() - began)

    def _keep(self, doc_id: str, doc: Document | None) -> None:
        """Keep the state of a document; a success is watched no longer."""
        if doc is None or not is_success(doc):
            self.ahead[doc_id] = doc
            return
        self._cache.add([doc])
        del self.ahead[doc_id]

    def fail(self, errors: Mapping[str, CouchDBError]) -> None:
        """Deliver errors, by document id, in the place of documents, which are not watched any more."""
        with self.changed:
            failed = [(mailbox, doc_id) for doc_id in errors for mailbox in self.mailboxes.get(doc_id, ())]
            for mailbox, doc_id in failed:
                self.remove(mailbox, [doc_id])
            for mailbox, error in {(mailbox, errors[doc_id]) for mailbox, doc_id in failed}:
                mailbox.deliver(error)

    def drop(self, doc_id: str) -> None:
        """Watch a document no more if nothing waits for it: this process deletes it."""
        with self.changed:
            self.ahead.pop(doc_id, None)
            if doc_id not in self.mailboxes:
                self.unread.discard(doc_id)

    def forget_states(self) -> None:
        """Forget what is known of the documents that are watched ahead, because they are read again."""
        with self.changed:
            self.ahead = dict.fromkeys(self.ahead)

    def clear_ahead(self) -> None:
        """Watch only what threads wait for."""
        with self.changed:
            self.unread -= self.ahead.keys()
            self.ahead.clear()

    def others(self) -> int:
        """Return how many documents are watched besides one for each waiting thread."""
        with self.changed:
            return len(self.ahead) + len(self.mailboxes) - len(set().union(*self.mailboxes.values()))


class Expectation:
    """The mean of the last waits and their mean deviation from it, in seconds, as TCP computes its timeout."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0

    @property
    def seconds(self) -> float:
        """How long a wait takes at least, probably."""
        return self._mean - self._deviation

    def learn(self, seconds: float) -> None:
        """Learn from a result that came so many seconds after the wait began."""
        if not self._mean:
            self._mean, self._deviation = seconds, seconds / 2
            return
        error = seconds - self._mean
        self._mean += error / 8
        self._deviation += (abs(error) - self._deviation) / 4


class Pacing:
    """Measures how quickly results come. A single result is never delayed."""

    def __init__(self) -> None:
        #: When the last response with results came, and the mean seconds from one result to the next.
        self._last, self._gap = float('-inf'), 1.0

    def pause(self, count: int, others: int, now: float) -> float:
        """Return the pause in seconds after a response at the time `now`.

        The response had `count` results. `others` is how many documents are watched besides one for each waiting
        thread.
        """
        if count:
            gap, self._last = (now - self._last) / count, now
            # One slow result ends the pauses at once, and some quick ones are needed to begin them again.
            self._gap = (self._gap + gap) / 2 if gap < self._gap else min(1.0, gap)
        if others > 1 and self._gap <= _COLLECT_SECONDS:
            return min(_COLLECT_SECONDS, min(_RESULTS_PER_LOOK, others) * self._gap)
        return 0.0
