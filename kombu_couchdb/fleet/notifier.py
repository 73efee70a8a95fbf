"""The notifier: what is new in the databases, from changes feeds, and from reads if the consumer follows none.

The changes feed of the broker's database is expensive: CouchDB looks at each change for each feed (0.4 ms of processor
time). So few consumers listen to it, see `attention`, and only while their queues are empty: a consumer that has
credit for a queue with messages reads the queue anyway. Every consumer follows the broadcasts database, which changes
rarely, for broadcasts, notices and bells (see `queues.databases`). The costs do not grow
with the number of queues that other processes have declared.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..couchdb.changes import LIMIT, Changes, Follower
from ..couchdb.client import Client, Document
from ..documents.ids import BROADCAST, BROKER
from ..documents.workitem import is_waiting
from ..errors import CouchDBError, DatabaseMissing
from ..log import get_logger
from ..outage import Outage
from ..queues import waiting
from ..queues.databases import BroadcastsDatabase
from ..queues.fanout import AFTER, Listener
from ..queues.topology import Topology
from .attention import Attention
from .candidates import QueueCandidates
from .coordination import Coordination

logger = get_logger(__name__)

#: How long a listener that was busy waits before it follows the feed again, in seconds.
_LINGER_SECONDS = 1.0

#: How long a resting consumer keeps what it knows of its queues after its last credit is used, in seconds.
_KEEP_SECONDS = 10.0

#: Seconds between the empty lines that the server sends: of all that an idle consumer asks of it, they would cost the
#: most if they came as often as in other feeds. Those of the listeners, and looks, notice a silent server.
_HEARTBEAT_SECONDS = 15.0

#: A broadcast in the broker's database that is younger than this was published there while this feed was followed, in
#: seconds: longer than the pause between two looks.
_RECENT_SECONDS = 15.0

#: For how many seconds others are then expected to publish more of them there.
_DISTRUST_SECONDS = 60.0


class BroadcastFeed:
    """What is new in the broadcasts database, for the I/O thread of one connection.

    The feed has no filter: the database rarely changes, and every consumer must know all of it. It raises no errors: if
    the database cannot be followed, it is not followed, and tried again later.
    """

    def __init__(self, database: BroadcastsDatabase, name: str, on_change: Callable[[], None]) -> None:
        """`name` is the name of the thread, which calls `on_change()` when `take` has something to return."""
        self._database = database
        self._follower = Follower(database.client, name, on_change, docs=True, heartbeat=_HEARTBEAT_SECONDS)
        self._follows = False
        self._distrusted_until = -math.inf
        self._outage = Outage(logger, 'the database of broadcasts is not followed: %s', level=logging.DEBUG)
        self._rung = set[str]()
        #: Whether declarations may have changed since they were read. Whoever reads them resets it.
        self.noticed = False

    def close(self) -> None:
        """End the feed's thread."""
        self._follower.close()
        self._database.close()

    def on_outage(self) -> None:
        """Forget everything: CouchDB did not respond, or the databases may be new ones."""
        self._stop()
        self._outage.recovered()

    @property
    def is_followed(self) -> bool:
        """Whether everything that a consumer must learn soon arrives here."""
        return self._follows and time.monotonic() >= self._distrusted_until

    def due_at(self) -> float:
        """Return the monotonic time at which `take` or `follow` has something to do; infinity if none is known."""
        if self.noticed:
            return -math.inf
        return math.inf if self._follows else max(self._outage.until, self._database.next_look)

    def ring(self, queue: str) -> None:
        """Wake the consumers that rest: messages wait in this queue, and no listener can take them."""
        self._database.ring(queue)

    def rung(self) -> set[str]:
        """Return the queues whose bells rang since the last call."""
        rung, self._rung = self._rung, set()
        return rung

    def take(self) -> list[Document]:
        """Return the broadcasts that the feed reported, and let it continue; no request."""
        report, docs = self._follower.take(), list[Document]()
        if report is not None and self._follows:  # else reported before it was stopped: `follow` reads the broadcasts
            docs = _docs_of(report)
            if report.error is None:
                self._outage.recovered()
                self._follower.follow(report.last)
            else:
                self._outage.failed(report.error)
                self._stop()
            if isinstance(report.error, DatabaseMissing):
                logger.warning('%s; broadcasts that were not read yet are lost', report.error)
        if self._follows and time.monotonic() < self._database.next_look:
            self._stop()  # another thread found that it is missing or locked
        for doc in docs:
            self.noticed |= doc.get('type') == 'Notice'
            if doc.get('type') == 'Bell' and isinstance(doc.get('queue'), str):
                self._rung.add(doc['queue'])
        return [doc for doc in docs if doc.get('type') == 'Broadcast']

    def follow(self) -> list[Document]:
        """Follow the database if it is not followed yet and can be; return the broadcasts that are stored."""
        if self._follows or time.monotonic() < self._outage.until:
            return []

        def read(client: Client) -> tuple[Any, list[Document]]:
            # The sequence first, so that nothing falls between the two.
            return client.sequence(), [row['doc'] for row in client.id_range(BROADCAST, docs=True)]

        try:
            found = self._database.ask(read)
        except CouchDBError as exc:
            self._outage.failed(exc)
            return []
        if found is None:
            return []
        since, docs = found
        self._follows = self.noticed = True
        self._follower.follow(since)
        return docs

    def stored(self) -> list[Document]:
        """Return all broadcasts that are stored now, or none if they cannot be read: two requests."""
        try:
            return self._database.stored()
        except CouchDBError as exc:  # messages must not wait for this database
            logger.debug('the broadcasts are not read: %s', exc)
            return []

    def saw_elsewhere(self, docs: list[Document]) -> None:
        """Take in documents from the broker's database.

        If there are new broadcasts among them, their publisher has an older version, or cannot write here. It may write
        more of them, so this feed alone does not suffice for a while.
        """
        dates = [doc.get('date') for doc in docs if doc.get('type') == 'Broadcast']
        newest = max((date for date in dates if isinstance(date, (int, float))), default=None)
        if newest is not None and newest > self._database.broker.clock.now() - _RECENT_SECONDS:
            self._distrusted_until = time.monotonic() + _DISTRUST_SECONDS

    def _stop(self) -> None:
        self._follows = False
        self._follower.pause()


