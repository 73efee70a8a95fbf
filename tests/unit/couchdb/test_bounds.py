"""Limits of time and size for responses (`kombu_couchdb.couchdb.bounds`), with a simulated clock."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.couchdb import bounds
from kombu_couchdb.couchdb.bounds import MIN_BYTES_PER_SECOND, Upload
from kombu_couchdb.couchdb.call import Call

#: The timeout of the socket in seconds.
TIMEOUT = 8.0

ORDINARY = Call('GET', '/')


class Line:
    """A simulated socket: `pieces` are pairs of the seconds before a read returns and the bytes that it returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pieces: Iterable[tuple[float, int]]) -> None:
        self.now, self._pieces, self._timeout = 100.0, iter(pieces), TIMEOUT
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

    def read(self, count: int, of: Call = ORDINARY, *, in_body: bool = True) -> float:
        """Read `count` pieces, and return the seconds that it took."""
        began, reader = self.now, bounds._BoundedReader(self, self, of)
        reader.in_body, reader.may_pause = in_body, in_body and of.longpoll
        for _ in range(count):
            reader.readinto(bytearray(1))
        return self.now - began


def endless(seconds: float, size: int) -> Iterable[tuple[float, int]]:
    while True:
        yield seconds, size


def test_a_large_body_may_take_long_at_the_minimum_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Line(monkeypatch, endless(0.1, MIN_BYTES_PER_SECOND // 8)).read(500) == pytest.approx(50.0)


def test_fast_bytes_do_not_give_slow_bytes_more_time_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, [*[(0.0, 1_000_000)] * 100, *[(1.0, 1)] * 100])
    with pytest.raises(TimeoutError):
        line.read(200)
    assert line.now - 100.0 <= TIMEOUT + 1.0


def test_a_longpoll_may_pause_between_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Line(monkeypatch, endless(7.9, 1)).read(100, Call('GET', '/', longpoll=True)) == pytest.approx(790.0)
    with pytest.raises(TimeoutError):
        Line(monkeypatch, endless(8.1, 1)).read(1, Call('GET', '/', longpoll=True))
    with pytest.raises(TimeoutError):
        Line(monkeypatch, endless(7.9, 1)).read(2, Call('GET', '/', longpoll=True), in_body=False)


def test_an_upload_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch, [])
    upload = Upload(b'x' * 10, 5.0)
    assert upload.read(5) == b'x' * 5
    line.now += 5.1
    with pytest.raises(TimeoutError):
        upload.read(5)
