"""One reader of `_changes` for all who wait for results in this process, whichever thread they wait in.

It watches only the documents that somebody waits for, and rests when nobody does. For few of them the server looks each
up by its id, however long its history is, and answers at once if it is there: one request is both the first look and the
wait. For many it is cheaper to hear of every change, without the documents, and to fetch those that are awaited.

Nothing is missed while the connection is down: afterwards all is looked up anew.
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

__all__ = ['Subscriber', 'Waiter']

logger = get_logger(__name__)

#: Up to so many ids the server looks up each. It is its default limit up to CouchDB 3.4; 3.5 has 1,000.
_FEW = 100

#: The most changes of one answer while many are awaited.
_MANY = 2000

#: After an answer the reader pauses, in seconds for each awaited document, at least and at the most: who has what he waited
#: for can leave, and what comes in quick succession is gathered.
_PAUSE, _LEAST, _MOST = 1 / 20_000, 0.002, 0.05

#: When new ids break off a wait that was shorter than this, in seconds, more will follow: then the reader looks, with a
#: pause after each look, until none come, instead of opening waits that are broken off again.
_SHORT, _BUSY = 0.1, 0.015

#: How long the thread stays when nobody waits, in seconds.
_IDLE = 10.0

#: The first and the longest pause after an error, in seconds.
_RETRY, _RETRY_MOST = 0.1, 2.0


class Waiter:
    """A mailbox for documents, from the reader's thread to the one that waits."""

    def __init__(self) -> None:
        self._inbox: deque[Document | CouchDBError] = deque()
        self._notifier = threading.Condition()
        self._revs: dict[str, str] = {}

    def deliver(self, item: Document | CouchDBError) -> None:
        """Put in a document, or the error because of which none will come; one that came before is left out."""
        if isinstance(item, dict):
            if self._revs.get(item['_id']) == item['_rev']:
                return
            self._revs[item['_id']] = item['_rev']
        with self._notifier:
            self._inbox.append(item)
            self._notifier.notify()

    def wake(self) -> None:
        """Let `take` return."""
        with self._notifier:
            self._notifier.notify()

    def take(self, timeout: float | None) -> list[Document]:
        """Return what has come, waiting up to `timeout` seconds for the first; *raises* the error, if one came."""
        with self._notifier:
            if not self._inbox:
                self._notifier.wait(timeout)
            items = list(self._inbox)
            self._inbox.clear()
        docs = [item for item in items if isinstance(item, dict)]
        errors = [item for item in items if not isinstance(item, dict)]
        if errors and not docs:
            raise errors[0]
        with self._notifier:
            self._inbox.extendleft(errors[:1])  # what came before it is not lost: the next call tells
        return docs

    def forget(self, doc_id: str) -> None:
        """Let go of what is remembered of a document."""
        self._revs.pop(doc_id, None)


