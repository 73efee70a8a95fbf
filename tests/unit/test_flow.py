"""For how long documents gather, and how many messages are claimed ahead (`kombu_couchdb.flow`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kombu_couchdb import flow as module
from kombu_couchdb.flow import Flow, Throughput

# -- the rate


def rate(count: int, interval: float) -> Throughput:
    """Return a rate after `count` documents, the last one at the time 0."""
    rate = Throughput()
    for n in range(count):
        rate.count((n + 1 - count) * interval)
    return rate


def test_nothing_is_claimed_ahead_before_two_rounds_of_the_prefetch_count() -> None:
    assert rate(63, 0.001).ahead(32, 0.2, 0.001) == 0
    assert rate(64, 0.001).ahead(32, 0.2, 0.001) > 0
    assert rate(15, 0.001).ahead(1, 0.2, 0.001) == 0


@pytest.mark.parametrize(
    ('interval', 'limit', 'ahead'),
    [(0.001, 8, 192), (0.001, 80, 120), (0.001, 200, 0), (0.01, 1, 19), (0.01, 8, 12), (0.01, 20, 0), (1.0, 1, 0)],
)
def test_prefetch_count_and_surplus_last_for_the_stock(interval: float, limit: int, ahead: int) -> None:
    assert rate(512, interval).ahead(limit, 0.2001, interval) == ahead
    assert rate(512, interval).ahead(limit, 0.0, interval) == 0


def test_tasks_that_end_together_are_not_fast() -> None:
    rate = Throughput()
    for second in range(10):
        for n in range(8):
            rate.count(second + n / 1000)
    assert rate.ahead(8, 0.2, 9.01) == 0


def documents_until_ahead(rate: Throughput) -> int:
    for n in range(10_000):
        if rate.ahead(1, 0.2, n / 1000):
            return n
        rate.count(n / 1000)
    raise AssertionError('never')


def test_repeated_stalls_make_each_measurement_begin_later() -> None:
    found = rate(100, 0.001)
    waits = []
    for _ in range(4):
        found.stalled()
        waits.append(documents_until_ahead(found))
    assert waits == [32, 48, 80, 144]


# -- the flow


class Requests:
    """A flow of documents, one each `gap` seconds, whose requests take so many seconds; and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.flow = 100.0, Flow()
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: self.now))

    def run(self, gap: float, seconds: float, count: int = 100) -> float:
        """Return the interval after some documents."""
        for _ in range(count):
            self.flow.begin()
            self.now += seconds
            self.flow.end()
            self.now += gap - seconds
            self.flow.count()
        return self.flow.interval


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def test_documents_that_come_one_at_a_time_wait_for_none(requests: Requests) -> None:
    assert requests.run(gap=0.05, seconds=0.01) == 0.0
    assert requests.flow.pause == 0.0
    assert requests.flow.stock == 0.0


def test_first_documents_of_a_flow_wait_for_none(requests: Requests) -> None:
    assert requests.run(gap=0.002, seconds=0.001, count=15) == 0.0


def test_requests_of_a_flow_take_a_quarter_of_the_time(requests: Requests) -> None:
    assert requests.run(gap=0.015, seconds=0.01) == pytest.approx(0.04)
    requests.flow.begin()
    requests.now += 0.01
    assert requests.flow.pause == pytest.approx(0.03)
    assert requests.flow.stock == pytest.approx(0.08)


def test_nothing_waits_for_long_if_requests_take_long(requests: Requests) -> None:
    assert requests.run(gap=0.08, seconds=0.079) == pytest.approx(0.25)


def test_flow_ends_when_none_comes_for_longer_than_the_last_ones_took(requests: Requests) -> None:
    requests.run(gap=0.002, seconds=0.0019)
    requests.now += 0.029
    assert requests.flow.interval > 0.0
    requests.now += 0.002
    assert requests.flow.interval == 0.0
