"""The point from which the changes feed is followed (`kombu_couchdb.consumer.notifier`): no message may be missed."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.consumer.notifier import Notifier
from kombu_couchdb.couchdb.changes import LIMIT


class QueueCandidates:
    """The part of `QueueCandidates` that the notifier uses."""

    def __init__(self, size: int = 0, *, dirty: bool = False) -> None:
        self.size, self.is_stale, self.is_outdated = size, dirty, False

    def __len__(self) -> int:
        return self.size

    def mark_stale(self) -> None:
        self.is_stale = True

    def clear(self) -> None:
        self.size, self.is_stale = 0, True


class Server:
    """A server whose update sequence is the number of times that it was read."""

    def __init__(self) -> None:
        self.points = 0

    def sequence(self) -> int:
        self.points += 1
        return self.points

    def id_range(self, prefix: str, to: str) -> list[Any]:
        return []

    def fetch(self, ids: list[str]) -> list[Any]:
        return []

    def find(self, ids: list[str]) -> list[Any]:
        return [None for _ in ids]


class Unused:
    """A stub for the topology and the listener."""

    @property
    def routes(self) -> Unused:
        return self

    limits = declarations = routes
    wanted: frozenset[str] = frozenset()
    exchanges = wanted

    def follow(self, seconds: float, exchanges: Any = ()) -> None: ...

    def replace(self, docs: Any, at: float) -> None: ...

    def seen(self, doc: Any) -> None: ...

    def was_deleted(self, doc_id: str) -> None: ...

    def read_paused(self, ids: Any) -> None: ...

    def take(self, docs: Any) -> list[Any]:
        return []


class NoBroadcasts:
    """A broadcasts database that cannot be used."""

    noticed = is_followed = False

    def take(self) -> list[Any]:
        return []

    follow = take

    def saw_elsewhere(self, docs: Any) -> None: ...

    def on_outage(self) -> None: ...


class ContinuousFeed:
    """A feed that remembers from where, and for which queues, it is followed."""

    def __init__(self) -> None:
        self.wanted: tuple[Any, Any] | None = None

    def watch(self, since: Any, selector: Any) -> None:
        self.wanted = (since, selector['$or'][0]['queue']['$in'])

    def pause(self) -> None:
        self.wanted = None


@pytest.fixture
def notifier() -> Notifier:
    notifier = Notifier(Server(), Unused(), Unused(), NoBroadcasts(), 'test')  # type: ignore[arg-type]
    notifier._feed = ContinuousFeed()  # type: ignore[assignment]
    return notifier


def watched(notifier: Notifier) -> tuple[Any, Any] | None:
    return notifier._feed.wanted  # type: ignore[union-attr]


def follow(notifier: Notifier, *queues: str) -> dict[str, QueueCandidates]:
    """Let the notifier follow the feed for some queues."""
    candidates = {queue: QueueCandidates(dirty=True) for queue in queues}
    notifier.take(candidates, set(queues))  # type: ignore[arg-type]
    for queue_candidates in candidates.values():
        queue_candidates.is_stale = False  # it was read
    notifier.take(candidates, set(queues))  # type: ignore[arg-type]
    assert watched(notifier) == (1, sorted(queues))
    return candidates


def test_feed_starts_before_the_queues_were_read(notifier: Notifier) -> None:
    follow(notifier, 'a', 'b')


def test_many_candidates_without_credit_are_forgotten(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q')
    candidates['q'].size = LIMIT + 1
    notifier.take(candidates, set())  # type: ignore[arg-type]
    assert candidates['q'].is_stale
    assert watched(notifier) == (1, [])


def test_candidates_with_credit_are_kept(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q')
    candidates['q'].size = LIMIT + 1
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    assert not candidates['q'].is_stale
    assert watched(notifier) == (1, ['q'])


def test_queue_read_without_the_feed_is_read_again(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q')
    candidates['q'].mark_stale()
    notifier._busy_at = float('-inf')
    notifier.take(candidates, set())  # type: ignore[arg-type]
    assert watched(notifier) == (1, [])
    candidates['q'].is_stale = False  # read, at a point that the notifier does not know
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    assert candidates['q'].is_stale


def test_all_queues_are_read_again_after_an_outage(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q')
    notifier.on_outage()
    candidates['q'].mark_stale()  # with released messages as candidates, so it is not outdated
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    candidates['q'].is_stale = False
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    assert watched(notifier) == (2, ['q'])