class Subscriber:
    """Delivers awaited documents to their waiters: those that are there, and every change of them. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reset()
        reset_in_child(self)

    @classmethod
    def of(cls, address: Address, options: Options) -> Subscriber:
        """Return the one reader of this process for a database: Celery may make a backend for each thread."""
        return _readers.of(
            (address, repr(options)),
            lambda: cls(Store(Client(address, options.request_timeout, options.connect_timeout), options)),
        )

    def reset(self) -> None:
        """Start over, after a fork: the thread and whoever waited are the parent's."""
        self._wake = threading.Condition()
        self._longpoll = Longpoll(self.store.client)
        self._waiters: dict[str, set[Waiter]] = {}
        self._new: set[str] = set()
        self._running = False
        self._since: Any = None  # where the wait goes on for what is awaited, except for the new
        self._all = False  # whether it is a wait for every change
        self._few = _FEW  # from how many on every change is heard of
        self._busy = False  # whether new ids come too often to wait

    def watch(self, waiter: Waiter, ids: Iterable[str]) -> None:
        """Deliver the documents with these ids to `waiter`, until `drop`."""
        with self._wake:
            for doc_id in ids:
                self._waiters.setdefault(doc_id, set()).add(waiter)
                self._new.add(doc_id)
            self._longpoll.interrupt()
            self._wake.notify_all()
            if not self._running:
                threading.Thread(target=self._run, name='celery-couchdb-results', daemon=True).start()
                self._running = True

    def drop(self, waiter: Waiter, ids: Iterable[str]) -> None:
        """Deliver them no more."""
        with self._wake:
            for doc_id in ids:
                waiters = self._waiters.get(doc_id, set())
                waiters.discard(waiter)
                waiter.forget(doc_id)
                if not waiters:
                    self._waiters.pop(doc_id, None)
                    self._new.discard(doc_id)
            if not self._waiters:
                self._longpoll.interrupt()

    def is_watching(self, waiter: Waiter, doc_id: str) -> bool:
        """Tell whether a document is still awaited: not if its waiter was told that it cannot be read."""
        return waiter in self._waiters.get(doc_id, ())

    # -- in the reader's thread

    def _run(self) -> None:
        pause, retry = 0.0, _RETRY
        while self._awaited():
            time.sleep(pause)  # not for an event: it keeps down how much is asked of the server
            with self._wake:
                wanted, new, self._new = set(self._waiters), self._new, set()
                turn = self._longpoll.generation
            if not wanted:
                continue
            try:
                pause = self._round(wanted, new, turn)
                if retry > _RETRY:
                    logger.info('results are heard of again')
                retry = _RETRY
            except RETRIED as exc:
                if isinstance(exc, AnswerTooLarge) and self._few:
                    self._few, pause = 0, 0.0  # so are the results, and one can hear of them without their documents
                    continue
                level = logging.WARNING if retry == _RETRY else logging.DEBUG  # once is enough
                logger.log(level, 'results are not heard of: %s; trying again until they are', exc)
                self._since, pause, retry = None, retry, min(retry * 2, _RETRY_MOST)
            except Exception as exc:  # whatever it is, nobody must wait for what cannot come
                self._fail(wanted, exc)

    def _awaited(self) -> bool:
        """Wait until somebody waits; False if that was in vain for long, and the thread should end."""
        with self._wake:
            if not self._waiters:
                self._since, self._few = None, _FEW
                self._wake.wait_for(lambda: self._waiters, _IDLE)
            if not self._waiters:
                self._running = False
            return self._running

    def _round(self, wanted: set[str], new: set[str], turn: int) -> float:
        """Deliver what is there, wait for a change and deliver it; return how long to pause, in seconds."""
        many = len(wanted) > self._few
        if self._since is None or many != self._all:
            self._since, self._all, new = self.store.sequence() if many else 0, many, wanted
        if many:
            # A change of which the node that is listened to had heard before is never told: so it is asked, too.
            self._deliver(self.store.read_many(new, everywhere=True))
        since = 0 if new and not many else self._since
        body = {} if many else {'doc_ids': sorted(wanted)}
        limit = _MANY if many else len(wanted)
        if new and self._busy:
            # It cannot be broken off: whatever comes meanwhile, those who have waited before get what is there for them.
            self._take_in(self.store.client.changes(since, body, limit, docs=not many), wanted)
            return _BUSY
        began = time.monotonic()
        answer = self._longpoll.wait(turn, since, body, docs=not many, limit=limit)
        self._busy = answer is None and time.monotonic() - began < _SHORT
        if answer is None:
            if new and not many:
                self._since = None  # nobody has looked for them yet
            return 0.0
        self._take_in(answer, wanted)
        return max(_LEAST, min(len(wanted) * _PAUSE, _MOST))

    def _take_in(self, answer: Document, wanted: set[str]) -> None:
        rows = [row for row in answer['results'] if row['id'] in wanted and not row.get('deleted')]
        self._since = answer['last_seq']
        if not self._all:
            self._deliver(row.get('doc') for row in rows)
            return
        docs = self.store.read_many(row['id'] for row in rows)
        self._deliver(docs)
        # In a cluster, the nodes that were asked for a document may not have heard of its change yet.
        late = {
            row['id']
            for row, doc in zip(rows, docs, strict=True)
            if doc is None or _generation(doc['_rev']) < _generation(row['changes'][0]['rev'])
        }
        with self._wake:
            self._new |= late & self._waiters.keys()

    def _deliver(self, docs: Iterable[Document | None]) -> None:
        with self._wake:
            for doc in docs:
                if doc is not None and not doc.get('_deleted'):
                    for waiter in tuple(self._waiters.get(doc['_id'], ())):
                        waiter.deliver(doc)

    def _fail(self, wanted: set[str], exc: Exception) -> None:
        """Tell those who wait that it is in vain: all of them, or those whose very document is to blame."""
        guilty: dict[str, CouchDBError] = {}
        if not isinstance(exc, (AccessDenied, NotCouchDB, ConfigurationError)):
            for doc_id in wanted:
                try:
                    self.store.read(doc_id)
                except RETRIED:
                    return  # the next round will tell
                except CouchDBError as own:
                    guilty[doc_id] = own
        self._since = None
        if not guilty:
            logger.error('the reader of results failed', exc_info=exc)
            error = (
                exc
                if isinstance(exc, CouchDBError)
                else CouchDBError(f'{self.store.client.address.url}: the reader of results failed: {exc!r}')
            )
            guilty = dict.fromkeys(wanted, error)
        with self._wake:
            told = {(waiter, guilty[doc_id]) for doc_id in guilty for waiter in self._waiters.pop(doc_id, ())}
            self._new -= guilty.keys()
        for waiter, error in told:
            waiter.deliver(error)


def _generation(rev: str) -> int:
    return int(rev.partition('-')[0])


_readers: Shared[tuple[Address, str], Subscriber] = Shared(WeakValueDictionary())
