"""The changes feed: an interruptible longpoll on `_changes`, and a follower with a thread for its longpolls.

A change arrives within milliseconds and is only a hint: callers read the documents to decide. A `Follower` sends one
longpoll after each call of `follow` and none by itself, so that a busy consumer causes no requests.

A `Follower` also reports that changes may have been missed. So that nothing is missed at the start, take the update
sequence first, then read the documents, and then follow from that sequence. Each call of `follow` gives one report,
which may come twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import requests

from ..errors import BrokenAnswer, CouchDBError, ServerUnavailable
from ..log import get_logger
from ..outage import Outage
from .client import Client, Document, Row
from .failures import from_transport
from .shapes import CHANGES

logger = get_logger(__name__)

#: The maximum number of rows in one response. If a response has so many, more changes may follow.
LIMIT = 200

#: The minimum seconds between two longpolls: each costs the server 3 ms, and each change in it 0.1 ms.
_MIN_INTERVAL_SECONDS = 0.015

#: Seconds between the empty lines that the server sends, if a feed does not say otherwise. After 10 s without one, the
#: connection is considered lost, see `open_feed`.
_HEARTBEAT_SECONDS = 4.0


def read(client: Client, since: Any, body: Document, limit: int, *, docs: bool = True) -> Document:
    """Return the changes after `since` as `{'results', 'last_seq'}`, without waiting.

    `body`, `limit` and `docs` are those of `open_feed`. *Raises* the errors of `Client`.
    """
    params = _params(since, body, limit, docs)
    return cast(Document, client.request('POST', '/_changes', params, body, repeat=True, shape=CHANGES))


def open_feed(
    client: Client, since: Any, body: Document, limit: int, heartbeat: float, *, docs: bool = True
) -> requests.Response:
    """Send a longpoll request to `_changes` and return its response without reading the body.

    The response ends with the first change after `since` that matches the filter in `body`: `{'selector': …}` or
    `{'doc_ids': […]}`, both native in the server and cheap, or empty for any change. It contains at most `limit`
    changes, with their documents if `docs` is true. CouchDB sends an empty line every `heartbeat` seconds.
    """
    params = {'feed': 'longpoll', 'heartbeat': int(heartbeat * 1000), **_params(since, body, limit, docs)}
    return client.open_longpoll('/_changes', params, body, heartbeat * 2 + 2)


def _params(since: Any, body: Document, limit: int, docs: bool) -> dict[str, Any]:
    filters = {'filter': f'_{next(iter(body))}'} if body else {}
    return {'since': since, 'include_docs': docs, 'limit': limit, **filters}


class Longpoll:
    """Waits for changes in one thread, one wait at a time. Any thread may interrupt the wait."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # Reentrant: the garbage collector may close an abandoned generator, and so end its wait, during `interrupt`.
        self._lock = threading.RLock()
        #: The number of the next wait, an argument of `wait`. `interrupt` ends that wait even before it begins.
        self.generation = 0
        self._response: requests.Response | None = None

    def interrupt(self) -> None:
        """End the wait of the current generation. With urllib3 before 2.3, it ends at the server's next empty line."""
        with self._lock:
            self.generation += 1
            if self._response is not None:
                try:
                    self._response.raw.shutdown()
                except (AttributeError, ValueError, RuntimeError, OSError) as exc:
                    logger.debug('the longpoll ends with the next line from the server: %r', exc)

    def wait(
        self,
        generation: int,
        since: Any,
        body: Document,
        *,
        docs: bool = True,
        limit: int = LIMIT,
        heartbeat: float = _HEARTBEAT_SECONDS,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Document | None:
        """Wait for a change after `since` and return `{'results', 'last_seq'}`; return None if interrupted.

        `generation` is the value of the attribute before the caller checked that it has to wait. `body` is
        `{'selector': …}`, `{'doc_ids': […]}` or, for all changes, empty. At most `limit` rows are returned, with their
        documents if `docs` is true. The server sends an empty line every `heartbeat` seconds. The wait also ends if
        `is_wanted()` is false when the server sends something, at the latest its next empty line.

        *Raises* the errors of `Client`.
        """
        if generation != self.generation:
            return None
        try:
            response = open_feed(self._client, since, body, limit, heartbeat, docs=docs)
        except CouchDBError:
            if generation != self.generation:
                return None
            raise
        text, error = bytearray(), cast('CouchDBError | None', None)
        try:
            with self._lock:
                self._response = response
            for chunk in response.iter_content(None):
                if generation != self.generation or not is_wanted():
                    return None
                text += chunk
        except requests.RequestException as exc:
            error = from_transport(exc, f'{self._client.address.url}: the changes feed was cut off')
        except (OSError, ValueError, AttributeError):  # the last two: TLS connections during `shutdown`
            error = ServerUnavailable(f'{self._client.address.url}: the changes feed was cut off')
        finally:
            with self._lock:
                self._response = None
            response.close()
        del response  # it may contain a session cookie, and recorded tracebacks show the variables of their frames
        if generation != self.generation:
            return None
        if error is not None:  # raised here, without the frames of its cause
            self._client.close()  # the idle connections may be gone, too, without notice
            raise error
        if not text.strip():  # a proxy may close the response between two empty lines
            raise BrokenAnswer(f'{self._client.address.url}: the changes feed was cut off')
        return cast(Document, self._client.decode(bytes(text), request='POST /_changes', shape=CHANGES))


class Changes(NamedTuple):
    """One report."""

    rows: Sequence[Row]
    #: The update sequence after them; None: the database cannot be followed just now. Read the documents again, or
    #: follow from the former sequence, if it is known that the database is still the same one.
    last: Any
    #: Why it cannot be followed just now.
    error: CouchDBError | None = None

    @property
    def ids(self) -> list[str]:
        """The ids of the documents that have changed or were deleted."""
        return [row['id'] for row in self.rows]


class Follower:
    """Follows the changes of a database. One thread uses it, and a thread of its own waits for CouchDB.

    It raises no errors. After an error it makes the next attempt not before a pause, which becomes longer.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        wake: Callable[[], object] = lambda: None,
        *,
        docs: bool = False,
        heartbeat: float = _HEARTBEAT_SECONDS,
    ) -> None:
        """`name` is the name of the thread, which calls `wake()` when there is a report.

        The rows of reports contain the documents if `docs` is true. The server sends an empty line every `heartbeat`
        seconds: a silent server is noticed after twice that time and two seconds.
        """
        self._client, self._name, self._wake = client, name, wake
        self._docs, self._heartbeat = docs, heartbeat
        self._longpoll = Longpoll(client)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._last_start = float('-inf')
        #: The least seconds between two longpolls.
        self._interval = 0.0
        self._outage = Outage(logger, f'{client.address.database} cannot be followed just now: %s', level=logging.DEBUG)
        self._changed = threading.Condition()
        self._request: tuple[Any, Document] | None = None  # for the thread
        self._asked: tuple[Any, Document] | None = None  # what the thread waits for
        self._report: Changes | None = None

    def follow(
        self,
        since: Any,
        selector: Document | None = None,
        *,
        doc_ids: Sequence[str] | None = None,
        interval: float = 0.0,
    ) -> None:
        """Report the next changes after the update sequence `since`, unless these are being waited for already.

        `selector` or `doc_ids` says which changes; without them, all are reported. Two requests are `interval` seconds
        apart, or more.
        """
        body: Document = {'selector': selector} if selector else {} if doc_ids is None else {'doc_ids': [*doc_ids]}
        if self._asked != (since, body):
            self._interval = max(_MIN_INTERVAL_SECONDS, interval, self._outage.pause)
            self._ask((since, body))

    def take(self, seconds: float = 0.0) -> Changes | None:
        """Return the last report, once; wait up to `seconds` for it. None if there is none."""
        with self._changed:
            if seconds > 0:
                self._changed.wait_for(lambda: self._report is not None, seconds)
            report, self._report = self._report, None
        return report

    def pause(self) -> None:
        """Report nothing until the next call of `follow`."""
        self._ask(None)
        self.take()

    def close(self) -> None:
        """Tell the thread to end. It ends at the server's next empty line at the latest."""
        self._closed = True
        self._ask(None)

    def _ask(self, request: tuple[Any, Document] | None) -> None:
        """Let the thread wait for changes, instead of those that it waits for; None: for none."""
        with self._changed:
            self._longpoll.interrupt()
            self._asked = self._request = request
            if self._thread is None and request is not None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # -- in the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._request is not None)
                if self._closed or self._request is None:
                    return
                request, self._request = self._request, None
                generation = self._longpoll.generation
                # Changes in quick succession share one response, and their messages one claim request.
                seconds = self._last_start + self._interval - time.monotonic()
                self._sleep(seconds, generation)
            self._last_start = time.monotonic()
            report = self._wait(generation, *request)
            if report is not None:
                self._note(report, generation)

    def _sleep(self, seconds: float, generation: int) -> None:
        """Wait before a longpoll; no longer if it is interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: generation != self._longpoll.generation, max(0.0, seconds))

    def _wait(self, generation: int, since: Any, body: Document) -> Changes | None:
        try:
            found = self._longpoll.wait(generation, since, body, docs=self._docs, heartbeat=self._heartbeat)
        except CouchDBError as exc:
            return Changes((), None, exc)
        except Exception as exc:  # the owner must learn of any error, because it does not poll while the feed waits
            logger.exception('the changes feed failed')
            return Changes((), None, ServerUnavailable(f'{self._client.address.url}: the changes feed failed: {exc!r}'))
        return None if found is None else Changes(found['results'], found['last_seq'])

    def _note(self, report: Changes, generation: int) -> None:
        with self._changed:
            if generation != self._longpoll.generation:
                return
            if report.error:
                self._outage.failed(report.error)
            else:
                self._outage.recovered()
            self._asked, self._report = None, report
            self._changed.notify_all()
        self._wake()
