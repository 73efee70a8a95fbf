"""What a consumer listens for, and from where on: no queue may be taken for known that nobody listens for."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.consumer.notifier import Notifier
from kombu_couchdb.couchdb.changes import LIMIT


class QueueCandidates:
    """The part of the candidates that the notifier uses."""

    def __init__(self, size: int = 0, *, dirty: bool = False) -> None:
        self.size, self.is_stale, self.outdated = size, dirty, False

    def __len__(self) -> int:
        return self.size

    def mark_stale(self) -> None:
        self.is_stale = True

    def clear(self) -> None:
        self.size, self.is_stale = 0, True


class Server:
    """Counts the points in the history of a database."""

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


class Nobody:
    """Stands for what is of no interest here."""

    @property
    def routes(self) -> Nobody:
        return self

    limits = declarations = routes
    wanted: frozenset[str] = frozenset()
    exchanges = wanted

    def follow(self, seconds: float, exchanges: Any = ()) -> None: ...

    def replace(self, docs: Any, at: float) -> None: ...

    def seen(self, doc: Any) -> None: ...

    def was_deleted(self, doc_id: str) -> None: ...

    def take(self, docs: Any) -> list[Any]:
        return []


class ContinuousFeed:
    """Remembers what was last asked for."""

    def __init__(self) -> None:
        self.wanted: tuple[Any, Any] | None = None

    def watch(self, since: Any, selector: Any) -> None:
        self.wanted = (since, selector['$or'][0]['queue']['$in'])

    def pause(self) -> None:
        self.wanted = None


@pytest.fixture
def notifier() -> Notifier:
    notifier = Notifier(Server(), Nobody(), Nobody(), 'test')  # type: ignore[arg-type]
    notifier._feed = ContinuousFeed()  # type: ignore[assignment]
    return notifier


def watched(notifier: Notifier) -> tuple[Any, Any] | None:
    return notifier._feed.wanted  # type: ignore[union-attr]


def settle(notifier: Notifier, *queues: str) -> dict[str, QueueCandidates]:
    """Bring the news to listen for some queues."""
    candidates = {queue: QueueCandidates(dirty=True) for queue in queues}
    notifier.take(candidates, set(queues))  # type: ignore[arg-type]
    for queue_candidates in candidates.values():
        queue_candidates.is_stale = False  # it was read
    notifier.take(candidates, set(queues))  # type: ignore[arg-type]
    assert watched(notifier) == (1, sorted(queues))
    return candidates


def test_queues_are_listened_for_from_a_point_before_they_were_read(notifier: Notifier) -> None:
    settle(notifier, 'a', 'b')


def test_what_nobody_takes_is_not_hoarded(notifier: Notifier) -> None:
    candidates = settle(notifier, 'q')
    candidates['q'].size = LIMIT + 1
    notifier.take(candidates, set())  # type: ignore[arg-type]
    assert candidates['q'].is_stale
    assert watched(notifier) == (1, [])


def test_what_is_taken_just_now_is_kept(notifier: Notifier) -> None:
    candidates = settle(notifier, 'q')
    candidates['q'].size = LIMIT + 1
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    assert not candidates['q'].is_stale
    assert watched(notifier) == (1, ['q'])


def test_queue_that_was_read_while_nobody_listened_for_it_is_read_again(notifier: Notifier) -> None:
    candidates = settle(notifier, 'q')
    candidates['q'].mark_stale()
    notifier._busy = float('-inf')
    notifier.take(candidates, set())  # type: ignore[arg-type]
    assert watched(notifier) == (1, [])
    candidates['q'].is_stale = False  # read, at a point that the news do not know
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    assert candidates['q'].is_stale


def test_all_are_read_anew_after_the_server_was_away(notifier: Notifier) -> None:
    candidates = settle(notifier, 'q')
    notifier.lost()
    candidates['q'].mark_stale()  # with candidates that were given back, and so not outdated
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    candidates['q'].is_stale = False
    notifier.take(candidates, {'q'})  # type: ignore[arg-type]
    assert watched(notifier) == (2, ['q'])
