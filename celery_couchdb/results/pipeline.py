"""Pipeline of results: a task hands its result over and ends; the worker's process stores what has gathered.

A result that comes alone is stored at once. Results that come quickly share a request: for CouchDB, a request with one
document costs as much as one with 30. While CouchDB does not respond, results wait in memory; if there are too many
(see `backlog`), whoever hands over another one waits, too.

An acknowledgement waits for the results that were handed over before it, see `kombu_couchdb.consumer.write_order`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kombu_couchdb.consumer import write_order
from kombu_couchdb.couchdb.fork_safety import reset_in_child
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError
from kombu_couchdb.log import get_logger

from .backlog import Backlog
from .batch_writer import MAX_RESULTS, BatchWriter
from .handed import Handed
from .intake import Intake
from .prefork_relay import Relay

__all__ = ['Done', 'Pipeline']

logger = get_logger(__name__)

#: While results come quickly, they share a request until none comes for the first number of seconds, or for up to the
#: second number. A worker that has more tasks waiting than running gathers for longer.
_QUIET_SECONDS, _GATHER_SECONDS = 0.004, 0.01
_BUSY_QUIET_SECONDS, _BUSY_GATHER_SECONDS = 0.02, 0.16

#: The number of results for which a request costs so little for each that it does not wait for more.
_ENOUGH = 128

#: The first and the longest pause while CouchDB does not respond, in seconds.
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.1, 2.0

#: How long a worker that is told to stop at once still tries to store results, in seconds.
_COLD_SECONDS = 5.0

#: How often a waiting thread looks whether the worker is told to stop at once, in seconds.
_CHECK_SECONDS = 0.1

#: The most ids in the log line about results that were not stored.
_MAX_LOGGED = 20

#: Called with results for which nothing is left to do.
Done = Callable[[Sequence[Handed]], None]


class Pipeline:
    """Stores the results that threads and children of this process hand over, in a thread of its own.

    `on_stored(results, done)` is called after a write, and calls `done(results)` when nothing is left to do for them.
    `on_refused(result, error)` is called for a result that CouchDB refuses. It returns another one to be stored in its
    place, or None: then the result is lost, and that is logged.
    """

    def __init__(self, writer: BatchWriter, relay: Relay) -> None:
        self._writer, self._relay = writer, relay
        self.on_stored: Callable[[Sequence[Handed], Done], None] = _call_done
        self.on_refused: Callable[[Handed, CouchDBError], Handed | None] = lambda result, error: None
        #: Returns the id of the task whose result has this document id.
        self.task_id_of: Callable[[str], str] = str
        #: Tells whether the worker has more tasks waiting than running.
        self.is_busy: Callable[[], bool] = lambda: False
        #: Tells whether the worker must stop at once.
        self.is_cold: Callable[[], bool] = lambda: False
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Forget everything in a forked child: the thread and what waits belong to the parent process."""
        self._backlog = Backlog()
        self._intake = Intake(self._backlog, self._relay)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._gives_up_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether results can be handed over in this process."""
        return self._thread is not None and not self._closing

    def open(self, *, serve_children: bool) -> None:
        """Start the thread; with `serve_children`, the children that are forked from now on can hand over results."""
        if self._thread is None or (self._closing and not self._thread.is_alive()):
            self.reset()
            self._intake.open()
            self._thread = threading.Thread(target=self._run, name='celery-couchdb-store', daemon=True)
            self._thread.start()
            write_order.register(self)
            atexit.register(self._at_exit)
        if serve_children:
            self._intake.serve_children()

    # -- for tasks

    def hand(self, result: Handed) -> None:
        """Store a result soon. If too many wait, this waits, too, unless children hand over results to this process.

        The main process of a pool has few results of its own, and its event loop must not wait.
        """
        with self._backlog.changed:
            while self._backlog.is_full and self.is_open and not self._relay.is_open and not self._gives_up():
                self._backlog.changed.wait(_CHECK_SECONDS)
            self._backlog.add(result)
        self._intake.signal()

    def hand_and_wait(self, result: Handed, timeout: float) -> bool:
        """Store a result and wait up to `timeout` seconds for that; tell whether it is stored."""
        responses: list[bool] = []
        result.is_awaited = True
        with self._backlog.changed:
            self._backlog.add(result)
            self._backlog.when_done(responses.append)
            self._intake.signal()
            self._backlog.changed.wait_for(lambda: responses, timeout)
        return responses == [True]

    def settle(self, ids: Sequence[str], timeout: float) -> None:
        """Wait up to `timeout` seconds until nothing waits to be stored under these document ids."""
        if unstored := self._backlog.unstored():
            wanted = {*ids}
            if not wanted.isdisjoint(unstored):
                with self._backlog.changed:
                    self._backlog.changed.wait_for(lambda: wanted.isdisjoint(self._backlog.unstored()), timeout)

    # -- for acknowledgements: see `write_order.Precondition`

    def mark(self) -> int | None:
        """Return the number of the last result that was handed over before this call.

        None if there is no room to receive it now.
        """
        return self._backlog.number if self._intake.take_in() else None

    def is_stored(self, mark: int) -> bool:
        """Tell whether all results up to this number are done."""
        return self._backlog.is_done(mark)

    def wait(self) -> bool:
        """Wait until all results handed over before are done, and return whether they are.

        A worker that must stop at once waits 5 seconds only.
        """
        self._intake.take_in()
        with self._backlog.changed:
            mark = self._backlog.number
            while not self._backlog.is_done(mark) and not self._gives_up():
                self._backlog.changed.wait(_CHECK_SECONDS)
            return self._backlog.is_done(mark)

    def close(self) -> None:
        """Store what was handed over, see `wait`, and end the thread. What cannot be stored is logged."""
        if self._thread is None:
            return
        self.wait()
        self._closing = True
        self._intake.signal()
        self._thread.join(_CHECK_SECONDS if self._gives_up() else _COLD_SECONDS)
        write_order.unregister(self)
        atexit.unregister(self._at_exit)
        if lost := self._backlog.unstored():
            logger.error(
                '%d results could not be stored before the worker ended: %s', len(lost), ', '.join(lost[:_MAX_LOGGED])
            )
        if self._thread.is_alive():
            return  # it ends with its request
        self._intake.close()
        self.reset()

    def _at_exit(self) -> None:
        # Celery tells nobody of a cold shutdown. In a forked child, `reset` has forgotten the thread.
        self._gives_up_at = self._gives_up_at or time.monotonic() + _COLD_SECONDS
        self.close()

    def _gives_up(self) -> bool:
        if self._gives_up_at is None and self.is_cold():
            self._gives_up_at = time.monotonic() + _COLD_SECONDS
        return self._gives_up_at is not None and time.monotonic() >= self._gives_up_at

    # -- in the thread

    def _run(self) -> None:
        retry, batch = 0.0, list[Handed]()
        while self._wait_for_work(batch):
            if not batch:
                self._gather()
                batch = self._backlog.take(MAX_RESULTS)
            try:
                self._store(batch, uncertain=retry > 0)
            except CouchDBError as exc:  # also if a proxy responds with a page of its own
                level = logging.DEBUG if retry else logging.WARNING  # one warning for each outage
                logger.log(level, 'results are not stored: %s; they wait until CouchDB responds', exc)
                retry = min(max(2 * retry, _FIRST_RETRY_SECONDS), _LAST_RETRY_SECONDS)
                # Whoever waits for a result stores it himself.
                self._backlog.end_waits()
                self._done([each for each in batch if each.is_awaited])
                batch = [each for each in batch if not each.is_awaited]
                self._receive_for(retry)
                continue
            if retry:
                logger.info('results are stored again')
            retry, batch = 0.0, []

    def _wait_for_work(self, batch: list[Handed]) -> bool:
        """Wait until there are results to be stored; return False if the thread must end."""
        while not (batch or self._backlog):
            if self._closing:
                return False
            self._intake.wait(None)
        return not (self._closing and self._gives_up())

    def _receive_for(self, seconds: float) -> None:
        """Take in what is handed over in the next `seconds`."""
        until = time.monotonic() + seconds
        while not self._closing and (rest := until - time.monotonic()) > 0:
            self._intake.wait(rest)

    def _gather(self) -> None:
        """While results come quickly, wait for more of them."""
        began = grown = time.monotonic()
        self._intake.take_in()
        count = len(self._backlog)
        while self._backlog.is_flowing and count < _ENOUGH and not self._closing:
            is_busy = self.is_busy()
            quiet, most = (_BUSY_QUIET_SECONDS, _BUSY_GATHER_SECONDS) if is_busy else (_QUIET_SECONDS, _GATHER_SECONDS)
            now = time.monotonic()
            if now - grown >= quiet or now - began >= most:
                return
            time.sleep(_QUIET_SECONDS)
            self._intake.take_in()
            if len(self._backlog) > count:
                count, grown = len(self._backlog), time.monotonic()

    def _store(self, batch: list[Handed], *, uncertain: bool) -> None:
        """Store results; *raises* the errors of an outage, also if a proxy responds with a page of its own."""
        try:
            refusals = self._writer.write(batch, uncertain=uncertain)
        except (AccessDenied, ConfigurationError) as exc:
            refusals = [(each, exc) for each in batch]
        except CouchDBError:
            raise
        except Exception as exc:  # the thread must go on
            if len(batch) > 1:
                for each in batch:  # only the result that causes the error is lost
                    self._store([each], uncertain=True)
                return
            logger.exception('unexpected error in the thread that stores results')
            refusals = [(batch[0], CouchDBError(f'an unexpected error: {exc!r}'))]
        for each, error in refusals:
            self._refuse(each, error)
        refused = [each for each, _ in refusals]
        stored = [each for each in batch if each not in refused]
        self._backlog.note_stored(stored)
        try:
            self.on_stored(stored, self._done)
        except Exception:  # nothing waits for ever for these results; a sweep completes their chords
            logger.exception('unexpected error in the thread that stores results')
            self._done(stored)

    def _refuse(self, result: Handed, error: CouchDBError) -> None:
        self._backlog.end_waits([result])
        instead = None
        if not result.is_awaited:
            try:
                instead = self.on_refused(result, error)
            except Exception:
                logger.exception('unexpected error in the thread that stores results')
            if instead is not None:
                self._backlog.add(instead)
            else:
                task, task_id = result.head.get('task'), self.task_id_of(result.id)
                state = result.head.get('status')
                logger.error('the result of %s[%s] (%s) is lost: %s', task, task_id, state, error)
        self._done([result])

    def _done(self, results: Sequence[Handed]) -> None:
        if results:
            self._backlog.note_done(results)
            write_order.stored()


def _call_done(results: Sequence[Handed], done: Done) -> None:
    done(results)
