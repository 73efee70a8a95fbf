"""Subscriber to the changes feed: one thread that delivers results to everything that waits in this process.

The subscriber watches only the documents that something waits for, and sends no requests when there are none. For up
to `_MAX_DOC_IDS` documents, CouchDB looks each of them up by its id, regardless of the length of the history, and
responds at once if it exists: one request both reads the documents and waits for them. For more documents it is
cheaper to receive every change, without the documents, and to read those that are watched.

While the connection is down no change is lost: afterwards all watched documents are read again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.changes import Longpoll
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import Shared, reset_in_child
from kombu_couchdb.errors import RETRIED, AccessDenied, AnswerTooLarge, ConfigurationError, CouchDBError, NotCouchDB
from kombu_couchdb.log import get_logger

from ..options import Options
from ..results.documents import Document
from ..results.store import Store

__all__ = ['Mailbox', 'Subscriber']

logger = get_logger(__name__)

#: Up to this number of ids, CouchDB looks each of them up. It is the default limit of CouchDB up to 3.4; 3.5 has 1,000.
_MAX_DOC_IDS = 100

#: The most changes in one response while every change is received.
_MAX_CHANGES = 2000

#: After a response the subscriber pauses, in seconds for each watched document, with a minimum and a maximum. During
#: the pause, threads that have received their documents stop watching, and changes in quick succession are collected.
_PAUSE_PER_DOC_SECONDS, _MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1 / 20_000, 0.002, 0.05

#: If new ids interrupt a wait that took less time than `_SHORT_WAIT_SECONDS`, more new ids are likely. Then the
#: subscriber polls, with a pause of `_POLL_SECONDS` after each request, until no new ids come. A wait would be
#: interrupted again.
_SHORT_WAIT_SECONDS, _POLL_SECONDS = 0.1, 0.015

#: How long the thread runs on without watched documents, in seconds.
_IDLE_SECONDS = 10.0

#: The first and the longest pause after an error, in seconds.
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 2.0


class Mailbox:
    """Documents for one waiting thread, from the subscriber's thread."""

    def __init__(self) -> None:
        self._items: deque[Document | CouchDBError] = deque()
        self._condition = threading.Condition()
        self._revs: dict[str, str] = {}
        self._interrupted = False

    def deliver(self, item: Document | CouchDBError) -> None:
        """Put in a document, unless the same revision was delivered before; or the error that prevents delivery."""
        if isinstance(item, dict):
            if self._revs.get(item['_id']) == item['_rev']:
                return
            self._revs[item['_id']] = item['_rev']
        with self._condition:
            self._items.append(item)
            self._condition.notify()

    def interrupt(self) -> None:
        """End a running `receive` early, or else the next one."""
        with self._condition:
            self._interrupted = True
            self._condition.notify()

    def receive(self, timeout: float | None) -> list[Document]:
        """Return the delivered documents, waiting up to `timeout` seconds for the first.

        *Raises* a delivered error once no document is left to return.
        """
        with self._condition:
            if not self._items and not self._interrupted:
                self._condition.wait(timeout)
            self._interrupted = False
            items = list(self._items)
            self._items.clear()
        docs = [item for item in items if isinstance(item, dict)]
        errors = [item for item in items if not isinstance(item, dict)]
        if errors and not docs:
            raise errors[0]
        with self._condition:
            self._items.extendleft(errors[:1])  # the next call raises it, after these documents
        return docs

    def forget_revision(self, doc_id: str) -> None:
        """Forget which revision of a document was delivered: nothing watches it any more."""
        self._revs.pop(doc_id, None)


