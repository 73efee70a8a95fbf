"""A thread that waits on `_changes`, so that its owner need not poll.

What a feed says is a hint that arrives within milliseconds; the documents are the truth. A feed waits only while it is
armed, and each answer must be followed by arming it again: an owner that is busy anyway asks nothing of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import requests
from kombu.log import get_logger

from .client import Client, Row
from .errors import CouchDBError, ServerUnavailable

__all__ = ['LIMIT', 'Feed']

logger = get_logger(__name__)

#: The most rows of one answer; as many mean that there may be more than is worth reading here.
LIMIT = 200

#: The server sends an empty line this often, in seconds: a feed that hears none for twice as long is cut off.
_BEAT = 4.0


class Feed:
    """One longpoll at a time on the changes of a database.

    `on_rows(rows, last_seq)` is called in the feed's thread with the rows that the selector admits, documents included.
    `on_error(exc)` is called when the wait broke off. After either the feed rests until `watch` is called again.
    """

    def __init__(self, client: Client, on_rows: Callable[[list[Row], Any], None],
                 on_error: Callable[[CouchDBError], None], name: str) -> None:
        self._client = client
        self._on_rows, self._on_error = on_rows, on_error
        self._wake = threading.Condition()
        self._wanted: tuple[Any, dict[str, Any]] | None = None
        self._turn = 0
        self._response: requests.Response | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, since: Any, selector: dict[str, Any]) -> None:
        """Wait for changes after `since`; an earlier wait is given up."""
        with self._wake:
            self._interrupt()
            self._wanted = (since, selector)
            self._wake.notify()

    def rest(self) -> None:
        """Give up waiting."""
        with self._wake:
            self._interrupt()
            self._wanted = None

    def close(self) -> None:
        """End the thread; it is gone at the server's next empty line at the latest."""
        with self._wake:
            self._closed = True
            self._interrupt()
            self._wake.notify()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the thread to end."""
        self._thread.join(timeout)

    def _interrupt(self) -> None:
        self._turn += 1  # whatever the running wait still answers is void
        if self._response is not None:
            try:
                self._response.raw.shutdown()  # urllib3 2.3 and later; with older ones the next empty line does it
            except (AttributeError, ValueError, RuntimeError, OSError):
                logger.debug('feed %s ends with its next line', self._thread.name)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._wanted is not None)
                if self._closed or self._wanted is None:
                    return
                since, selector = self._wanted
                self._wanted = None
                turn = self._turn
            try:
                answer = self._wait(since, selector, turn)
            except CouchDBError as exc:
                if turn == self._turn:
                    self._on_error(exc)
            except Exception as exc:  # whatever it is, the owner must not wait for news that cannot come
                logger.exception('the feed of changes failed')
                self._on_error(ServerUnavailable(f'{self._client.address.url}: the feed of changes failed: {exc!r}'))
            else:
                if answer is not None and turn == self._turn:
                    self._on_rows(answer['results'], answer['last_seq'])

    def _wait(self, since: Any, selector: dict[str, Any], turn: int) -> dict[str, Any] | None:
        response = self._client.open_changes(since, selector, LIMIT, _BEAT)
        try:
            with self._wake:
                self._response = response
            text = bytearray()
            for chunk in response.iter_content(None):
                if turn != self._turn:
                    return None
                text += chunk
        except (requests.RequestException, OSError) as exc:
            raise ServerUnavailable(f'{self._client.address.url}: the feed of changes was cut off') from exc
        finally:
            with self._wake:
                self._response = None
            response.close()
        if turn != self._turn:
            return None
        answer = self._client.decode(bytes(text))
        if not isinstance(answer, dict) or 'last_seq' not in answer:
            raise ServerUnavailable(f'{self._client.address.url}: the feed of changes gave a broken answer')
        return answer
