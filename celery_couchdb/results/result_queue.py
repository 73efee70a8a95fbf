"""The result queue of a worker: a task hands its result over and ends; the worker's process stores what has gathered.

A result that comes alone is stored at once. Results that come quickly share a request: for CouchDB, a request with one
document costs as much as one with 30. While CouchDB does not respond, results wait in memory; if there are too many,
whoever hands over another one waits, too. Children of a prefork pool hand over through the `prefork_relay`.

Each result has a number, and is *done* when it is stored and, if it is a part of a chord, counted. An acknowledgement
waits until everything is done that was handed over before it, see `kombu_couchdb.consumer.pending_writes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from socket import socket

from kombu_couchdb.consumer import pending_writes
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.fork_safety import at_exit, reset_in_child
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError
from kombu_couchdb.flow import Flow
from kombu_couchdb.log import get_logger
from kombu_couchdb.outage import Outage

from .documents import is_outdated
from .other_databases import OtherDatabases, write_new
from .prefork_relay import Received, Relay
from .queue_item import QueueItem, Refusal
from .result_store import Recent, ResultStore

logger = get_logger(__name__)

#: A larger result is not handed over: its task stores it. In bytes.
MAX_BYTES = 100_000

#: The most results that are not stored, and their bytes.
_MAX_UNSTORED, _MAX_UNSTORED_BYTES = 10_000, 64_000_000

#: The most results in one request.
_MAX_TOGETHER = 400

#: How often a thread that gathers results takes in what children hand over, in seconds.
_STEP_SECONDS = 0.004

#: How long a worker that is told to stop at once still tries to store results, in seconds.
_COLD_SECONDS = 5.0

#: How often a waiting thread looks whether there is room, or the worker is told to stop at once, in seconds.
_CHECK_SECONDS = 0.1

#: The most ids in the log line about results that were not stored.
_MAX_LOGGED = 20

#: How much longer than the client's timeouts a task waits for the process that stores its result, in seconds.
_GRACE_SECONDS = 1.0

#: The results that a child has handed over last: before it reads one of them, it waits until they are stored.
_REMEMBERED = 1000

#: Called with results for which nothing is left to do.
Done = Callable[[Sequence[QueueItem]], None]


class ResultQueue:
    """Takes results of one store in each process of a worker, and stores them in a thread of its main process.

    `on_stored(results, done)` is called after a write, and calls `done(results)` when nothing is left to do for them.
    `on_refused(result, error)` is called for a result that CouchDB refuses, and returns others to be stored in its
    place. In a process without a worker, and before `open`, the queue takes nothing.
    """

    def __init__(
        self,
        store: ResultStore,
        on_stored: Callable[[Sequence[QueueItem], Done], None],
        on_refused: Callable[[QueueItem, CouchDBError], Iterable[QueueItem]],
        others: OtherDatabases,
    ) -> None:
        self._store, self._on_stored, self._on_refused = store, on_stored, on_refused
        self._others = others
        self.timeout = store.client.options.seconds + _GRACE_SECONDS
        self._relay = Relay(self.timeout)
        #: The database of the broker, if messages can be handed over.
        self.broker: Client | None = None
        #: What this child has handed over and perhaps is not stored.
        self._sent: Recent[None] = Recent(_REMEMBERED)
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Forget everything in a forked child: the thread and what waits belong to the parent process."""
        self._relay.reset()
        self._sent.clear()
        #: The lock of everything below; notified when results are stored or done.
        self._changed = threading.Condition(threading.RLock())
        #: The number of the last result that was handed over.
        self._number = 0
        #: By number: the results that are not done. By document id, in the order of the writes: those of them that no
        #: request contains yet.
        self._open: dict[int, QueueItem] = {}
        self._waiting: dict[str, QueueItem] = {}
        #: The number and the bytes of the results that are not stored.
        self._unstored = self._bytes = 0
        #: What children wait for: a number, and the sockets that are closed when everything up to it is done.
        self._waits: list[tuple[int, list[socket]]] = []
        #: How fast results come.
        self._flow = Flow()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._gives_up_at: float | None = None
        self._outage = Outage(
            logger, 'results are not stored: %s; they wait until CouchDB responds', 'results are stored again'
        )

    @property
    def is_open(self) -> bool:
        """Whether this process can hand over results."""
        return self._is_running or self._relay.is_child

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and not self._closing

    def open(self, broker: Client | None = None, *, serve_children: bool) -> None:
        """Take results from now on, and messages for the database `broker`.

        With `serve_children`, also take those of the children that are forked from now on.
        """
        if self._thread is None or (self._closing and not self._thread.is_alive()):
            self.reset()
            self._relay.open()
            self._thread = threading.Thread(target=self._run, name='celery-couchdb-store', daemon=True)
            self._thread.start()
            self._store.before_access.append(self.settle)
            pending_writes.register(self)
            self._revoke_at_exit = at_exit(self._close_at_exit)
        self.broker = self.broker or broker
        if serve_children:
            self._relay.serve_children()

    # -- for tasks

    def hand_over(self, result: QueueItem) -> bool:
        """Store a result soon; return False if the caller must store it.

        If too many wait, this waits, too, unless children hand over results to this process: the main process of a pool
        has few results of its own, and its event loop must not wait.
        """
        if result.size > MAX_BYTES or not self.is_open:
            return False
        if self._relay.is_child:
            taken = self._relay.send(result.to_bytes(), result.waiting)
            if taken and not result.is_message and not result.database:
                self._sent[result.id] = None
            return taken
        with self._changed:
            self._take_in()  # what a child has sent of the same task comes first
            while self._is_full() and self._is_running and not self._relay.serves_children and not self._gives_up():
                self._changed.wait(_CHECK_SECONDS)
            self._add(result)
        return True

    def settle(self, ids: Sequence[str]) -> None:
        """Wait until the results with these document ids are stored that this process has handed over."""
        if any(doc_id in self._sent for doc_id in ids):
            self._relay.flush()
            self._sent.clear()
        wanted = {*ids}
        with self._changed:
            self._changed.wait_for(lambda: wanted.isdisjoint(self.unstored()), self.timeout)

    # -- for acknowledgements: see `pending_writes.Precondition`

    def mark(self) -> int | None:
        """Return the number of the last result that was handed over before this call.

        None if there is no room to receive it now.
        """
        return self._number if self._take_in() else None

    def is_stored(self, mark: int) -> bool:
        """Tell whether all results up to this number are done."""
        with self._changed:
            return not self._open or next(iter(self._open)) > mark

    def wait(self) -> bool:
        """Wait until all results handed over before are done, and return whether they are.

        A worker that must stop at once waits 5 seconds only.
        """
        self._take_in()
        with self._changed:
            mark = self._number
            while not self.is_stored(mark) and not self._gives_up():
                self._changed.wait(_CHECK_SECONDS)
            return self.is_stored(mark)

    def unstored(self) -> list[str]:
        """Return the document ids of the results that are not stored."""
        with self._changed:
            return [each.id for each in self._open.values() if not each.is_stored]

    def close(self) -> None:
        """Store what was handed over, see `wait`, and end the thread. What cannot be stored is logged."""
        if self._thread is None:
            return
        self.wait()
        self._closing = True
        self._relay.wake()
        self._thread.join(_CHECK_SECONDS if self._gives_up() else _COLD_SECONDS)
        pending_writes.unregister(self)
        self._revoke_at_exit()
        self._store.before_access.remove(self.settle)
        if lost := list(dict.fromkeys(self.unstored())):
            logger.error(
                '%d results could not be stored before the worker ended: %s', len(lost), ', '.join(lost[:_MAX_LOGGED])
            )
        if self._thread.is_alive():
            return  # it ends with its request
        self._relay.close()
        self.reset()

    def _close_at_exit(self) -> None:
        # Celery tells nobody of a cold shutdown.
        self._gives_up_at = self._gives_up_at or time.monotonic() + _COLD_SECONDS
        self.close()

    def _gives_up(self) -> bool:
        if self._gives_up_at is None and _must_stop_at_once():
            self._gives_up_at = time.monotonic() + _COLD_SECONDS
        return self._gives_up_at is not None and time.monotonic() >= self._gives_up_at

    # -- the list

    def _is_full(self) -> bool:
        # Only results that are not stored count: to complete a chord may make other results, which must find room.
        return self._unstored >= _MAX_UNSTORED or self._bytes >= _MAX_UNSTORED_BYTES

    def _add(self, result: QueueItem) -> None:
        """Add a result. Results of one task that no request contains yet become one, with the number of the first."""
        with self._changed:
            self._number = result.number = self._number + 1
            self._flow.count()
            if (before := self._waiting.get(result.id)) is not None:
                if is_outdated(result.head, before.head):
                    result.end_waiting()
                    return
                result.number = before.number
                if not result.part:
                    result.take_part(before)
                self._leave(self._waiting.pop(result.id))
            self._open[result.number] = self._waiting[result.id] = result
            self._unstored, self._bytes = self._unstored + 1, self._bytes + result.size
            if len(self._waiting) == 1:
                self._relay.wake()

    def _leave(self, result: QueueItem) -> None:
        """Count a result as stored."""
        if not result.is_stored:
            self._unstored, self._bytes = self._unstored - 1, self._bytes - result.size
        result.is_stored = True

    def _take_in(self) -> bool:
        """Receive everything that children have sent before; return False if there is no room for it."""
        with self._changed:
            if self._is_full():
                return False
            for received in self._relay.receive():
                self._accept(received)
            return True

    def _accept(self, received: Received) -> None:
        if received.message:
            try:
                result = QueueItem.from_bytes(received.message)
            except ValueError:
                logger.exception('a result of a child of the pool cannot be read')
                return
            result.waiting = next(iter(received.waiting), None)
            self._add(result)
        else:
            self._waits.append((self._number, received.waiting))
            self._end_waits()

    def _note_done(self, results: Sequence[QueueItem]) -> None:
        """Note that nothing is left to do for these results."""
        if not results:
            return
        with self._changed:
            for each in results:
                self._leave(each)
                self._open.pop(each.number, None)
                each.end_waiting()
            self._end_waits()
            self._changed.notify_all()
        pending_writes.wake()

    def _end_waits(self) -> None:
        while self._waits and self.is_stored(self._waits[0][0]):
            for end in self._waits.pop(0)[1]:
                end.close()

    # -- in the thread

    def _run(self) -> None:
        batch = list[QueueItem]()
        while batch := batch or self._next_batch():
            self._flow.begin()
            try:
                self._write(batch, uncertain=self._outage.lasts)
            except CouchDBError as exc:  # also if a proxy responds with a page of its own
                self._receive_for(self._outage.failed(exc))
                if self._closing and self._gives_up():
                    return
                continue
            self._flow.end()
            self._outage.recovered()
            batch = []

    def _next_batch(self) -> list[QueueItem]:
        """Wait for results, and return those that share a request; none if the thread must end."""
        while not self._waiting:
            if self._closing:
                return []
            self._relay.wait(None)
            self._take_in()
        self._gather()
        with self._changed:
            return [self._waiting.pop(doc_id) for doc_id in list(self._waiting)[:_MAX_TOGETHER]]

    def _gather(self) -> None:
        """While results flow, wait for more of them, unless a task waits for one."""
        self._take_in()
        while len(self._waiting) < _MAX_TOGETHER and not self._closing and not self._has_waiting_task():
            if not (pause := self._flow.pause):
                return
            time.sleep(min(pause, _STEP_SECONDS))
            self._take_in()

    def _has_waiting_task(self) -> bool:
        with self._changed:
            return any(each.waiting for each in self._waiting.values())

    def _receive_for(self, seconds: float) -> None:
        """Take in what is handed over in the next `seconds`."""
        until = time.monotonic() + seconds
        while not self._closing and (rest := until - time.monotonic()) > 0:
            if self._take_in():
                self._relay.wait(rest)
            else:
                time.sleep(min(rest, _CHECK_SECONDS))

    def _write(self, batch: list[QueueItem], *, uncertain: bool) -> None:
        """Store results; *raises* the errors of an outage, also if a proxy responds with a page of its own."""
        try:
            refusals = self._try_to_write(batch, uncertain=uncertain)
        except CouchDBError:
            raise
        except Exception as exc:  # the thread must go on
            if len(batch) > 1:
                for each in batch:  # only the result that causes the error is lost
                    self._write([each], uncertain=True)
                return
            logger.exception('unexpected error in the thread that stores results')
            refusals = [(batch[0], CouchDBError(f'an unexpected error: {exc!r}'))]
        for each, error in refusals:
            self._refuse(each, error)
        refused = [each for each, _ in refusals]
        self._note_stored([each for each in batch if each not in refused])

    def _try_to_write(self, batch: Sequence[QueueItem], *, uncertain: bool) -> list[Refusal]:
        """Store messages, then results, as Celery does, and return those that CouchDB refuses.

        One request for each database.
        """
        messages = [item for item in batch if item.is_message]
        refusals = list[Refusal]()
        if messages:
            assert self.broker is not None
            refusals += write_new(self.broker, messages)
        for database in {item.database: None for item in batch if item.database}:
            items = [item for item in batch if item.database == database]
            refusals += self._others.write(database, items)
        results = [item for item in batch if not item.is_message and not item.database]
        try:
            return refusals + self._store.write_batch(results, uncertain=uncertain)
        except (AccessDenied, ConfigurationError) as exc:
            return refusals + [(item, exc) for item in results]

    def _note_stored(self, stored: list[QueueItem]) -> None:
        with self._changed:
            for each in stored:
                self._leave(each)
            self._changed.notify_all()
        try:
            self._on_stored(stored, self._note_done)
        except Exception:  # nothing waits for ever for these results; a sweep completes their chords
            logger.exception('unexpected error in the thread that stores results')
            self._note_done(stored)

    def _refuse(self, result: QueueItem, error: CouchDBError) -> None:
        try:
            for instead in self._on_refused(result, error):
                self._add(instead)
        except Exception:
            logger.exception('unexpected error in the thread that stores results')
        self._note_done([result])


def _must_stop_at_once() -> bool:
    """Tell whether this worker was told to stop without waiting for its tasks: Celery's cold shutdown."""
    state = import_module('celery.worker.state').should_terminate
    return state is not None and state is not False
