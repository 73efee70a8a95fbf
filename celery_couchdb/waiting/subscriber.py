"""Subscriber to the changes feed: one thread that delivers results to everything that waits in this process.

The subscriber watches only the documents that something waits for, and those that are likely to be asked for next: one
response then serves many calls of `get`. It sends no requests when nothing waits. For up to `_MAX_DOC_IDS` documents,
CouchDB looks each of them up by its id, regardless of the length of the history, and responds at once if it exists: one
request both reads the documents and waits for them. For more documents it is cheaper to receive every change.

If a response of the feed cannot be read, the subscriber asks for the watched documents for a minute.

While the connection is down no change is lost: afterwards all watched documents are read again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from kombu_couchdb.couchdb import changes
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.changes import Longpoll
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import Shared, reset_in_child
from kombu_couchdb.errors import (
    RETRIED,
    AnswerTooLarge,
    CouchDBError,
)
from kombu_couchdb.log import get_logger
from kombu_couchdb.outage import Outage

from ..options import ResultOptions
from ..results.documents import Document
from ..results.result_store import ResultStore
from .read_ahead import Cache
from .watched import Pacing, ResultMailbox, Watched

logger = get_logger(__name__)

#: Up to this number of ids, CouchDB looks each of them up. Measured on CouchDB 3.5, in ms of the server's processor: a
#: request for one id 2.4 to 4, for 10 ids 7, for 100 ids 16; for every change 2.5, and 0.25 for each change with its
#: document. To begin with every change costs two more requests.
_MAX_DOC_IDS = 10

#: The most changes in one response while every change is received.
_MAX_CHANGES = 250

#: Documents that nothing waits for yet are watched for so long after the last thread has stopped waiting, in seconds,
#: and until the server's next empty line.
_LINGER_SECONDS = 0.1

#: After a response the subscriber pauses at least for so long, in seconds, see also `Pacing`. During the pause,
#: threads that have received their documents stop watching.
_MIN_PAUSE_SECONDS = 0.002

#: If new ids interrupt a wait that took less time than `_SHORT_WAIT_SECONDS`, more new ids are likely. Then the
#: subscriber polls, with a pause of `_POLL_SECONDS` after each request, until no new ids come. A wait would be
#: interrupted again.
_SHORT_WAIT_SECONDS, _POLL_SECONDS = 0.1, 0.015

#: How long documents are asked for after a response of the feed could not be read, and how often, in seconds. For 1,000
#: documents that do not exist, a request costs the server 12 ms, measured on CouchDB 3.5.
_UNREADABLE_SECONDS, _ASK_SECONDS = 60.0, 0.5

#: How long the thread runs on without watched documents, in seconds.
_IDLE_SECONDS = 10.0


class Subscriber:
    """Delivers watched documents to mailboxes: first the existing document, then every change of it. Thread-safe."""

    def __init__(self, store: ResultStore) -> None:
        self.store = store
        self.cache = Cache(lambda: store.client.clock.now())  # the first access sends a request: not now
        self.reset()
        reset_in_child(self)

    @classmethod
    def of(cls, address: Address, options: ResultOptions) -> Subscriber:
        """Return the only subscriber of this process to a database. Celery may make a backend for each thread."""
        return _subscribers.of(
            (address, repr(options)),
            lambda: cls(ResultStore(Client(address, options.http), options)),
        )

    def reset(self) -> None:
        """Start over in a forked child: the thread and the mailboxes belong to the parent process."""
        self.cache.reset()
        self._watched = Watched(self.cache)
        self._changed = self._watched.changed
        self._longpoll = Longpoll(self.store.client)
        self._running = False
        #: The update sequence from which the next wait starts, for the watched ids except the unread ones.
        self._since: Any = None
        #: Whether every change is received, instead of those of the watched ids.
        self._receives_all = False
        #: Whether new ids come too often to wait for changes.
        self._polls = False
        #: The monotonic time until which the feed is not followed, because a response of it could not be read.
        self._unreadable_until = float('-inf')
        self._pacing = Pacing()
        self._outage = Outage(
            logger,
            'results are not received: %s; trying again until CouchDB responds',
            'results are received again',
        )

    def will_deliver(self, doc_id: str, sent_ago: float | None) -> bool:
        """Tell whether a document needs no read before it is watched.

        That is so if it is watched ahead already, or if its task was sent so few seconds ago that its result is
        probably not stored yet. None: the time is not known.
        """
        is_expected_later = sent_ago is not None and sent_ago < self._watched.expectation.seconds
        return is_expected_later or (self._since is not None and doc_id in self._watched.ahead)

    def watch(self, mailbox: ResultMailbox, ids: Iterable[str], ahead: Iterable[str] = ()) -> None:
        """Deliver the documents with these ids to `mailbox`, until `unwatch`.

        The documents with the ids `ahead` are watched as well. Successes among them are put into `cache`.
        """
        with self._changed:
            if self._watched.add(mailbox, ids, ahead):
                self._longpoll.interrupt()
            self._changed.notify_all()
            if not self._running:
                threading.Thread(target=self._run, name='celery-couchdb-results', daemon=True).start()
                self._running = True

    def unwatch(self, mailbox: ResultMailbox, ids: Iterable[str]) -> None:
        """Stop delivering the documents with these ids to `mailbox`."""
        with self._changed:
            self._watched.remove(mailbox, ids)
            if not self._watched.ids:
                self._longpoll.interrupt()

    def drop(self, doc_id: str) -> None:
        """Forget what was received of a document, because this process replaces or deletes it."""
        self._watched.drop(doc_id)
        self.cache.drop(doc_id)

    # -- in the subscriber's thread

    @property
    def _asks(self) -> bool:
        """Whether the subscriber asks for documents, and does not follow the feed."""
        return time.monotonic() < self._unreadable_until

    def _run(self) -> None:
        pause = 0.0
        while self._wait_for_mailboxes():
            with self._changed:
                if self._asks:
                    self._changed.wait_for(lambda: not self._watched.mailboxes, _ASK_SECONDS)
                else:  # a document that nothing has watched before does not wait
                    self._changed.wait_for(lambda: self._watched.unread, pause)
                watched, unread = self._watched.ids, self._watched.take_unread()
                generation = self._longpoll.generation
            if not self._watched.mailboxes:
                continue
            try:
                pause = self._ask(watched) if self._asks else self._follow(watched, unread, generation)
                self._outage.recovered()
            except Exception as exc:  # after any error: a thread must not wait for documents that never come
                # The next request reads everything again, also what was unread now.
                self._since, is_outage = None, isinstance(exc, RETRIED)
                if not self._asks and (isinstance(exc, AnswerTooLarge) or not is_outage):
                    self._stop_following()
                elif is_outage:
                    time.sleep(self._outage.failed(exc))
                    pause = 0.0
                else:
                    self._fail(watched, exc)

    def _wait_for_mailboxes(self) -> bool:
        """Wait until a document is watched; return False if the thread should end, because none was for a long time."""
        watched = self._watched
        with self._changed:
            if watched.ahead:
                self._changed.wait_for(lambda: watched.mailboxes, _LINGER_SECONDS)
            if not watched.mailboxes:
                watched.clear_ahead()
                self._since = None
                self._changed.wait_for(lambda: watched.mailboxes, _IDLE_SECONDS)
            if not watched.mailboxes:
                self._running = False
            return self._running

    def _ask(self, watched: set[str]) -> float:
        """Deliver the watched documents that exist, without the feed; return the pause after that: none."""
        self._since = None  # the feed begins anew afterwards
        self._read(watched)
        return 0.0

    def _read(self, wanted: set[str], *, everywhere: bool = False) -> None:
        """Read documents and deliver those that exist."""
        ids = list(wanted)
        docs = self.store.read_many(ids, everywhere=everywhere)
        self._watched.deliver(zip(ids, docs, strict=True))

    def _follow(self, watched: set[str], unread: set[str], generation: int) -> float:
        """Deliver existing documents, wait for changes and deliver them; return the pause after that, in seconds."""
        many = len(watched) > _MAX_DOC_IDS
        if self._since is None or many != self._receives_all:
            self._watched.forget_states()
            self._since, self._receives_all, unread = self.store.sequence() if many else 0, many, watched
        if many and unread:
            # Read from every copy: the feed never reports a change that its node had received before `_since`, and a
            # read from the other nodes only may miss that change.
            self._read(unread, everywhere=True)
        since = 0 if unread and not many else self._since
        body = {} if many else {'doc_ids': sorted(watched)}
        limit = _MAX_CHANGES if many else len(watched)
        if unread and self._polls:
            # New ids cannot interrupt this request, so threads that began to wait earlier receive what exists for them.
            self._process(changes.read(self.store.client, since, body, limit), watched)
            time.sleep(_POLL_SECONDS)
            return 0.0
        began = time.monotonic()
        response = self._longpoll.wait(generation, since, body, limit=limit, is_wanted=self._is_wanted)
        self._polls = response is None and time.monotonic() - began < _SHORT_WAIT_SECONDS
        if response is None:
            if unread and not many:
                self._since = None  # the unread documents are still unread
            return 0.0
        count = self._process(response, watched)
        time.sleep(_MIN_PAUSE_SECONDS)
        return self._pacing.pause(count, self._watched.others(), time.monotonic())

    def _is_wanted(self) -> bool:
        return bool(self._watched.mailboxes or time.monotonic() - self._watched.left_at < _LINGER_SECONDS)

    def _process(self, response: Document, watched: set[str]) -> int:
        """Deliver the documents in a response of the changes feed; return the number of watched ones."""
        rows = [row for row in response['results'] if row['id'] in watched]
        self._watched.deliver((row['id'], None if row.get('deleted') else row.get('doc')) for row in rows)
        count = sum(not row.get('deleted') for row in rows)
        self._since = response['last_seq']
        return count

    def _stop_following(self) -> None:
        """Ask for the documents that threads wait for: a response, perhaps for other documents, cannot be read."""
        self._watched.clear_ahead()
        self._unreadable_until = time.monotonic() + _UNREADABLE_SECONDS

    def _fail(self, watched: set[str], exc: Exception) -> None:
        """Deliver an error in the place of all watched documents."""
        logger.error('the subscriber to results failed', exc_info=exc)
        if not isinstance(exc, CouchDBError):
            exc = CouchDBError(f'{self.store.client.address.url}: the subscriber to results failed: {exc!r}')
        self._watched.fail(dict.fromkeys(watched, exc))


_subscribers: Shared[tuple[Address, str], Subscriber] = Shared(WeakValueDictionary())
