"""What a consumer listens for, and from where on: no queue may be taken for known that nobody listens for."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.consumer.notifier import News
from kombu_couchdb.couchdb.changes import LIMIT


class Window:
    """As much of a window as the news know."""

    def __init__(self, size: int = 0, *, dirty: bool = False) -> None:
        self.size, self.dirty, self.outdated = size, dirty, False

    def __len__(self) -> int:
        return self.size

    def clear(self) -> None:
        self.size, self.dirty = 0, True


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

    limits = routes
    wanted: frozenset[str] = frozenset()
    exchanges = wanted

    def follow(self, seconds: float, exchanges: Any = ()) -> None: ...

    def replace(self, docs: Any, at: float) -> None: ...

    def seen(self, doc: Any) -> None: ...

    def was_deleted(self, doc_id: str) -> None: ...

    def take(self, docs: Any) -> list[Any]:
        return []


class Feed:
    """Remembers what was last asked for."""

    def __init__(self) -> None:
        self.wanted: tuple[Any, Any] | None = None

    def watch(self, since: Any, selector: Any) -> None:
        self.wanted = (since, selector['$or'][0]['queue']['$in'])

    def rest(self) -> None:
        self.wanted = None


@pytest.fixture
def news() -> News:
    news = News(Server(), Nobody(), Nobody(), 'test')  # type: ignore[arg-type]
    news._feed = Feed()  # type: ignore[assignment]
    return news


def watched(news: News) -> tuple[Any, Any] | None:
    return news._feed.wanted  # type: ignore[union-attr]


def settle(news: News, *queues: str) -> dict[str, Window]:
    """Bring the news to listen for some queues."""
    windows = {queue: Window(dirty=True) for queue in queues}
    news.take(windows, set(queues))  # type: ignore[arg-type]
    for window in windows.values():
        window.dirty = False  # it was read
    news.take(windows, set(queues))  # type: ignore[arg-type]
    assert watched(news) == (1, sorted(queues))
    return windows


def test_queues_are_listened_for_from_a_point_before_they_were_read(news: News) -> None:
    settle(news, 'a', 'b')


def test_what_nobody_takes_is_not_hoarded(news: News) -> None:
    windows = settle(news, 'q')
    windows['q'].size = LIMIT + 1
    news.take(windows, set())  # type: ignore[arg-type]
    assert windows['q'].dirty
    assert watched(news) == (1, [])


def test_what_is_taken_just_now_is_kept(news: News) -> None:
    windows = settle(news, 'q')
    windows['q'].size = LIMIT + 1
    news.take(windows, {'q'})  # type: ignore[arg-type]
    assert not windows['q'].dirty
    assert watched(news) == (1, ['q'])


def test_queue_that_was_read_while_nobody_listened_for_it_is_read_again(news: News) -> None:
    windows = settle(news, 'q')
    windows['q'].dirty = True
    news._busy = float('-inf')
    news.take(windows, set())  # type: ignore[arg-type]
    assert watched(news) == (1, [])
    windows['q'].dirty = False  # read, at a point that the news do not know
    news.take(windows, {'q'})  # type: ignore[arg-type]
    assert windows['q'].dirty


def test_all_are_read_anew_after_the_server_was_away(news: News) -> None:
    windows = settle(news, 'q')
    news.lost()
    windows['q'].dirty = True  # with candidates that were given back, and so not outdated
    news.take(windows, {'q'})  # type: ignore[arg-type]
    windows['q'].dirty = False
    news.take(windows, {'q'})  # type: ignore[arg-type]
    assert watched(news) == (2, ['q'])
