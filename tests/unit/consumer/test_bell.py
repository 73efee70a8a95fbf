"""When the consumers that rest are woken (`kombu_couchdb.consumer.bell`), with a clock that is set."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest

from kombu_couchdb.consumer import bell as module
from kombu_couchdb.consumer.bell import Bell


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, 'time', clock)
    monkeypatch.setattr(module, 'random', SimpleNamespace(uniform=lambda least, most: (least + most) / 2))
    return clock


def rings(bell: Bell, clock: Clock, seconds: float, head: str = 'abc') -> list[float]:
    """Let time pass while the messages `head` wait; return when the bell rang, in seconds from now on."""
    rang, begun = list[float](), clock.now
    while bell.due_at <= begun + seconds:
        clock.now = max(clock.now, bell.due_at)
        for queue in bell.due:
            if bell.check(queue, [*head]):
                rang.append(round(clock.now - begun, 3))
                bell.heard(queue)
    clock.now = begun + seconds
    return rang


def test_nothing_is_due_while_no_messages_wait(clock: Clock) -> None:
    bell = Bell()
    assert (bell.due, bell.due_at, bell.knows('q')) == ([], inf, False)


@pytest.mark.parametrize(('rank', 'seconds'), [(0, 0.1), (1, 0.2), (2, 0.3), (None, 1.5)])
def test_the_listener_of_the_first_rank_rings_first(clock: Clock, rank: int | None, seconds: float) -> None:
    bell = Bell()
    bell.waits('q', rank, ['a'])
    assert bell.knows('q')
    assert not bell.knows('r')
    assert bell.due == []
    assert bell.due_at == pytest.approx(clock.now + seconds)
    clock.now += seconds
    assert bell.due == ['q']
    assert bell.check('q', ['a'])


def test_bell_does_not_ring_if_others_take_the_messages(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a', 'b'])
    assert rings(bell, clock, 10.0, 'cd') == []
    assert not bell.knows('q')
    assert bell.due_at == inf


@pytest.mark.parametrize('head', ['', 'c'])
def test_bell_does_not_ring_for_other_messages(clock: Clock, head: str) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a'])
    clock.now += 0.1
    assert not bell.check('q', [*head])
    assert not bell.knows('q')


def test_bell_rings_if_some_of_the_messages_are_left(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a', 'b'])
    assert rings(bell, clock, 0.5, 'bc') == [0.1]


def test_time_counts_from_the_first_message(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a'])
    clock.now += 0.09
    bell.waits('q', 0, ['a', 'b'])
    assert bell.due_at == pytest.approx(clock.now + 0.01)


def test_consumer_that_can_take_the_messages_does_not_ring(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a'])
    bell.forget('q')
    bell.forget('q')
    assert rings(bell, clock, 10.0) == []


def test_queues_that_are_not_served_any_more_are_forgotten(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a'])
    bell.waits('r', 0, ['b'])
    bell.keep({'r'})
    clock.now += 10.0
    assert bell.due == ['r']


def test_pauses_double_while_the_same_messages_wait(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', None, ['a'])
    pauses = [after - before for before, after in pairwise(rings(bell, clock, 200.0))]
    assert pauses[:6] == pytest.approx([2.2, 4.4, 8.8, 17.6, 33.0, 33.0], abs=0.01)


def test_listener_rings_when_it_reads(clock: Clock) -> None:
    """It reads the queue every two seconds."""
    bell = Bell()
    bell.waits('q', 0, ['a'])
    pauses = [after - before for before, after in pairwise(rings(bell, clock, 200.0))]
    assert pauses[:6] == pytest.approx([4.0, 6.0, 10.0, 18.0, 34.0, 34.0], abs=0.01)


def test_pauses_begin_anew_with_other_messages(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a'])
    rings(bell, clock, 20.0)
    assert rings(bell, clock, 5.0, 'xyz') == []
    bell.waits('q', 0, ['x'])
    assert rings(bell, clock, 5.0, 'x') == pytest.approx([0.1, 4.1])


@pytest.mark.parametrize('rank', [0, 3, None])
def test_bell_of_another_consumer_postpones_the_own(clock: Clock, rank: int | None) -> None:
    bell = Bell()
    bell.waits('q', rank, ['a'])
    clock.now += 0.05
    bell.heard('q')
    assert rings(bell, clock, 2.0) == []
    assert len(rings(bell, clock, 2.1)) == 1


def test_bell_just_before_the_messages_postpones_the_own(clock: Clock) -> None:
    bell = Bell()
    bell.heard('q')
    clock.now += 0.3
    bell.waits('q', 0, ['a'])
    bell.waits('r', 0, ['b'])
    assert bell.due_at == pytest.approx(clock.now + 0.1)  # another queue
    bell.forget('r')
    assert bell.due_at == pytest.approx(clock.now + 1.7)


@pytest.mark.parametrize('age', [0.0, 5.0, 60.0])
def test_listener_notices_within_two_seconds_that_the_messages_are_gone(clock: Clock, age: float) -> None:
    """Until then it does not follow the feed, and would not learn of new ones."""
    bell = Bell()
    bell.waits('q', 1, ['a'])
    rings(bell, clock, age, 'a')
    gone = clock.now
    rings(bell, clock, 2.01, 'new')
    assert not bell.knows('q'), gone


def test_consumer_that_is_no_listener_reads_only_to_ring(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', None, ['a'])
    bell.heard('q')
    assert bell.due_at == pytest.approx(clock.now + 2.2)
    bell.heard('q')
    assert bell.due_at == pytest.approx(clock.now + 4.4)
    bell.heard('q')
    assert bell.due_at == pytest.approx(clock.now + 8.8)


def test_bell_that_was_not_stored_rings_again(clock: Clock) -> None:
    bell = Bell()
    bell.waits('q', 0, ['a'])
    clock.now += 0.1
    assert bell.check('q', ['a'])  # and nobody hears it
    assert bell.due_at > clock.now
    clock.now = bell.due_at
    assert bell.check('q', ['a'])
