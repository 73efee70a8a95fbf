"""The point from which the changes feed is followed (`kombu_couchdb.fleet.notifier`): no message may be missed."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.couchdb.changes import LIMIT
from kombu_couchdb.documents.ids import CONSUMER
from kombu_couchdb.fleet import attention, coordination
from kombu_couchdb.fleet import notifier as module
from kombu_couchdb.fleet.notifier import Notifier
from kombu_couchdb.queues import waiting


class QueueCandidates:
    """The part of `QueueCandidates` that the notifier uses."""

    def __init__(self, size: int = 0, *, dirty: bool = False) -> None:
        self.size, self.is_stale, self.hurries = size, dirty, False
        self.reads_head_next, self.needs_page, self.next_due = True, False, None

    def __len__(self) -> int:
        return self.size

    def mark_stale(self) -> None:
        self.is_stale = True

    def clear(self) -> None:
        self.size, self.is_stale = 0, True

    def found_empty(self) -> None:
        self.size, self.is_stale = 0, False


class Server:
    """A server whose update sequence is the number of times that it was read."""

    replicas = 1

    def __init__(self) -> None:
        self.points = 0
        #: The other consumers of the queue `q`.
        self.consumers: list[str] = []

    def sequence(self) -> int:
        self.points += 1
        return self.points

    def id_range(self, prefix: str, to: str = '') -> list[Any]:
        return [{'id': name} for name in self.consumers] if prefix == CONSUMER else []

    clock = SimpleNamespace(now=lambda: 0.0)

    def fetch(self, ids: list[str]) -> list[Any]:
        return [{'_id': name, 'queues': ['q']} for name in ids]

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
    paused = wanted

    def receives(self, queue: str) -> bool:
        return False

    def follow(self, seconds: float, exchanges: Any = ()) -> None: ...

    def replace(self, docs: Any, at: float) -> None: ...

    def seen(self, doc: Any) -> None: ...

    def was_deleted(self, doc_id: str) -> None: ...

    def read_paused(self, ids: Any) -> None: ...

    def take(self, docs: Any) -> list[Any]:
        return []


class Broadcasts:
    """A broadcasts database that cannot be used, unless a test says so."""

    def __init__(self) -> None:
        self.noticed = self.is_followed = False
        self.bells = set[str]()

    def rung(self) -> set[str]:
        rung, self.bells = self.bells, set()
        return rung

    def due_at(self) -> float:
        return inf

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


class Now:
    """A clock that is set."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    for timed in (module, attention, coordination):
        monkeypatch.setattr(timed, 'time', now)
    return now


@pytest.fixture
def notifier(now: Now) -> Notifier:
    notifier = Notifier(Server(), Unused(), Unused(), Broadcasts(), 'test')  # type: ignore[arg-type]
    notifier._feed = ContinuousFeed()  # type: ignore[assignment]
    return notifier


def watched(notifier: Notifier) -> tuple[Any, Any] | None:
    return notifier._feed.wanted  # type: ignore[union-attr]


def take(notifier: Notifier, candidates: dict[str, QueueCandidates], credit: Iterable[str]) -> None:
    notifier.take('me', candidates, set(credit))  # type: ignore[arg-type]


def follow(notifier: Notifier, *queues: str) -> dict[str, QueueCandidates]:
    """Let the notifier follow the feed for some queues."""
    candidates = {queue: QueueCandidates(dirty=True) for queue in queues}
    take(notifier, candidates, queues)
    for queue_candidates in candidates.values():
        queue_candidates.is_stale = False  # it was read
    take(notifier, candidates, queues)
    assert watched(notifier) == (1, sorted(queues))
    return candidates


def test_feed_starts_before_the_queues_were_read(notifier: Notifier) -> None:
    follow(notifier, 'a', 'b')


