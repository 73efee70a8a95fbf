"""Pending writes: decisions about messages that are not stored yet; and their commits, together with claims.

A worker stores the result of a task a moment after the task has ended (`celery_couchdb.results.result_queue`). If it
stored the acknowledgement before and were killed then, the result would be lost. So an acknowledgement, or a dead
letter, waits until everything is stored that was handed over before it. A release does not wait: the task runs again.
Nor does the ack of a task that has only *begun*: until it is stored, the task runs again if its worker is killed.

kombu's thread adds decisions, and the I/O thread writes them. Each write gets exactly one result. It is *unknown* if
there was no response: a decision is then written again. A decision in conflict is made again if this consumer still
holds the message, because a publisher or an operator has only changed its document.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from ..couchdb.client import Document
from ..couchdb.write_result import MISSING_STUB, PendingWrite, WriteResult
from ..documents import dead_letter, unique_merge, workitem
from ..errors import CouchDBError
from ..flow import Flow
from ..leases.lease import Lease
from ..leases.sweeper import UnprovenClaims
from ..log import get_logger
from ..queues.store import Store
from ..queues.unique_jobs import keep_copies
from ..values import revision_parts
from .wakeup import Wakeup

logger = get_logger(__name__)

_LOST_CLAIM = 'this consumer lost its claim of message %s before the outcome was stored: it may run again'

#: Returns the document that makes a decision about a claimed message.
Change = Callable[[Document], Mapping[str, Any]]

#: Called once, in the I/O thread, with whether the ack of a task that has begun is stored.
Confirm = Callable[[bool], None]


class Precondition(Protocol):
    """Something of this process that is stored elsewhere, in the order in which it is handed over.

    `celery_couchdb.results.result_queue` is the one there is, once for each result backend of a process.
    """

    def mark(self) -> int | None:
        """Return a mark for everything that was handed over before this call; None if that cannot be told now."""

    def is_stored(self, mark: int) -> bool:
        """Tell whether everything up to a mark is stored."""

    def wait(self) -> bool:
        """Wait until everything is stored that was handed over before; return False if it is given up."""


_preconditions: list[Precondition] = []

#: The pending writes of all consumers of this process. Lists need no lock, neither here nor in a forked child.
_all: list[weakref.ref[PendingWrites]] = []


def register(precondition: Precondition) -> None:
    """Let decisions of all consumers of this process wait for `precondition`; it calls `wake` after each write."""
    if precondition not in _preconditions:
        _preconditions.append(precondition)


def unregister(precondition: Precondition) -> None:
    """Let decisions wait for `precondition` no more."""
    if precondition in _preconditions:
        _preconditions.remove(precondition)
    wake()


def wake() -> None:
    """Wake the consumers whose decisions may be written now."""
    for reference in _all.copy():
        if (writes := reference()) is not None:
            writes.look()


class Disposition(PendingWrite):
    """The disposition of a message that this consumer held: acknowledged, released or a dead letter."""

    def __init__(self, writes: PendingWrites, claimed: Document, change: Change, confirm: Confirm | None) -> None:
        self._writes, self._change, self.confirm = writes, change, confirm
        self.is_unique = workitem.is_unique(claimed)
        self.make(claimed)

    def make(self, claimed: Document) -> None:
        """Make the decision about this revision of the claimed document."""
        #: The document as it was claimed, and whether an earlier attempt to write its next state may have been stored.
        self.claimed, self.is_repeated = claimed, False
        changed = self._change(claimed)
        # The acknowledgement of a unique job puts the next message in its place, so that it looks like a release.
        self.is_release = workitem.is_waiting(changed) and not self.is_unique
        # A unique job that is done, or dead with other messages in `next`, makes two documents: its copy, then the job
        # with the next message or its deletion.
        *self.copies, self.doc = dead_letter.apart(changed)

    @property
    def has_begun(self) -> bool:
        """Whether it is the ack of a task that has begun. That of a unique job is no end: the cycle writes it."""
        return self.confirm is not None and not self.is_unique

    def stored(self, result: WriteResult) -> None:
        """End the decision. A message that waits again may be claimed."""
        if workitem.is_waiting(self.doc):
            self._writes.released.append({**self.doc, '_rev': result.rev})
        self.end(stored=True)

    def conflict(self, result: WriteResult) -> None:
        """Find out whether others have changed the document, or an earlier attempt was stored."""
        if not self.is_repeated or self.is_unique:  # publishers change unique jobs
            self._writes.changed.append(self)
        elif self.confirm is not None:
            self._writes.doubtful.append(self)
        else:
            self.end(stored=False)  # it is in conflict with the earlier attempt: that needs no warning
            return
        self._writes.wakeup.set()

    def refused(self, result: WriteResult) -> None:
        """Write the dead letter of a task that failed without its texts; log that another outcome is not stored."""
        change = self._change
        if dead_letter.shortened(change(self.claimed)) is None:
            logger.error('the outcome of message %s cannot be stored: %s', self.doc['_id'], result.reason)
            self.end(stored=False)
            return
        self._change = lambda doc: dead_letter.shortened(change(doc)) or change(doc)
        self.make(self.claimed)
        self._writes.queue(self)
        self._writes.wakeup.set()

    def unknown(self, result: WriteResult) -> None:
        """Write it again."""
        self.is_repeated = True
        self._writes.queue(self)

    def end(self, *, stored: bool) -> None:
        """Forget the decision: it is stored, or this consumer has lost its claim of the message."""
        self._writes.unstored.discard(self.doc['_id'])
        if self.confirm is not None:
            self.confirm(stored)


class KeptFailure(PendingWrite):
    """The creation of the dead letter of a task that was acknowledged early; its id makes it one."""

    creates, is_release, is_unique, has_begun, is_repeated = True, False, False, False, False

    def __init__(self, writes: PendingWrites, doc: Document) -> None:
        super().__init__(doc)
        self._writes = writes

    def stored(self, result: WriteResult) -> None:
        """End the write."""
        self._writes.unstored.discard(self.doc['_id'])

    def conflict(self, result: WriteResult) -> None:
        """End the write: an earlier attempt was stored."""
        self.stored(result)

    def refused(self, result: WriteResult) -> None:
        """Write it without its texts, or give it up."""
        self._writes.unstored.discard(self.doc['_id'])
        if shorter := dead_letter.shortened(self.doc):
            self._writes.keep(shorter)
        else:
            logger.error('the message %s of a task that failed cannot be kept: %s', self.doc['_id'], result.reason)

    def unknown(self, result: WriteResult) -> None:
        """Write it again."""
        self._writes.queue(self)


class PendingWrites:
    """Decisions about messages, which wait for `preconditions`: those of this process.

    `add`, `keep`, `unstored`, `look` and `wait` are for any thread, the rest is for the I/O thread alone.
    """

    def __init__(self, wakeup: Wakeup, flow: Flow, preconditions: list[Precondition] = _preconditions) -> None:
        self.wakeup, self._flow, self._preconditions = wakeup, flow, preconditions
        self._writes: deque[Disposition | KeptFailure] = deque()
        #: The acks of tasks that have begun.
        self._begun: deque[PendingWrite] = deque()
        #: Decisions that wait, and the marks that they wait for; None: the mark is not known yet.
        self._waiting: list[tuple[list[Disposition | KeptFailure], dict[Precondition, int | None]]] = []
        _all.append(weakref.ref(self, _all.remove))
        #: Messages whose release was stored, with their new revisions.
        self.released: list[Document] = []
        #: Decisions in conflict: perhaps others have changed the document; and acks of tasks that have begun of which
        #: the responses leave it open whether they are stored.
        self.changed: list[Disposition] = []
        self.doubtful: list[Disposition] = []
        #: The ids of messages with a decision that CouchDB has not confirmed yet.
        self.unstored: set[str] = set()

    def add(self, claimed: Document, change: Change, confirm: Confirm | None = None) -> None:
        """Add the write of `change(claimed)`, for a message that this consumer does not hold any more.

        With `confirm` it acknowledges a task that has begun. `confirm(False)` is called if this consumer had lost its
        claim before, or if CouchDB refuses the write.
        """
        self.unstored.add(claimed['_id'])
        self.queue(Disposition(self, claimed, change, confirm))

    def keep(self, doc: Document) -> None:
        """Add the creation of `doc`, the dead letter of a task that was acknowledged early."""
        self.unstored.add(doc['_id'])
        self.queue(KeptFailure(self, doc))
        self.wakeup.set()

    def queue(self, write: Disposition | KeptFailure) -> None:
        """Queue a write, for the first time or again."""
        (self._begun if write.has_begun else self._writes).append(write)
        if write.has_begun and not write.is_repeated:
            self.wakeup.interrupt()

    @property
    def has_begun(self) -> bool:
        """Whether acks of tasks that have begun are to be written."""
        return bool(self._begun)

    def take_begun(self) -> list[PendingWrite]:
        """Return the acks of tasks that have begun, and forget them: the caller settles each."""
        return [self._begun.popleft() for _ in range(len(self._begun))]

    def take_ready(self) -> list[PendingWrite]:
        """Return the other pending writes that may be written now, in the same way."""
        found: list[PendingWrite] = []
        waiting: list[Disposition | KeptFailure] = []
        for write in [self._writes.popleft() for _ in range(len(self._writes))]:
            if write.is_release or not self._preconditions:
                found.append(write)
            else:
                waiting.append(write)
        if waiting:
            self._waiting.append((waiting, dict.fromkeys(self._preconditions)))
        for group in list(self._waiting):
            if self._is_ready(group[1]):
                found += group[0]
                self._waiting.remove(group)
        return found

    def look(self) -> None:
        """Wake the I/O thread if decisions wait: some can perhaps be written now."""
        waiting = [write for writes, _ in list(self._waiting) for write in writes]
        if waiting:
            # The messages in `next` of a unique job wait for its ack. Others share the next cycle of a flow.
            self.wakeup.set(0.0 if any(write.is_unique for write in waiting) else self._flow.pause)

    def wait(self) -> bool:
        """Wait until all decisions can be written; return False if what they wait for is given up."""
        waited = [each.wait() for each in tuple(self._preconditions)]  # for each of them, also if one is given up
        return all(waited)

    def _is_ready(self, marks: dict[Precondition, int | None]) -> bool:
        for each, mark in marks.items():
            if mark is None:
                marks[each] = each.mark()
        return all(
            each not in self._preconditions or (mark is not None and each.is_stored(mark))
            for each, mark in marks.items()
        )

    def settle_doubtful(self, leaves: Callable[[str], list[Document]]) -> None:
        """Read the messages of tasks that have begun whose acks were in conflict, and tell whether these are stored.

        `leaves(id)` reads the leaf revisions of a document; *raises* what it raises, and can then be called again.
        """
        while self.doubtful:
            claimed = self.doubtful[-1].claimed
            ended = [leaf for leaf in leaves(claimed['_id']) if leaf.get('_deleted') or workitem.is_done(leaf)]
            decision = self.doubtful.pop()
            # An ack is the revision after that of the claim. Whoever else ends a message must claim it before.
            next_number = revision_parts(claimed['_rev'])[0] + 1
            stored = any(revision_parts(leaf['_rev'])[0] == next_number for leaf in ended)
            if not stored:
                logger.warning(_LOST_CLAIM, claimed['_id'])
            decision.end(stored=stored)

    def retry_changed(self, fetch: Callable[[list[str]], list[Document | None]]) -> None:
        """Read the messages that others have changed, and add the writes for those that this consumer still holds.

        A publisher changes a unique job, and an operator marks a message as removed. `fetch(ids)` reads documents;
        *raises* what it raises, and can then be called again.
        """
        found = fetch([decision.claimed['_id'] for decision in self.changed]) if self.changed else []
        changed, self.changed = self.changed, []
        for decision, current in zip(changed, found, strict=True):
            claimed = decision.claimed
            if current is not None and current.get('claimed') == claimed['claimed']:
                decision.make(current)
                self.queue(decision)
                continue
            if decision.confirm is not None:
                self.doubtful.append(decision)
                continue
            decision.end(stored=False)
            # If a unique job has another task now, or is deleted, an earlier attempt to write the decision was stored.
            # Other messages are read here only if their first write was in conflict.
            if decision.is_unique and (current is None or workitem.task_id(current) != workitem.task_id(claimed)):
                continue
            logger.warning(_LOST_CLAIM, claimed['_id'])

    def log_failures_left(self) -> None:
        """Log which failures of tasks that were acknowledged early are not kept, because their results still wait."""
        for write in (write for writes, _ in self._waiting for write in writes if write.creates):
            text = 'the message %s of a task that failed is not kept: its result was not stored'
            logger.error(text, write.doc['_id'])

    def take_released(self) -> list[Document]:
        """Return the messages whose release was stored since the last call, with their new revisions."""
        released, self.released = self.released, []
        return released


def give_up(writes: Iterable[PendingWrite]) -> None:
    """Tell these writes that they got no response: CouchDB may have stored them."""
    for write in writes:
        write.settle(WriteResult.unknown(write.doc['_id']))


class Commits:
    """The writes of one consumer, and what CouchDB stored when a response was lost; for the I/O thread alone."""

    def __init__(self, store: Store, lease: Lease, unproven: UnprovenClaims) -> None:
        self._store, self._lease, self._unproven = store, lease, unproven
        #: Whether CouchDB may have stored claims that this consumer does not know of: their responses were lost.
        self.has_orphans = False
        #: Whether CouchDB may have stored some of the pending writes.
        self.uncertain = False

    def on_outage(self) -> None:
        """Note that a response was lost: which writes CouchDB stored is unknown."""
        self.has_orphans = self.uncertain = True

    def write_begun(self, writes: PendingWrites) -> None:
        """Write the acks of tasks that have begun, but after a lost response: then the next cycle does.

        *Raises* what `write` raises.
        """
        if not self.uncertain:
            self.write(writes.take_begun())

    def on_orphans(self) -> None:
        """Note that the database has claims of this consumer that the consumer does not know of."""
        self.has_orphans = True

    def write(self, *lists: list[PendingWrite]) -> None:
        """Write these lists and empty them; *raises* `CouchDBError` if some writes got no response."""
        writes: dict[str, PendingWrite] = {}
        for write in itertools.chain(*lists):
            doc_id = write.doc['_id']
            if writes.setdefault(doc_id, write) is not write:
                # Two writes of one document: send only the first; the second is in conflict, as it would be in CouchDB.
                write.settle(WriteResult.conflict(doc_id))
        for each in lists:
            each.clear()
        docs = [write.doc for write in writes.values() if not write.creates]
        copies = [doc for write in writes.values() for doc in ([write.doc] if write.creates else write.copies)]
        # The next publisher of a unique job may write over its tombstone, so its markers are stored before.
        markers = [marker for doc in docs if doc.get('_deleted') for marker in unique_merge.markers(doc)]
        failure = None
        try:
            kept = keep_copies(self._store.client, copies)
            if markers:
                self._store.client.create_once(markers)
            results: Sequence[WriteResult] = [*kept, *(self._store.client.bulk(docs) if docs else ())]
        except CouchDBError as exc:
            results, failure = exc.answered, exc
        for result in results:
            self.has_orphans |= result.error == MISSING_STUB  # some nodes may have stored this claim
            if result.id in writes:
                writes.pop(result.id).settle(result)
        give_up(writes.values())
        if failure is not None:
            raise failure

    def drop_stored(self, pending: list[PendingWrite]) -> None:
        """After a lost response, see `uncertain`: remove from `pending` the writes that would be in conflict.

        CouchDB has stored them, or another process has changed the documents.
        """
        writable = self._store.client.still_writable([write.doc for write in pending])
        for write, is_writable in zip(pending, writable, strict=True):
            if not is_writable:
                write.settle(WriteResult.conflict(write.doc['_id']))
        pending[:] = itertools.compress(pending, writable)
        self.uncertain = False

    def release_orphans(self, known: set[str]) -> None:
        """Release the claims of this consumer that it does not know of: the responses to them were lost.

        `known` has the ids of those that it knows.
        """
        known = known | {*self._unproven}
        orphans = [doc for doc in self._store.claims(self._lease.id) if doc['_id'] not in known]
        if self._store.client.replicas > 1:  # CouchDB may have confirmed another consumer's claim of the same message
            for doc in orphans:
                self._unproven.add(doc['_id'], doc['_rev'])
        else:
            self._store.release(orphans)
            for doc in orphans:
                logger.debug('releasing message %s: the response to its claim was lost', doc['_id'])
        self.has_orphans = False
