"""Waiting on `_changes`, so that nobody need poll: one wait that can be broken off, and a thread that does nothing else.

What a feed says is a hint that arrives within milliseconds; the documents are the truth. A feed waits only while it is
armed, and each answer must be followed by arming it again: an owner that is busy anyway asks nothing of the server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import requests

from ..errors import BrokenAnswer, CouchDBError, NestedTooDeeply, ServerUnavailable, from_transport
from ..log import get_logger
from .client import CHANGES, Client, Document, Row

__all__ = ['LIMIT', 'ContinuousFeed', 'Longpoll']

logger = get_logger(__name__)

#: The most rows of one answer; as many mean that there may be more than is worth reading here.
LIMIT = 200

#: The least time from one wait to the next, in seconds: each costs the server 3 ms, one change in it 0.1 ms.
_APART = 0.015

#: The server sends an empty line this often, in seconds: a feed that hears none for twice as long is cut off.
_BEAT = 4.0


class Longpoll:
    """One wait at a time for a change, by one thread; any thread may break it off."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # An abandoned generator may be collected, and end its wait, in the midst of anything: also of `interrupt`.
        self._lock = threading.RLock()
        self._turn = 0
        self._response: requests.Response | None = None

    @property
    def turn(self) -> int:
        """Names the wait that may begin now; `interrupt` ends it, even if it has not begun yet."""
        return self._turn

    def interrupt(self) -> None:
        """Break off the wait; where urllib3 is older than 2.3, it ends with the server's next empty line."""
        with self._lock:
            self._turn += 1
            if self._response is not None:
                try:
                    self._response.raw.shutdown()
                except (AttributeError, ValueError, RuntimeError, OSError) as exc:
                    logger.debug('a wait for changes ends with its next line: %r', exc)

    def wait(self, turn: int, since: Any, body: Document, *, docs: bool = True, limit: int = LIMIT) -> Document | None:
        """Return `{'results', 'last_seq'}` once something has changed after `since`; None if broken off.

        `body` is `{'selector': …}`, `{'doc_ids': […]}` or, for all changes, empty. *Raises* the errors of `Client`.
        """
        if turn != self._turn:
            return None
        try:
            response = self._client.open_changes(since, body, limit, _BEAT, docs=docs)
        except CouchDBError:
            if turn != self._turn:
                return None
            raise
        text, error = bytearray(), cast('CouchDBError | None', None)
        try:
            with self._lock:
                self._response = response
            for chunk in response.iter_content(None):
                if turn != self._turn:
                    return None
                text += chunk
        except requests.RequestException as exc:
            error = from_transport(exc, f'{self._client.address.url}: the feed of changes was cut off')
        except (OSError, ValueError, AttributeError):  # the last two: TLS, while shut down
            error = ServerUnavailable(f'{self._client.address.url}: the feed of changes was cut off')
        finally:
            with self._lock:
                self._response = None
            response.close()
        del response  # it may prolong the session, and nobody shall see that in a traceback
        if turn != self._turn:
            return None
        if error is not None:  # raised here, without the frames of what caused it
            raise error
        if not text.strip():  # a proxy may end it so, between two of its empty lines
            raise BrokenAnswer(f'{self._client.address.url}: the feed of changes was cut off')
        return cast(Document, self._client.decode(bytes(text), request='POST /_changes', shape=CHANGES))


class ContinuousFeed:
    """A thread that waits for the changes that a selector admits.

    `on_rows(rows, last_seq)` is called in the feed's thread, with the documents in the rows if `docs` says so. `on_error(exc)` is
    called when the wait broke off. After either the feed rests until `watch` is called again.
    """

    def __init__(
        self,
        client: Client,
        on_rows: Callable[[list[Row], Any], None],
        on_error: Callable[[CouchDBError], None],
        name: str,
        *,
        docs: bool = True,
    ) -> None:
        self._client, self._docs = client, docs
        self._on_rows, self._on_error = on_rows, on_error
        self._longpoll = Longpoll(client)
        self._wake = threading.Condition()
        self._wanted: tuple[Any, Document] | None = None
        self._closed = False
        self._began = float('-inf')
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, since: Any, selector: Document) -> None:
        """Wait for changes after `since`; an earlier wait is given up."""
        with self._wake:
            self._longpoll.interrupt()
            self._wanted = (since, {'selector': selector})
            self._wake.notify()

    def rest(self) -> None:
        """Give up waiting."""
        with self._wake:
            self._longpoll.interrupt()
            self._wanted = None

    def close(self) -> None:
        """End the thread; it is gone at the server's next empty line at the latest."""
        with self._wake:
            self._closed = True
            self._longpoll.interrupt()
            self._wake.notify()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the thread to end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._wanted is not None)
                if self._closed or self._wanted is None:
                    return
                since, body = self._wanted
                self._wanted = None
                turn = self._longpoll.turn
                pause = self._began + _APART - time.monotonic()
            try:
                if pause > 0:
                    time.sleep(
                        pause
                    )  # not for an event: what comes in quick succession shares one answer, and one claim
                self._began = time.monotonic()
                try:
                    answer = self._longpoll.wait(turn, since, body, docs=self._docs)
                except NestedTooDeeply:  # what can be read of it
                    answer = self._client.changes(since, body, LIMIT)
            except CouchDBError as exc:
                if turn == self._longpoll.turn:
                    self._on_error(exc)
            except Exception as exc:  # whatever it is, the owner must not wait for news that cannot come
                logger.exception('the feed of changes failed')
                self._on_error(ServerUnavailable(f'{self._client.address.url}: the feed of changes failed: {exc!r}'))
            else:
                if answer is not None and turn == self._longpoll.turn:
                    self._on_rows(answer['results'], answer['last_seq'])
