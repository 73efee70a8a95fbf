"""How long, and how large, an answer may be (`kombu_couchdb.couchdb.bounds`), by a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.couchdb import bounds
from kombu_couchdb.couchdb.bounds import SLOWEST, Bounds, Upload
from kombu_couchdb.errors import AnswerTooLarge

#: The time limit of the socket, in seconds.
LIMIT = 8.0


class Line:
    """A socket on which pieces of so many bytes arrive, each so many seconds after the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pieces: Iterable[tuple[float, int]]) -> None:
        self.now, self._pieces, self._timeout = 100.0, iter(pieces), LIMIT
        monkeypatch.setattr(bounds, 'time', SimpleNamespace(monotonic=lambda: self.now))

    def gettimeout(self) -> float:
        return self._timeout

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0.0
        self._timeout = seconds

    def readinto(self, buffer: Any) -> int:
        seconds, size = next(self._pieces)
        self.now += min(seconds, self._timeout)
        if seconds > self._timeout:
            raise TimeoutError('timed out')
        return size

    def close(self) -> None:
        pass

    def read(self, count: int, of: Bounds = bounds.ORDINARY, *, in_body: bool = True) -> float:
        """Read so many pieces, and return how long that took."""
        began, source = self.now, bounds._Source(self, self, of)
        source.in_body, source.may_pause = in_body, in_body and of.longpoll
        for _ in range(count):
            source.readinto(bytearray(1))
        return self.now - began


def endless(seconds: float, size: int) -> Iterable[tuple[float, int]]:
    while True:
        yield seconds, size


@pytest.mark.parametrize('in_body', [True, False])
@pytest.mark.parametrize('seconds', [0.01, 1.0, 7.9, 60.0])
def test_bytes_that_come_one_by_one_do_not_prolong_an_answer(
    monkeypatch: pytest.MonkeyPatch, seconds: float, in_body: bool
) -> None:
    line = Line(monkeypatch, endless(seconds, 1))
    with pytest.raises(TimeoutError):
        line.read(10_000, in_body=in_body)
    assert line.now - 100.0 <= 1.1 * LIMIT


def test_a_large_answer_may_take_as_long_as_it_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Line(monkeypatch, endless(0.1, SLOWEST // 8)).read(500) == pytest.approx(50.0)


def test_what_came_quickly_leaves_no_more_time_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, [*[(0.0, 1_000_000)] * 100, *[(1.0, 1)] * 100])
    with pytest.raises(TimeoutError):
        line.read(200)
    assert line.now - 100.0 <= LIMIT + 1.0


def test_a_head_does_not_get_more_time_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """`100 Continue` may come for ever."""
    with pytest.raises(TimeoutError):
        Line(monkeypatch, endless(0.01, 10_000)).read(900, in_body=False)


def test_a_longpoll_may_be_silent_from_line_to_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Line(monkeypatch, endless(7.9, 1)).read(100, Bounds(longpoll=True)) == pytest.approx(790.0)
    with pytest.raises(TimeoutError):
        Line(monkeypatch, endless(8.1, 1)).read(1, Bounds(longpoll=True))
    with pytest.raises(TimeoutError):
        Line(monkeypatch, endless(7.9, 1)).read(2, Bounds(longpoll=True), in_body=False)


@pytest.mark.parametrize('more', [0, 5000])
def test_an_answer_that_is_too_large_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(bounds, 'LARGEST', 10_000)
    Line(monkeypatch, endless(0.0, 1000)).read((10_000 + more) // 1000, Bounds(more=more))
    for longpoll in (True, False):
        with pytest.raises(AnswerTooLarge):
            Line(monkeypatch, endless(0.0, 1000)).read((11_000 + more) // 1000, Bounds(longpoll, more))


def test_sending_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, [])
    upload = Upload(b'x' * 10, 5.0)
    assert upload.read(5) == b'x' * 5
    line.now += 5.1
    with pytest.raises(TimeoutError):
        upload.read(5)