class Notifier:
    """What is new for the I/O thread of one connection. It keeps `listener` and `coordination` up to date."""

    def __init__(
        self, client: Client, topology: Topology, listener: Listener, name: str, on_change: Callable[[], None]
    ) -> None:
        """The feeds' threads, whose names begin with `name`, call `on_change()` when `take` has something to return."""
        self.listener = listener
        database = topology.broadcasts or BroadcastsDatabase(client)
        self.broadcasts = BroadcastFeed(database, f'{name}-broadcasts-feed', on_change)
        self.coordination = Coordination(client, topology, listener)
        self.peers = self.coordination.peers
        #: Whether this consumer follows the feed of the broker's database.
        self.attention = Attention(self.peers)
        self._client, self._topology = client, topology
        self._follower = Follower(client, f'{name}-feed', on_change, docs=True)
        #: The least seconds between two looks at the feed, if they are more than its own.
        self.feed_interval = 0.0
        #: The update sequence from which the feed is followed; None: it is not followed.
        self._since: Any = None
        #: The queues whose messages the feed reports.
        self._followed: frozenset[str] = frozenset()
        #: An update sequence from before the queues were last read, or None.
        self._checkpoint: Any = None
        #: The monotonic times at which it read its queues without a break: first and last.
        self._busy_since = self._busy_at = -math.inf

    def close(self) -> None:
        """End the feeds' threads."""
        self._topology.known.follow(0.0)
        self._follower.close()
        self.broadcasts.close()

    def on_outage(self) -> None:
        """Forget everything: CouchDB did not respond, or the databases may be new ones."""
        self._stop_feed()
        self.coordination.forget()
        self._checkpoint = None
        self.broadcasts.on_outage()

    def due_at(self) -> float:
        """Return the monotonic time at which `take` has something to read."""
        waits_to_follow = self.attention.listens and self._since is None and self._checkpoint is not None
        return min(
            self.broadcasts.due_at(),
            self.attention.look_at,
            self._coordination_due_at(),
            self._busy_at + _LINGER_SECONDS if waits_to_follow else math.inf,
        )

    def _coordination_due_at(self) -> float:
        if self._since is not None:
            return math.inf  # the feed reports all of it
        is_busy = time.monotonic() - self._busy_at < _LINGER_SECONDS
        # A burst of messages wakes all consumers: they have enough to do without reading about each other.
        is_burst = self._busy_at - self._busy_since <= _LINGER_SECONDS
        return self.coordination.due_at(is_announced=self.broadcasts.is_followed, counts_peers=is_busy and not is_burst)

    def take(
        self, own: str, candidates: Mapping[str, QueueCandidates], with_credit: set[str]
    ) -> tuple[list[Document], list[tuple[str, Document]]]:
        """Return the new messages that wait, also parked ones, and the new broadcasts as `(queue, message)`.

        `own` is the id of this consumer, and `with_credit` names the queues for which a message could be claimed now.
        *Raises* the error that ended the feed.
        """
        docs = self._take_received(candidates)
        broadcasts = self.broadcasts.take()
        for queue in self.broadcasts.rung():
            self.attention.heard(queue)
        self._attend(own, candidates, with_credit)
        followed, now = self.attention.followed, time.monotonic()
        is_busy = any(candidates[queue].is_stale for queue in followed)
        if is_busy:
            self._busy_since = now if now - self._busy_at >= _LINGER_SECONDS else self._busy_since
            self._busy_at = now
        if not self.attention.listens:
            self._stop_feed()
            self._checkpoint = None
        elif is_busy:
            self._stop_feed()
            if self._checkpoint is None or any(
                candidates[queue].reads_head_next and candidates[queue].needs_page for queue in followed
            ):
                # If the feed starts at this point, it does not report older changes: read all queues after this point.
                # Only a read of the head can make the candidates of a queue complete. CouchDB reads each document that
                # changed after this point for the feed, so the point is not older than that read.
                self._checkpoint = self._client.sequence()
                for queue_candidates in candidates.values():
                    queue_candidates.mark_stale()
            else:
                # Meanwhile no feed reports what happens in the other queues.
                quiet = set(filter(self._is_quiet, followed))
                self.attention.unread_quiet |= quiet
                for queue in followed - quiet:
                    if not len(candidates[queue]):
                        candidates[queue].mark_stale()
        elif now - self._busy_at >= _LINGER_SECONDS or not any(
            queue_candidates.is_stale for queue_candidates in candidates.values()
        ):
            docs += self._follow_feed(candidates)
        if self._since is not None:
            self.broadcasts.noticed = False
        elif self.broadcasts.noticed or now >= self._coordination_due_at():
            docs += self._read_coordination(candidates, everything=self.broadcasts.noticed)
        if docs:
            self.broadcasts.saw_elsewhere(docs)
        broadcasts += self.broadcasts.follow()  # last: in an outage the requests above end the cycle
        for doc in broadcasts:
            self._topology.known.note_reply(doc.get('reply'))
        items = [doc for doc in docs if doc.get('type') == 'WorkItem' and is_waiting(doc)]
        # CouchDB's filter also admits a document whose `queue` is a list with the name in it.
        return [
            doc for doc in items if isinstance(doc.get('queue'), str) and doc['queue'] in candidates
        ], self.listener.take(docs + broadcasts)

    def take_before(self, messages: Iterable[Mapping[str, Any]]) -> list[tuple[str, Document]]:
        """Return the new broadcasts as `(queue, message)` that must be delivered before these messages.

        No request, unless one of the messages names a broadcast that has not arrived. Then the broadcasts are read
        once, whether that one is still there or not.
        """
        named = [after for message in messages if (after := message['properties'].get(AFTER)) is not None]
        if not named or not any(self.listener.lacks(after, self._client.clock.now()) for after in named):
            return []
        docs = self.broadcasts.stored()
        for doc in docs:
            self._topology.known.note_reply(doc.get('reply'))
        return self.listener.take(docs)

    def _attend(self, own: str, candidates: Mapping[str, QueueCandidates], with_credit: set[str]) -> None:
        """Decide whether to listen or to rest; look at queues where that is due, and forget what was not followed."""
        self.peers.set_own(own, candidates)
        # The messages of a paused queue wait in any case. A long one would keep the consumer from following the feed.
        queues = candidates.keys() - self._topology.paused
        quiet = set(filter(self._is_quiet, queues))
        pace = self._client.pace
        self.attention.pause_factor = pace.polling_factor if pace else 1.0
        unread = self.attention.update(own, queues, with_credit, quiet=quiet, may_rest=self.broadcasts.is_followed)
        if self.attention.listens:
            if unread:
                self._checkpoint = None
            for queue in unread:
                candidates[queue].mark_stale()
            return
        keeps = time.monotonic() - self.attention.credit_at <= _KEEP_SECONDS
        for queue, queue_candidates in candidates.items():
            queue_candidates.next_due = None  # the listeners wait for that date
            if queue in unread and self.attention.hurries(queue):
                queue_candidates.mark_stale()
                queue_candidates.hurries = True
                unread = unread - {queue}
            elif queue in unread and len(queue_candidates):
                queue_candidates.mark_stale()  # first claim what is known to wait
            elif not keeps and queue not in with_credit:
                queue_candidates.clear()
        if unread := {queue for queue in unread if not len(candidates[queue])}:
            until = self._client.clock.now() + waiting.HORIZON_SECONDS
            for queue, ids in waiting.first_due(self._client, sorted(unread), until).items():
                if ids:
                    candidates[queue].mark_stale()
                else:
                    candidates[queue].found_empty()

    def _is_quiet(self, queue: str) -> bool:
        """Tell whether a queue is there for broadcasts: each worker has one for remote control."""
        return self.listener.receives(queue) and self._topology.is_temporary(queue)

    def _take_received(self, candidates: Mapping[str, QueueCandidates]) -> list[Document]:
        """Return the documents that the feed reported, and let it continue."""
        report = self._follower.take()
        if report is None:
            return []
        if report.error is not None:
            raise report.error
        docs = _docs_of(report)
        if self._since is not None:  # else it was reported before the feed was stopped
            if len(report.rows) >= LIMIT:
                self._stop_feed()
                for queue in self._followed & candidates.keys():
                    candidates[queue].mark_stale()
            else:
                self._start_feed(report.last, self._followed)
        for doc in docs:
            self.coordination.note(doc)
        return docs

    def _follow_feed(self, candidates: Mapping[str, QueueCandidates]) -> list[Document]:
        """Follow the feed for the queues that this consumer follows: the candidates of each are complete."""
        followed = frozenset(self.attention.followed)
        for queue in candidates.keys() - followed:
            candidates[queue].clear()  # the feed does not report what happens in it
        if self._since is None:
            # The checkpoint may be old. If no queue is followed, none needs the changes since then.
            since = self._client.sequence() if self._checkpoint is None or not followed else self._checkpoint
            # The feed reports what is stored after this point, and notices told of what was stored before.
            missed = self.broadcasts.noticed or not self.broadcasts.is_followed
            docs = self._read_coordination(candidates, everything=True) if missed else []
            self._start_feed(since, followed)
            self._checkpoint = None
            return docs
        for queue in followed - self._followed:
            # When the queue was read, the feed did not report it, and was at an unknown point: read it again.
            candidates[queue].mark_stale()
        if followed != self._followed:
            self._start_feed(self._since, followed)
        self._checkpoint = None
        return []

    def _read_coordination(self, candidates: Mapping[str, QueueCandidates], *, everything: bool) -> list[Document]:
        if everything:
            self.broadcasts.noticed = False
        return self.coordination.read(candidates, is_announced=self.broadcasts.is_followed, everything=everything)

    def _start_feed(self, since: Any, queues: frozenset[str]) -> None:
        self._since, self._followed = since, queues
        self._topology.known.follow(math.inf)
        self._follower.follow(since, _selector(queues), interval=self.feed_interval)

    def _stop_feed(self) -> None:
        if self._since is not None:
            # Whatever reads the queues from now on is newer than this point.
            self._checkpoint = self._since if self._checkpoint is None else self._checkpoint
            self._since = None
            self._follower.pause()


def _selector(queues: frozenset[str]) -> Document:
    """Return the feed's filter: messages of these queues that no consumer has claimed, and the broker's documents."""
    return {
        '$or': [
            {'type': 'WorkItem', 'claimed': None, 'queue': {'$in': sorted(queues)}, 'status': {'$exists': False}},
            {'type': {'$in': ['Binding', 'Exchange', 'Broadcast', 'Queue', 'Pause']}},
            {'type': 'Consumer', 'beats': 0},
            {'_deleted': True, '_id': {'$gt': BROKER, '$lt': 'broker;'}},
        ]
    }


def _docs_of(report: Changes) -> list[Document]:
    return [row['doc'] for row in report.rows if row.get('doc')]
