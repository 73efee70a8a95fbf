"""The feed of the broadcasts database, which every consumer follows: broadcasts, notices and bells.

The feed has no filter: the database rarely changes, and every consumer must know all of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..couchdb.changes import ContinuousFeed
from ..couchdb.client import Client, Document, Row
from ..documents.ids import BROADCAST
from ..errors import CouchDBError, DatabaseMissing
from ..log import get_logger
from ..queues.broadcasts_database import BroadcastsDatabase

logger = get_logger(__name__)

#: Seconds between the empty lines that the server sends: of all that an idle consumer asks of it, they would cost the
#: most if they came as often as in other feeds. Those of the listeners, and looks, notice a silent server.
_HEARTBEAT_SECONDS = 15.0

#: The least seconds between two attempts to follow the feed.
_RETRY_SECONDS = 5.0

#: A broadcast in the broker's database that is younger than this was published there while this feed was followed, in
#: seconds: longer than the pause between two looks.
_RECENT_SECONDS = 15.0

#: For how many seconds others are then expected to publish more of them there.
_DISTRUST_SECONDS = 60.0


class BroadcastFeed:
    """What is new in the broadcasts database, for the I/O thread of one connection.

    It raises no errors: if the database cannot be followed, it is not followed, and tried again later.
    """

    def __init__(self, database: BroadcastsDatabase, name: str) -> None:
        """`name` begins the name of the thread."""
        self._database, self._name = database, name
        self._feed: ContinuousFeed | None = None
        self._received: deque[tuple[list[Row], Any] | CouchDBError] = deque()
        self._follows = False
        self._next_try = self._distrusted_until = float('-inf')
        self._rung = set[str]()
        #: Whether declarations may have changed since they were read. Whoever reads them resets it.
        self.noticed = False

    def start(self, on_change: Callable[[], None]) -> None:
        """Start the feed's thread; it calls `on_change()` when `take` has something to return."""

        def receive(item: tuple[list[Row], Any] | CouchDBError) -> None:
            self._received.append(item)
            on_change()

        self._feed = ContinuousFeed(
            self._database.client,
            lambda rows, seq: receive((rows, seq)),
            receive,
            f'{self._name}-broadcasts-feed',
            heartbeat=_HEARTBEAT_SECONDS,
        )

    def close(self) -> None:
        """End the feed's thread."""
        if self._feed is not None:
            self._feed.close()
        self._database.close()

    def on_outage(self) -> None:
        """Forget everything: CouchDB did not respond, or the databases may be new ones."""
        self._stop()
        self._received.clear()
        self._next_try = float('-inf')

    @property
    def is_followed(self) -> bool:
        """Whether everything that a consumer must learn soon arrives here."""
        return self._follows and time.monotonic() >= self._distrusted_until

    def due_at(self) -> float:
        """Return the monotonic time at which `take` or `follow` has something to do; infinity if none is known."""
        if self.noticed:
            return float('-inf')
        return float('inf') if self._follows else max(self._next_try, self._database.next_look)

    def ring(self, queue: str) -> None:
        """Wake the consumers that rest: messages wait in this queue, and no listener can take them."""
        self._database.ring(queue)

    def rung(self) -> set[str]:
        """Return the queues whose bells rang since the last call."""
        rung, self._rung = self._rung, set()
        return rung

    def take(self) -> list[Document]:
        """Return the broadcasts that the feed reported, and let it continue; no request."""
        docs: list[Document] = []
        while self._received:
            item = self._received.popleft()
            if not self._follows:
                continue  # reported before it was stopped: `follow` reads the broadcasts again
            if isinstance(item, CouchDBError):
                self._stop()
                if isinstance(item, DatabaseMissing):
                    logger.warning('%s; broadcasts that were not read yet are lost', item)
            else:
                rows, last = item
                docs += [row['doc'] for row in rows if row.get('doc')]
                self._watch(last)
        if self._follows and time.monotonic() < self._database.next_look:
            self._stop()  # another thread found that it is missing or locked
        for doc in docs:
            self.noticed |= doc.get('type') == 'Notice'
            if doc.get('type') == 'Bell' and isinstance(doc.get('queue'), str):
                self._rung.add(doc['queue'])
        return [doc for doc in docs if doc.get('type') == 'Broadcast']

    def follow(self) -> list[Document]:
        """Follow the database if it is not followed yet and can be; return the broadcasts that are stored."""
        if self._follows or time.monotonic() < self._next_try:
            return []

        def read(client: Client) -> tuple[Any, list[Document]]:
            # The sequence first, so that nothing falls between the two.
            return client.sequence(), [row['doc'] for row in client.id_range(BROADCAST, docs=True)]

        self._next_try = time.monotonic() + _RETRY_SECONDS
        try:
            found = self._database.ask(read)
        except CouchDBError as exc:
            logger.debug('the database of broadcasts is not followed: %s', exc)
            return []
        if found is None:
            return []
        since, docs = found
        self._follows = self.noticed = True
        self._watch(since)
        return docs

    def saw_elsewhere(self, docs: list[Document]) -> None:
        """Take in documents from the broker's database.

        If there are new broadcasts among them, their publisher has an older version, or cannot write here. It may write
        more of them, so this feed alone does not suffice for a while.
        """
        dates = [doc.get('date') for doc in docs if doc.get('type') == 'Broadcast']
        newest = max((date for date in dates if isinstance(date, (int, float))), default=None)
        if newest is not None and newest > self._database.broker.clock.now() - _RECENT_SECONDS:
            self._distrusted_until = time.monotonic() + _DISTRUST_SECONDS

    def _watch(self, since: Any) -> None:
        if self._feed is not None:
            self._feed.watch(since, None)

    def _stop(self) -> None:
        self._follows = False
        if self._feed is not None:
            self._feed.pause()