def test_listener_without_credit_follows_the_feed(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q')
    take(notifier, candidates, '')
    assert watched(notifier) == (1, ['q'])


def test_queue_whose_messages_nobody_can_take_is_not_followed(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q', 'r')
    notifier.attention.bell.waits('q', 0, ['a'])
    take(notifier, candidates, 'r')
    assert candidates['q'].is_stale
    assert watched(notifier) == (1, ['r'])


def test_candidates_with_credit_are_kept(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q')
    candidates['q'].size = LIMIT + 1
    take(notifier, candidates, 'q')
    assert not candidates['q'].is_stale
    assert watched(notifier) == (1, ['q'])


def test_queue_read_without_the_feed_is_read_again(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q', 'r')
    notifier.attention.bell.waits('q', 0, ['a'])
    take(notifier, candidates, 'r')
    notifier.attention.bell.forget('q')
    candidates['q'].is_stale = False  # read, at a point that the notifier does not know
    take(notifier, candidates, 'qr')
    assert candidates['q'].is_stale


def test_long_queue_is_read_without_the_feed(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q', 'r')
    candidates['q'].mark_stale()
    take(notifier, candidates, 'qr')
    assert watched(notifier) is None


def test_paused_queue_does_not_keep_the_consumer_from_following_the_others(notifier: Notifier, now: Now) -> None:
    candidates = follow(notifier, 'q', 'r')
    notifier._topology.paused = frozenset('q')
    candidates['q'].mark_stale()  # it has many messages
    now.seconds += 1.0
    take(notifier, candidates, 'r')
    assert watched(notifier) == (1, ['r'])


def test_consumer_that_was_busy_follows_the_feed_a_second_later(notifier: Notifier, now: Now) -> None:
    candidates = follow(notifier, 'q', 'r')
    candidates['r'].mark_stale()
    take(notifier, candidates, 'qr')
    candidates['r'].is_stale = False
    notifier.attention.bell.waits('q', 0, ['a'])
    candidates['q'].clear()
    take(notifier, candidates, 'r')
    assert watched(notifier) is None
    assert notifier.due_at() <= now.seconds + 1.0
    now.seconds += 1.0
    take(notifier, candidates, 'r')
    assert watched(notifier) == (1, ['r'])
    assert notifier._since is not None


def test_all_queues_are_read_again_after_an_outage(notifier: Notifier) -> None:
    candidates = follow(notifier, 'q')
    notifier.on_outage()
    candidates['q'].mark_stale()  # with released messages as candidates, so it is not outdated
    take(notifier, candidates, 'q')
    candidates['q'].is_stale = False
    take(notifier, candidates, 'q')
    assert watched(notifier) == (2, ['q'])


# -- consumers that rest


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The ids at the head of each queue."""
    heads = {'q': list[str]()}
    monkeypatch.setattr(
        waiting, 'first_due', lambda client, queues, until, limit=1: {queue: heads[queue] for queue in queues}
    )
    return heads


@pytest.fixture
def resting(notifier: Notifier, heads: dict[str, list[str]]) -> dict[str, QueueCandidates]:
    """The candidates of a consumer that rests after a first look."""
    notifier._client.consumers = ['me', *(f'{CONSUMER}{number}' for number in range(8))]  # type: ignore[attr-defined]
    candidates = follow(notifier, 'q')
    notifier.broadcasts.is_followed = notifier.broadcasts.noticed = True  # type: ignore[misc]
    for _ in range(2):
        take(notifier, candidates, 'q')
    assert 'me' not in notifier.peers.listeners
    assert not notifier.attention.listens
    return candidates


def test_consumer_that_rests_follows_no_feed(notifier: Notifier, resting: dict[str, QueueCandidates]) -> None:
    assert watched(notifier) is None
    assert not resting['q'].is_stale
    assert notifier.due_at() == notifier.attention.look_at


def test_look_finds_messages(
    notifier: Notifier, resting: dict[str, QueueCandidates], heads: dict[str, list[str]], now: Now
) -> None:
    heads['q'] = ['a']
    take(notifier, resting, 'q')
    assert not resting['q'].is_stale
    now.seconds = notifier.due_at()
    take(notifier, resting, 'q')
    assert resting['q'].is_stale
    assert not resting['q'].hurries


def test_bell_lets_it_look_and_hurry(
    notifier: Notifier, resting: dict[str, QueueCandidates], heads: dict[str, list[str]], now: Now
) -> None:
    heads['q'] = ['a']
    notifier.broadcasts.bells = {'q'}  # type: ignore[attr-defined]
    take(notifier, resting, 'q')
    assert notifier.due_at() <= now.seconds + 0.05
    now.seconds = notifier.due_at()
    take(notifier, resting, 'q')
    assert resting['q'].is_stale
    assert resting['q'].hurries


def test_without_credit_it_does_nothing_until_others_are_counted(
    notifier: Notifier, resting: dict[str, QueueCandidates], now: Now
) -> None:
    take(notifier, resting, '')
    now.seconds += 11.0
    take(notifier, resting, '')
    assert resting['q'].is_stale  # what it knew is forgotten
    assert notifier.due_at() > now.seconds + 5.0


def test_consumer_that_begins_to_listen_reads_its_queues_after_a_known_point(
    notifier: Notifier, resting: dict[str, QueueCandidates]
) -> None:
    notifier.attention.won(0)
    take(notifier, resting, 'q')
    assert resting['q'].is_stale
    assert watched(notifier) is None
    resting['q'].is_stale = False
    take(notifier, resting, 'q')
    assert watched(notifier) == (2, ['q'])