class Subscriber:
    """Delivers watched documents to mailboxes: first the existing document, then every change of it. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reset()
        reset_in_child(self)

    @classmethod
    def of(cls, address: Address, options: Options) -> Subscriber:
        """Return the only subscriber of this process to a database. Celery may make a backend for each thread."""
        return _subscribers.of(
            (address, repr(options)),
            lambda: cls(Store(Client(address, options.request_timeout, options.connect_timeout), options)),
        )

    def reset(self) -> None:
        """Start over in a forked child: the thread and the mailboxes belong to the parent process."""
        self._condition = threading.Condition()
        self._longpoll = Longpoll(self.store.client)
        self._mailboxes: dict[str, set[Mailbox]] = {}
        #: Watched ids whose documents were not read yet.
        self._unread: set[str] = set()
        self._running = False
        #: The update sequence from which the next wait starts, for the watched ids except `_unread`.
        self._since: Any = None
        #: Whether every change is received, instead of those of the watched ids.
        self._receives_all = False
        #: Up to this number of watched ids, their documents are requested by id.
        self._max_doc_ids = _MAX_DOC_IDS
        #: Whether new ids come too often to wait for changes.
        self._polls = False

    def watch(self, mailbox: Mailbox, ids: Iterable[str]) -> None:
        """Deliver the documents with these ids to `mailbox`, until `unwatch`."""
        with self._condition:
            for doc_id in ids:
                self._mailboxes.setdefault(doc_id, set()).add(mailbox)
                self._unread.add(doc_id)
            self._longpoll.interrupt()
            self._condition.notify_all()
            if not self._running:
                threading.Thread(target=self._run, name='celery-couchdb-results', daemon=True).start()
                self._running = True

    def unwatch(self, mailbox: Mailbox, ids: Iterable[str]) -> None:
        """Stop delivering the documents with these ids to `mailbox`."""
        with self._condition:
            for doc_id in ids:
                mailboxes = self._mailboxes.get(doc_id, set())
                mailboxes.discard(mailbox)
                mailbox.forget_revision(doc_id)
                if not mailboxes:
                    self._mailboxes.pop(doc_id, None)
                    self._unread.discard(doc_id)
            if not self._mailboxes:
                self._longpoll.interrupt()

    def is_watching(self, mailbox: Mailbox, doc_id: str) -> bool:
        """Tell whether a document is still delivered to `mailbox`: not after an error was delivered in its place."""
        return mailbox in self._mailboxes.get(doc_id, ())

    # -- in the subscriber's thread

    def _run(self) -> None:
        pause, retry = 0.0, _MIN_RETRY_SECONDS
        while self._wait_for_mailboxes():
            time.sleep(pause)  # limits the number of requests
            with self._condition:
                watched, unread, self._unread = set(self._mailboxes), self._unread, set()
                generation = self._longpoll.generation
            if not watched:
                continue
            try:
                pause = self._request(watched, unread, generation)
                if retry > _MIN_RETRY_SECONDS:
                    logger.info('results are received again')
                retry = _MIN_RETRY_SECONDS
            except RETRIED as exc:
                if isinstance(exc, AnswerTooLarge) and self._max_doc_ids:
                    # The results are large. From now on receive changes without documents.
                    self._max_doc_ids, pause = 0, 0.0
                    continue
                level = logging.WARNING if retry == _MIN_RETRY_SECONDS else logging.DEBUG  # one warning for each outage
                logger.log(level, 'results are not received: %s; trying again until CouchDB responds', exc)
                self._since, pause, retry = None, retry, min(retry * 2, _MAX_RETRY_SECONDS)
            except Exception as exc:  # after any error: a thread must not wait for documents that never come
                self._fail(watched, exc)

    def _wait_for_mailboxes(self) -> bool:
        """Wait until a document is watched; return False if the thread should end, because none was for a long time."""
        with self._condition:
            if not self._mailboxes:
                self._since, self._max_doc_ids = None, _MAX_DOC_IDS
                self._condition.wait_for(lambda: self._mailboxes, _IDLE_SECONDS)
            if not self._mailboxes:
                self._running = False
            return self._running

    def _request(self, watched: set[str], unread: set[str], generation: int) -> float:
        """Deliver existing documents, wait for changes and deliver them; return the pause after that, in seconds."""
        many = len(watched) > self._max_doc_ids
        if self._since is None or many != self._receives_all:
            self._since, self._receives_all, unread = self.store.sequence() if many else 0, many, watched
        if many:
            # Read from every copy: the feed never reports a change that its node had received before `_since`, and a
            # read from the other nodes only may miss that change.
            self._deliver(self.store.read_many(unread, everywhere=True))
        since = 0 if unread and not many else self._since
        body = {} if many else {'doc_ids': sorted(watched)}
        limit = _MAX_CHANGES if many else len(watched)
        if unread and self._polls:
            # New ids cannot interrupt this request, so threads that began to wait earlier receive what exists for them.
            self._process(self.store.client.changes(since, body, limit, docs=not many), watched)
            return _POLL_SECONDS
        began = time.monotonic()
        response = self._longpoll.wait(generation, since, body, docs=not many, limit=limit)
        self._polls = response is None and time.monotonic() - began < _SHORT_WAIT_SECONDS
        if response is None:
            if unread and not many:
                self._since = None  # the unread documents are still unread
            return 0.0
        self._process(response, watched)
        return max(_MIN_PAUSE_SECONDS, min(len(watched) * _PAUSE_PER_DOC_SECONDS, _MAX_PAUSE_SECONDS))

    def _process(self, response: Document, watched: set[str]) -> None:
        """Deliver the documents that a response of the changes feed names."""
        rows = [row for row in response['results'] if row['id'] in watched and not row.get('deleted')]
        self._since = response['last_seq']
        if not self._receives_all:
            self._deliver(row.get('doc') for row in rows)
            return
        docs = self.store.read_many(row['id'] for row in rows)
        self._deliver(docs)
        # In a cluster, the nodes that have read a document may not have received its change yet.
        late = {
            row['id']
            for row, doc in zip(rows, docs, strict=True)
            if doc is None or _generation(doc['_rev']) < _generation(row['changes'][0]['rev'])
        }
        with self._condition:
            self._unread |= late & self._mailboxes.keys()

    def _deliver(self, docs: Iterable[Document | None]) -> None:
        with self._condition:
            for doc in docs:
                if doc is not None and not doc.get('_deleted'):
                    for mailbox in tuple(self._mailboxes.get(doc['_id'], ())):
                        mailbox.deliver(doc)

    def _fail(self, watched: set[str], exc: Exception) -> None:
        """Deliver an error to the mailboxes of the documents that cause it, or of all if no document causes it."""
        errors: dict[str, CouchDBError] = {}
        self._since = None  # the next request reads everything again, also what was unread now
        if not isinstance(exc, (AccessDenied, NotCouchDB, ConfigurationError)):
            for doc_id in watched:
                try:
                    self.store.read(doc_id)
                except RETRIED:
                    return  # the next request shows whether the error persists
                except CouchDBError as own:
                    errors[doc_id] = own
        if not errors:
            logger.error('the subscriber to results failed', exc_info=exc)
            error = (
                exc
                if isinstance(exc, CouchDBError)
                else CouchDBError(f'{self.store.client.address.url}: the subscriber to results failed: {exc!r}')
            )
            errors = dict.fromkeys(watched, error)
        with self._condition:
            failed = {(mailbox, errors[doc_id]) for doc_id in errors for mailbox in self._mailboxes.pop(doc_id, ())}
            self._unread -= errors.keys()
        for mailbox, error in failed:
            mailbox.deliver(error)


def _generation(rev: str) -> int:
    return int(rev.partition('-')[0])


_subscribers: Shared[tuple[Address, str], Subscriber] = Shared(WeakValueDictionary())
