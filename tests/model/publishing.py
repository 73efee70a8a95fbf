"""The state machine with a publisher that publishes a third item: its requests may arrive late, or never."""

from __future__ import annotations

from typing import Any, ClassVar

from greenlet import greenlet
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kombu_couchdb import errors
from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.documents import workitem
from kombu_couchdb.queues.store import Store

from .couchdb import Write
from .machine import NODE, Cluster, Protocol, Single
from .world import QUEUE, Actor, World

#: How often the publisher tries again.
_TRIES = 3


class Publisher(Actor):
    """A process that publishes the item `c`. If a request got no response, it publishes the same item again."""

    def __init__(self, world: World, headers: dict[str, Any]) -> None:
        super().__init__(world)
        client = world.client(0.0)
        self._store = Store(client)
        self._store._commits = GroupCommit(client, once=True)
        message = {
            'body': '[[], {}, {}]',
            'content-type': 'application/json',
            'content-encoding': 'utf-8',
            'headers': {'id': 'c', **headers},
            'properties': {'delivery_tag': 'c', 'body_encoding': 'utf-8'},
        }
        self._item = workitem.new('c', QUEUE, message, world.now)
        #: Its writes, with a response or without: they may still reach nodes.
        self.writes: list[Write] = []
        self._thread = greenlet(self._publish)
        self.waiting = self._thread.switch()

    def _publish(self) -> None:
        for _ in range(_TRIES):
            try:
                self._store.publish([self._item])
            except errors.ServerUnavailable:
                continue
            except errors.Conflict:
                pass  # only if a fault was put in: an earlier attempt was stored
            self._world.published.add(self._item['_id'])
            return

    def _resume(self, answer: Any) -> None:
        if self.write is not None:
            self.writes.append(self.write)
        super()._resume(answer)


class Publishing(Protocol):
    """An item is published while the others are consumed.

    The rule `land` delivers its requests at any time, and the network delivers the last of them when all work is done.
    """

    most = 3
    #: The headers of the third item.
    more_headers: ClassVar[dict[str, Any]] = {}
    publisher: Publisher | None = None

    @rule(at=NODE, lost=st.booleans())
    @precondition(lambda self: self.publisher is None or self.publisher.asks)
    def publish(self, at: int, lost: bool) -> None:
        """The publisher sends its next write; or it gets the response, or loses the connection instead."""
        if self.publisher is None:
            self.publisher = Publisher(self.world, self.more_headers)
        elif lost:
            self.publisher.cut()
        else:
            self.publisher.go(at)
        while self.publisher.asks and not self.publisher.write:
            self.publisher.go(at)

    def end_faults(self) -> None:
        while self.publisher is not None and self.publisher.asks:
            self.publisher.go()
        under_way = self.world.couchdb.under_way
        late = [write for write in (self.publisher.writes if self.publisher else ()) if write in under_way]
        for write in late:
            under_way.remove(write)
        super().end_faults()
        for write in late:
            for node in [*write.pending]:
                self.world.couchdb.land(write, node)
        super().end_faults()


class PublishingSingle(Publishing, Single):
    """One node."""


class PublishingCluster(Publishing, Cluster):
    """Three nodes."""


class PublishingJob(PublishingSingle):
    """One node, and the third item is a unique job."""

    more_headers: ClassVar[dict[str, Any]] = {'task': 'add', 'job_key': 'k'}
