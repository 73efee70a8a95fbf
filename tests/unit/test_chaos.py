"""Plan, verdict and tables of the chaos suite."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.ledger import Event
from tests.chaos.report import complaints
from tests.chaos.verdict import judge


def accepted(*keys: str, kind: str = 'late', tries: int = 1, early: bool = False, results: bool = True) -> Event:
    return {
        'event': 'accepted',
        'order': keys[0],
        'kind': kind,
        'keys': list(keys),
        'tries': tries,
        'early': early,
        'results': results,
    }


def run_of(
    key: str,
    at: float,
    *,
    worker: str = 'w1.1@chaos',
    pid: int = 1,
    try_: int = 0,
    sent: int = 1,
    delivery: int = 1,
    received: float | None = None,
    ends: bool = True,
    astray: bool = False,
) -> list[Event]:
    """Return the events of a run; its message was received shortly before it began."""
    run: dict[str, Any] = {'key': key, 'try': try_, 'worker': worker, 'delivery': f'{key} {try_} {sent}:{delivery}'}
    begun = {**run, 'pid': pid, 'astray': astray}
    return [
        {'event': 'received', 'at': at - 0.1 if received is None else received, **run},
        {'event': 'start', 'at': at, **begun},
        *([{'event': 'end', 'at': at + 0.5, **begun}] if ends else []),
    ]


def fault(
    began: float, ended: float, workers: list[str] | None = None, *, event: str = 'fault', **members: Any
) -> Event:
    return {
        'event': event,
        'name': 'fault',
        'began': began,
        'ended': ended,
        'workers': workers,
        'pid': None,
        'interrupts': True,
        'deadly': False,
        **members,
    }


def test_all_is_well() -> None:
    verdict = judge(
        [
            accepted('a'),
            *run_of('a', 1.0),
            accepted('c/0', 'c/body', kind='chord'),
            *run_of('c/0', 2.0),
            *run_of('c/body', 7.0),
            fault(0.0, 9.0),
        ]
    )
    assert verdict.holds
    assert (verdict.tasks, verdict.chords, verdict.faults.total(), verdict.standstill) == (3, 1, 1, 5.0)


def test_task_whose_last_try_never_ended_is_lost() -> None:
    verdict = judge([accepted('a', 'b'), *run_of('a', 1.0, ends=False), fault(0.0, 9.0, deadly=True)])
    assert (verdict.lost, verdict.holds) == (['a', 'b'], False)
    assert judge([accepted('a', tries=2), *run_of('a', 1.0)]).lost == ['a']
    assert judge([accepted('a', tries=2), *run_of('a', 1.0), *run_of('a', 2.0, try_=1)]).lost == []


@pytest.mark.parametrize(
    ('fault', 'excused'),
    [
        (fault(2.0, 3.0, ['w1.1@chaos'], deadly=True), True),
        (fault(2.0, 3.0, ['w1.2@chaos'], deadly=True), False),
        (fault(2.0, 3.0, ['w1.1@chaos']), False),
        (fault(0.1, 0.2, ['w1.1@chaos'], deadly=True), False),
    ],
)
def test_task_acknowledged_early_may_be_lost_with_its_process(fault: Event, excused: bool) -> None:
    verdict = judge([accepted('a', kind='early', early=True), *run_of('a', 1.0, ends=False), fault])
    assert (verdict.at_most_once, verdict.lost) == ((['a'], []) if excused else ([], ['a']))


def killed(began: float, *, pid: int | None = None) -> Event:
    return fault(began, began + 1.0, ['w1.1@chaos'], deadly=True, pid=pid)


@pytest.mark.parametrize(
    ('order', 'events', 'lost', 'at_most_once'),
    [
        # The second link was never sent: the first one's process was killed after its end, or it was not.
        (('chain', ['a', 'b', 'c']), [*run_of('a', 1.0), killed(1.6)], [], ['b', 'c']),
        (('chain', ['a', 'b', 'c']), [*run_of('a', 1.0), killed(60.0)], ['b', 'c'], []),
        (('chord', ['c/0', 'c/1', 'body']), [*run_of('c/0', 1.0), *run_of('c/1', 1.0), killed(1.6)], [], ['body']),
    ],
)
def test_what_a_lost_task_would_have_sent_is_lost_with_it(
    order: tuple[str, list[str]], events: list[Event], lost: list[str], at_most_once: list[str]
) -> None:
    kind, keys = order
    early, late = (judge([accepted(*keys, kind=kind, early=early), *events]) for early in (True, False))
    assert (early.lost, early.at_most_once) == (lost, at_most_once)
    assert (late.lost, late.at_most_once) == (lost + at_most_once, [])
    assert early.unfinished == (kind == 'chord' and not lost)


@pytest.mark.parametrize(
    ('faults', 'excused'),
    [
        ([], False),
        ([killed(1.6)], True),
        ([killed(1.6, pid=2)], False),  # another child
        ([killed(0.0)], False),  # before the end, at 1.5
        ([killed(30.0)], False),  # the result had enough time
        ([fault(2.0, 29.0, ['w1']), killed(30.0)], True),  # the network was cut meanwhile
        ([fault(1.6, 2.6, ['w1.1@chaos'])], False),  # not deadly
    ],
)
def test_result_of_a_task_acknowledged_early_may_be_lost_with_its_process(faults: list[Event], excused: bool) -> None:
    stored: Event = {'event': 'stored', 'keys': []}
    verdict = judge([accepted('a', early=True), *run_of('a', 1.0), stored, *faults])
    assert (verdict.results_at_most_once, verdict.results_lost) == ((['a'], []) if excused else ([], ['a']))
    assert verdict.holds == excused
    assert judge([accepted('a'), *run_of('a', 1.0), stored, *faults]).results_lost == ['a']
    assert judge([accepted('a'), *run_of('a', 1.0), {**stored, 'keys': ['a']}]).holds


@pytest.mark.parametrize(
    ('faults', 'explained'),
    [
        ([], False),
        ([fault(2.0, 2.0, ['w1.1@chaos'])], True),
        ([fault(2.0, 3.0, None)], True),
        ([fault(2.0, 3.0, ['w2'])], True),  # it may have had the message before the worker of the first run
        ([fault(2.0, 3.0, ['w1.2@chaos'])], False),
        ([fault(2.0, 3.0, ['w1.1@chaos'], pid=9)], False),
        ([fault(2.0, 3.0, ['w1.1@chaos'], interrupts=False)], False),
        ([fault(0.1, 0.5, ['w1.1@chaos'])], False),
        ([fault(6.0, 7.0, ['w1.1@chaos'])], False),
        ([fault(2.0, 3.0, ['w1.1@chaos'], since=1.1)], False),
    ],
)
def test_second_run_needs_a_reason(faults: list[Event], explained: bool) -> None:
    verdict = judge([accepted('a'), *run_of('a', 1.0), *run_of('a', 5.0, worker='w2.1@chaos', delivery=2), *faults])
    assert (verdict.explained, verdict.twice) == ((['a'], []) if explained else ([], ['a']))
    assert verdict.holds == explained


def test_tries_are_not_doubles_and_doubles_are_inherited() -> None:
    tries = [*run_of('a', 1.0), *run_of('a', 2.0, try_=1)]
    assert judge([accepted('a', tries=2), *tries]).holds
    again = [*run_of('a', 11.0, delivery=2), *run_of('a', 12.0, try_=1, sent=2)]
    assert judge([accepted('a', tries=2), *tries, *again, fault(1.2, 1.2, None)]).holds
    assert judge([accepted('a', tries=2), *tries, *again]).twice == ['a']


def test_body_of_a_chord_that_was_sent_twice() -> None:
    chord = [accepted('c/0', 'c/body', kind='chord'), *run_of('c/0', 1.0), *run_of('c/body', 2.0)]
    assert judge([*chord, *run_of('c/body', 5.0, delivery=2), fault(2.1, 2.1, None)]).holds
    assert judge([*chord, *run_of('c/body', 5.0, delivery=2)]).twice == ['c/body']
    assert judge([*chord, *run_of('c/body', 5.0, sent=2), fault(2.1, 2.1, None)]).sent_twice == ['c/body']


def test_clock_that_is_ahead_explains_a_task_that_runs_early() -> None:
    """By the server's time it was due when it was delivered, at 2.0."""
    due: Event = {'event': 'due', 'key': 'a', 'try': 0, 'at': 9.0}
    for ahead, began, excused in ((90.0, 1.0, True), (90.0, 3.0, False), (-90.0, 1.0, False)):
        clock = fault(began, began + 8.0, ahead=ahead)
        assert bool(judge([accepted('a'), due, *run_of('a', 2.5, received=2.0), clock]).too_early) != excused


@pytest.mark.parametrize(
    ('at', 'astray', 'early'), [(9.9, False, True), (10.0, False, False), (8.0, True, False), (7.0, True, True)]
)
def test_run_that_began_too_early(at: float, astray: bool, early: bool) -> None:
    due: Event = {'event': 'due', 'key': 'a', 'try': 0, 'at': 10.0}
    verdict = judge([accepted('a', kind='planned'), due, *run_of('a', at, astray=astray)])
    assert bool(verdict.too_early) == early
    assert verdict.holds != early


def test_listener_that_missed_the_last_event_is_told() -> None:
    told: list[Event] = [{'event': 'told', 'number': 0, 'at': 0.0}, {'event': 'told', 'number': 1, 'at': 1.0}]
    heard: Event = {'event': 'heard', 'number': 1, 'at': 1.0}
    assert judge([*told, heard]).holds
    assert 'missed the last event: the listener' in complaints(judge([*told, {**heard, 'number': 0}]))
