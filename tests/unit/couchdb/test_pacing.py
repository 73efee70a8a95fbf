"""The pace of requests to a CouchDB with limits."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from math import inf
from random import Random

import pytest

from kombu_couchdb.couchdb import pacing
from kombu_couchdb.couchdb.pacing import Lane, Pace, RequestKind, TooManyUnits, Turn, units_of
from tests.conftest import PATIENCE, wait_for


@pytest.mark.parametrize(
    ('method', 'path', 'size', 'kind', 'units'),
    [
        ('GET', '/a%2Fb', 1, RequestKind.READ, 1),
        ('GET', '/doc?rev=1-a', 1, RequestKind.READ, 1),
        ('HEAD', '/doc', 1, RequestKind.READ, 1),
        ('GET', '/doc/body', 1, RequestKind.READ, 1),
        ('GET', '/_local/checkpoint', 1, RequestKind.READ, 1),
        ('GET', '/_design/queues', 1, RequestKind.READ, 1),
        ('PUT', '/_design/queues', 1, RequestKind.WRITE, 1),
        ('PUT', '/doc', 1, RequestKind.WRITE, 1),
        ('DELETE', '/doc', 1, RequestKind.WRITE, 1),
        ('POST', '/_bulk_docs', 40, RequestKind.WRITE, 40),
        ('POST', '/_bulk_get', 1, RequestKind.QUERY, 1),
        ('POST', '/_all_docs?include_docs=true', 1, RequestKind.QUERY, 1),
        ('GET', '/_design_docs', 1, RequestKind.QUERY, 1),
        ('GET', '/_design/queues/_view/ready', 1, RequestKind.QUERY, 1),
        ('POST', '/_design/queues/_view/ready/queries', 3, RequestKind.QUERY, 3),
        ('POST', '/_find', 1, RequestKind.QUERY, 1),
        ('POST', '/_changes?feed=longpoll', 1, RequestKind.FEED, 1),
        ('GET', '/_design/queues/_info', 1, RequestKind.OTHER, 1),
        ('GET', '/_security', 1, RequestKind.OTHER, 1),
        ('PUT', '', 1, RequestKind.OTHER, 1),
        ('HEAD', '/', 1, RequestKind.OTHER, 1),
    ],
)
def test_units_of_a_request(method: str, path: str, size: int, kind: RequestKind, units: int) -> None:
    assert units_of(method, path, size) == (kind, units)


class Service:
    """Accepts so many units in any second; a bulk write takes what it needs if anything is left, as debt."""

    def __init__(self, limit: int) -> None:
        self.limit, self.accepted = limit, 0
        self._taken: deque[float] = deque()

    def accepts(self, units: int, now: float) -> bool:
        while self._taken and self._taken[0] <= now - 1.0:
            self._taken.popleft()
        if len(self._taken) >= self.limit:
            return False
        for _ in range(units):
            late = len(self._taken) - self.limit
            self._taken.append(now if late < 0 else max(now, self._taken[late] + 1.0))
        self.accepted += units
        return True


def simulate(lanes: int, limit: int, seconds: float, units: Callable[[Lane], int], seed: int) -> tuple[float, int, int]:
    """Let processes send as many requests as their lanes allow.

    Return the part of the limit that they used, and the number of refusals, in all and of a request just refused.
    """
    random, numbers, service = Random(seed), count(), Service(limit)
    refusals = again = 0
    processes = [Lane() for _ in range(lanes)]
    events = [(random.random(), next(numbers), lane, Turn(RequestKind.WRITE)) for lane in processes]
    while (event := heapq.heappop(events))[0] < seconds:
        now, _, lane, turn = event
        if (pause := lane.take(turn, now)) == 0.0:
            pause = 0.01 * random.random()
            if service.accepts(turn.units, now):
                lane.accepted(turn)
                turn = Turn(RequestKind.WRITE, units(lane))
            else:
                refusals, again = refusals + 1, again + turn.was_refused
                lane.refused(turn, now)
        heapq.heappush(events, (now + pause, next(numbers), lane, turn))
    return service.accepted / limit / seconds, refusals, again


@pytest.mark.parametrize('processes', [1, 3])
@pytest.mark.parametrize('limit', [5, 10, 100])
@pytest.mark.parametrize('is_bulk', [False, True], ids=['single', 'bulk'])
def test_processes_share_a_limit(processes: int, limit: int, is_bulk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(1)
    monkeypatch.setattr(pacing, 'random', random.random)

    def units(lane: Lane) -> int:
        return int(min(lane.most, random.randint(1, 5))) if is_bulk else 1

    found = [simulate(processes, limit, 300.0, units, seed) for seed in range(4)]
    assert sum(used for used, _, _ in found) / len(found) > 0.7
    refusals, again = (sum(numbers) for numbers in list(zip(*found, strict=True))[1:])
    assert refusals < 4 * 300 * 0.4
    assert again <= refusals * 0.2


def slowed(used: int = 10, at: float = 100.0) -> Lane:
    """Return a lane whose service has refused the request after so many in a second."""
    lane = Lane()
    for number in range(used + 1):
        turn = Turn(RequestKind.WRITE)
        assert lane.take(turn, at - 0.01 * (used - number)) == 0.0
    lane.refused(turn, at)
    assert lane.take(turn, at + pacing._MAX_PAUSE_SECONDS) == 0.0  # the refused one goes first
    return lane


def test_nothing_waits_before_the_first_refusal() -> None:
    lane = Lane()
    assert all(lane.take(Turn(RequestKind.WRITE, 100), 1.0) == 0.0 for _ in range(100))
    assert lane.rate == lane.most == lane.spare(1.0) == inf


def test_requests_wait_after_a_refusal() -> None:
    lane, turn = Lane(), Turn(RequestKind.WRITE)
    for _ in range(10):
        lane.take(Turn(RequestKind.WRITE), 1.0)
    lane.take(turn, 1.0)
    lane.refused(turn, 1.1)
    assert 6 < lane.rate < 8
    assert lane.spare(1.2) == 0
    assert 1.0 <= lane.take(turn, 1.1) <= 1.5
    assert lane.take(turn, 3.0) == 0.0
    following = Turn(RequestKind.WRITE)
    assert 0.1 < lane.take(following, 3.0) < 0.2


def test_first_refusal_by_a_service_whose_limits_were_unknown() -> None:
    lane = Lane()
    lane.refused(Turn(RequestKind.WRITE), 1.0)  # what was sent before is not known
    assert 10 < lane.rate < 20


def test_service_that_asks_for_a_pause_gets_it() -> None:
    lane, turn = Lane(), Turn(RequestKind.READ)
    lane.take(turn, 1.0)
    lane.refused(turn, 1.0, 30.0)
    assert 30.0 <= lane.take(turn, 1.0) <= 31.0


def test_pause_doubles_while_all_is_refused() -> None:
    lane, turn, now, pauses = Lane(), Turn(RequestKind.READ), 1.0, list[float]()
    for _ in range(6):
        assert lane.take(turn, now) == 0.0
        lane.refused(turn, now)
        pauses.append(lane.take(turn, now))
        now += pauses[-1]
    assert all(least <= pause <= least + 0.5 for least, pause in zip((1, 2, 4, 8, 8, 8), pauses, strict=True))


def test_refusals_of_requests_that_were_sent_together_count_once() -> None:
    lane, turns = Lane(), [Turn(RequestKind.WRITE) for _ in range(30)]
    for turn in turns:
        lane.take(turn, 1.0)
    lane.refused(turns[-1], 1.1)
    rate = lane.rate
    for turn in turns[10:-1]:
        lane.refused(turn, 1.2)
    assert lane.rate == rate
    assert lane.take(turns[20], 1.3) < 2.0


def test_urgent_requests_go_first_then_refused_ones_then_the_oldest() -> None:
    lane = slowed()
    first, second, refused = (Turn(RequestKind.WRITE) for _ in range(3))
    refused.was_refused = True
    heartbeat = Turn(RequestKind.WRITE, patience=60.0)
    waiting = [second, first, refused, heartbeat]
    for turn in waiting:
        lane.take(turn, 108.0)
    order, now = list[Turn](), 108.0
    while waiting:
        now += 0.01
        for turn in [turn for turn in waiting if lane.take(turn, now) == 0.0]:
            waiting.remove(turn)
            order.append(turn)
    assert order == [heartbeat, refused, first, second]


def test_rate_grows_while_requests_wait_only() -> None:
    lane = slowed()
    before, now = lane.rate, 200.0
    for _ in range(100):
        now += 60.0 / 100
        assert lane.take(Turn(RequestKind.WRITE), now) == 0.0
    assert lane.rate == before
    for _ in range(400):
        turn = Turn(RequestKind.WRITE)
        while (pause := lane.take(turn, now)) > 0.0:
            now += pause
    assert lane.rate > before + 5


def test_rate_is_forgotten() -> None:
    lane, turn, now = slowed(), Turn(RequestKind.WRITE), 101.0 + pacing._FORGET_SECONDS
    for _ in range(2):  # the second time, the last request was refused
        assert lane.take(turn, now) == 0.0
        assert lane.rate == inf
        lane.refused(turn, now)
        assert lane.rate < inf
        assert lane.take(turn, now) >= 1.0
        now += 1.0 + pacing._FORGET_SECONDS


def test_complaint_is_made_once_a_minute_and_not_for_a_few_refusals() -> None:
    lane, now, complaints = Lane(), 1000.0, list[float]()
    for number in range(200):
        turn = Turn(RequestKind.WRITE)
        while (pause := lane.take(turn, now)) > 0:
            now += pause
        if number % 20 == 0:
            lane.refused(turn, now)
            if complaint := lane.complaint(now):
                complaints.append(now)
                assert complaint[0] >= 3
                assert complaint[1] > 0
    assert 1 <= len(complaints) <= (now - 1000.0) / 60.0
    turn = Turn(RequestKind.WRITE)
    assert lane.take(turn, now + 1000.0) == 0.0
    lane.refused(turn, now + 1000.0)
    assert lane.complaint(now + 1001.0) is None


# -- threads


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {'_PAUSE_SECONDS': 0.01, '_JITTER_SECONDS': 0.0, '_WINDOW_SECONDS': 0.01}.items():
        monkeypatch.setattr(pacing, name, seconds)
    monkeypatch.setattr(pacing, '_MIN_RATE', 100.0)


def test_pace_says_what_is_spare(quick: None) -> None:
    pace, turn = Pace('http://127.0.0.1:1'), Turn(RequestKind.QUERY, 8)
    assert pace.spare(RequestKind.QUERY) == pace.most(RequestKind.QUERY) == inf
    assert pace.wait(turn, 1.0)
    with pytest.raises(TooManyUnits):
        pace.refused(Turn(RequestKind.QUERY, 200), 0.0)
    assert pace.most(RequestKind.QUERY) < 200
    assert 1 < pace.most(RequestKind.WRITE) < 10  # it is probably limited, too


def test_waiting_threads_all_get_their_turn(quick: None) -> None:
    pace = Pace('http://127.0.0.1:1')
    pace.refused(Turn(RequestKind.WRITE), 0.0)
    threads = [threading.Thread(target=pace.wait, args=(Turn(RequestKind.WRITE), 60.0)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert pace.spare(RequestKind.WRITE) >= 0


def test_warning_names_the_remedy(
    caplog: pytest.LogCaptureFixture, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, '_WARN_SECONDS', 0.2)
    pace = Pace('https://db.example')

    def warned() -> bool:
        turn = Turn(RequestKind.WRITE)
        assert pace.wait(turn, PATIENCE)
        pace.refused(turn, 0.0)
        return bool(caplog.records)

    wait_for(warned, 'a warning')
    [record] = caplog.records
    assert record.levelname == 'WARNING'
    assert 'https://db.example' in record.getMessage()
    assert 'plan' in record.getMessage()
