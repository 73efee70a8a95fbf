"""Plan, verdict and tables of the chaos suite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import UsageError

from chaos.__main__ import changed
from chaos.faults import faults_of
from chaos.ledger import Event, Ledger, Progress
from chaos.machine import pauses_noted
from chaos.plan import KINDS, plan
from chaos.report import complaints, faults_table, verdicts_table
from chaos.site import merged
from chaos.verdict import Verdict, judge
from tests.conftest import wait_for

SPANS = {'kill': (1.0, 2.0), 'cut': (0.0, 0.0), 'pause': (5.0, 6.0)}


# -- the plan


def test_same_seed_same_plan() -> None:
    assert plan(7, 500, 20, SPANS) == plan(7, 500, 20, SPANS)
    assert plan(7, 500, 20, SPANS) != plan(8, 500, 20, SPANS)


def test_plan_has_what_was_asked_for() -> None:
    planned = plan(7, 500, 20, SPANS)
    assert 500 <= planned.tasks < 510
    assert {order.kind for order in planned.orders} == set(KINDS)
    assert len({order.name for order in planned.orders}) == len(planned.orders)
    names = [strike.fault for strike in planned.strikes]
    assert {name: names.count(name) in (6, 7) for name in SPANS} == dict.fromkeys(SPANS, True)
    assert all(SPANS[strike.fault][0] <= strike.seconds <= SPANS[strike.fault][1] for strike in planned.strikes)


def test_faults_come_in_order_and_before_the_work_is_done() -> None:
    planned = plan(7, 500, 20, SPANS)
    after = [strike.after for strike in planned.strikes]
    assert after == sorted(after)
    assert after[0] >= 0
    assert after[-1] < 0.96 * planned.tasks


def test_server_is_left_alone_unless_it_may_be_stopped() -> None:
    all_ = set(faults_of(stopping=True, killing=True, pausing=True))
    assert all_ - set(faults_of(stopping=False, killing=False)) == {'server stopped', 'server killed', 'server paused'}


def test_plan_without_early_acknowledgements_is_the_same_otherwise() -> None:
    planned, late = plan(7, 500, 20, SPANS), plan(7, 500, 20, SPANS, early=False)
    assert late.strikes == planned.strikes
    assert [order.kind for order in late.orders] == [
        'late' if order.kind == 'early' else order.kind for order in planned.orders
    ]


def test_options_become_settings_of_celery() -> None:
    assert changed('mixed', False, None, []) == changed('late', False, None, []) == {}
    assert changed('early', True, 32, [('result_backend_transport_options', '{"request_timeout": 1}')]) == {
        'task_acks_late': False,
        'worker_prefetch_multiplier': 32,
        'result_backend_transport_options': {'request_timeout': 1, 'confirm_results': True},
    }
    with pytest.raises(UsageError, match='--set task_acks_late is not JSON'):
        changed('late', False, None, [('task_acks_late', 'yes')])


def test_settings_are_merged() -> None:
    assert merged({'a': 1, 'b': {'c': 2, 'd': 3}}, {'a': 4, 'b': {'d': 5}, 'e': {}}) == {
        'a': 4,
        'b': {'c': 2, 'd': 5},
        'e': {},
    }


# -- the verdict


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


def stored(*keys: str) -> Event:
    return {'event': 'stored', 'keys': list(keys)}


def due(key: str, at: float, try_: int = 0) -> Event:
    return {'event': 'due', 'key': key, 'try': try_, 'at': at}


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


def told(number: int, *, heard: bool = True) -> list[Event]:
    return [
        {'event': event, 'number': number, 'at': float(number)} for event in ('told', *(['heard'] if heard else []))
    ]


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


def test_task_that_never_ended_is_lost() -> None:
    verdict = judge([accepted('a', 'b'), *run_of('a', 1.0, ends=False), fault(0.0, 9.0, deadly=True)])
    assert verdict.lost == ['a', 'b']
    assert not verdict.holds


def test_task_whose_last_try_never_ended_is_lost() -> None:
    assert judge([accepted('a', tries=2), *run_of('a', 1.0)]).lost == ['a']
    assert judge([accepted('a', tries=2), *run_of('a', 1.0), *run_of('a', 2.0, try_=1)]).lost == []


def test_order_that_was_not_accepted_need_not_run() -> None:
    assert judge(run_of('a', 1.0, ends=False)).holds


@pytest.mark.parametrize(
    ('fault', 'excused'),
    [
        (fault(2.0, 3.0, ['w1.1@chaos'], deadly=True), True),
        (fault(2.0, 2.0, ['w1.1@chaos'], deadly=True, pid=1), True),
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
        (('chain', ['a', 'b']), [*run_of('a', 1.0, ends=False), killed(1.1)], [], ['a', 'b']),
        (('chord', ['c/0', 'c/1', 'body']), [*run_of('c/0', 1.0), *run_of('c/1', 1.0), killed(1.6)], [], ['body']),
        (('chord', ['c/0', 'c/1', 'body']), [*run_of('c/0', 1.0), *run_of('c/1', 1.0)], ['body'], []),
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


def test_next_try_is_lost_with_the_one_before() -> None:
    events = [accepted('a', kind='tried', tries=2, early=True), *run_of('a', 1.0)]
    assert judge(events).lost == ['a']
    assert judge([*events, killed(1.6)]).at_most_once == ['a']


@pytest.mark.parametrize(
    ('faults', 'excused'),
    [
        ([], False),
        ([killed(1.6)], True),
        ([killed(1.6, pid=1)], True),
        ([killed(1.6, pid=2)], False),  # another child
        ([killed(0.0)], False),  # before the end, at 1.5
        ([killed(30.0)], False),  # the result had enough time
        ([fault(2.0, 29.0, ['w1']), killed(30.0)], True),  # the network was cut meanwhile
        ([fault(2.0, 29.0, ['w2']), killed(30.0)], False),
        ([fault(1.6, 2.6, ['w1.1@chaos'])], False),  # not deadly
    ],
)
def test_result_of_a_task_acknowledged_early_may_be_lost_with_its_process(faults: list[Event], excused: bool) -> None:
    verdict = judge([accepted('a', early=True), *run_of('a', 1.0), stored(), *faults])
    assert (verdict.results_at_most_once, verdict.results_lost) == ((['a'], []) if excused else ([], ['a']))
    assert verdict.holds == excused
    assert judge([accepted('a'), *run_of('a', 1.0), stored(), *faults]).results_lost == ['a']


def test_results_are_stored() -> None:
    runs = [*run_of('a', 1.0), *run_of('b', 1.0), *run_of('c', 1.0)]
    orders = [accepted('a'), accepted('b'), accepted('c', results=False)]
    assert judge([*orders, *runs, stored('a', 'b')]).holds
    assert judge([*orders, *runs, stored('a')]).results_lost == ['b']
    assert judge([*orders, *runs]).holds  # nobody has looked yet


def test_task_that_never_ended_has_no_lost_result() -> None:
    verdict = judge([accepted('a'), stored()])
    assert (verdict.lost, verdict.results_lost) == (['a'], [])


@pytest.mark.parametrize(
    ('faults', 'explained'),
    [
        ([], False),
        ([fault(2.0, 2.0, ['w1.1@chaos'])], True),
        ([fault(2.0, 3.0, None)], True),
        ([fault(2.0, 3.0, ['w1'])], True),
        (
            [fault(2.0, 3.0, ['w2'])],
            True,
        ),  # the second run's worker: it may have had the message before the first one's
        ([fault(2.0, 3.0, ['w3'])], False),
        ([fault(2.0, 3.0, [])], False),
        ([fault(2.0, 3.0, ['w1.2@chaos'])], False),
        ([fault(2.0, 3.0, ['w1.1@chaos'], pid=1)], True),
        ([fault(2.0, 3.0, ['w1.1@chaos'], pid=9)], False),
        ([fault(2.0, 3.0, ['w1.1@chaos'], interrupts=False)], False),
        ([fault(0.1, 0.5, ['w1.1@chaos'])], False),
        ([fault(6.0, 7.0, ['w1.1@chaos'])], False),
        ([fault(2.0, 3.0, ['w1.1@chaos'], event='machine')], True),
        ([fault(2.0, 3.0, ['w1.1@chaos'], since=0.9)], True),
        ([fault(2.0, 3.0, ['w1.1@chaos'], since=1.1)], False),
    ],
)
def test_second_run_needs_a_reason(faults: list[Event], explained: bool) -> None:
    verdict = judge([accepted('a'), *run_of('a', 1.0), *run_of('a', 5.0, worker='w2.1@chaos', delivery=2), *faults])
    assert (verdict.explained, verdict.twice) == ((['a'], []) if explained else ([], ['a']))
    assert verdict.holds == explained


def test_pause_before_a_run_began_explains_it() -> None:
    paused = run_of('a', 9.0, worker='w2.1@chaos', received=1.0)
    assert judge(
        [accepted('a'), *paused, *run_of('a', 8.0, delivery=2), fault(2.0, 7.0, ['w2.1@chaos'])]
    ).explained == ['a']


def test_each_further_run_needs_a_reason() -> None:
    runs = [*run_of('a', 1.0), *run_of('a', 5.0, delivery=2), *run_of('a', 9.0, delivery=3)]
    assert judge([accepted('a'), *runs, fault(2.0, 2.0, None)]).twice == ['a']


def test_tries_are_not_doubles_and_doubles_are_inherited() -> None:
    tries = [*run_of('a', 1.0), *run_of('a', 2.0, try_=1)]
    assert judge([accepted('a', tries=2), *tries]).holds
    again = [*run_of('a', 11.0, delivery=2), *run_of('a', 12.0, try_=1, sent=2)]
    assert judge([accepted('a', tries=2), *tries, *again, fault(1.2, 1.2, None)]).holds
    assert judge([accepted('a', tries=2), *tries, *again]).twice == ['a']


def test_link_of_a_chain_is_sent_twice_only_by_one_that_ran_twice() -> None:
    links = [accepted('a', 'b', 'c', kind='chain'), *(one for key in 'abc' for one in run_of(key, 1.0))]
    again = [one for key in 'bc' for one in run_of(key, 11.0, sent=2, delivery=2)]
    assert judge([*links, *run_of('a', 10.0, delivery=2), *again, fault(1.1, 1.1, None)]).holds
    alone = judge([*links, *again, fault(1.1, 1.1, None)])
    assert (alone.sent_twice, alone.explained) == (['b'], ['b', 'c'])


def test_body_of_a_chord_that_was_sent_twice() -> None:
    chord = [accepted('c/0', 'c/body', kind='chord'), *run_of('c/0', 1.0), *run_of('c/body', 2.0)]
    assert judge([*chord, *run_of('c/body', 5.0, delivery=2), fault(2.1, 2.1, None)]).holds
    assert judge([*chord, *run_of('c/body', 5.0, delivery=2)]).twice == ['c/body']
    assert judge([*chord, *run_of('c/body', 5.0, sent=2), fault(2.1, 2.1, None)]).sent_twice == ['c/body']


@pytest.mark.parametrize(
    ('at', 'astray', 'early'), [(9.9, False, True), (10.0, False, False), (8.0, True, False), (7.0, True, True)]
)
def test_run_that_began_too_early(at: float, astray: bool, early: bool) -> None:
    verdict = judge([accepted('a', kind='planned'), due('a', 10.0), *run_of('a', at, astray=astray)])
    assert bool(verdict.too_early) == early
    assert verdict.holds != early


def test_pauses_without_a_fault_count_as_the_operating_system_s() -> None:
    paused = fault(2.0, 9.0, ['w1.1@chaos'], event='machine')
    assert judge([paused]).pauses == 1
    assert judge([paused, fault(2.5, 8.5, ['w2.1@chaos'])]).pauses == 1
    assert judge([paused, fault(2.5, 8.5, ['w1.1@chaos'])]).pauses == 0


def test_a_pause_of_the_proxies_affects_all_workers_and_no_fault_causes_it() -> None:
    paused = fault(2.0, 9.0, None, event='machine')
    assert judge([paused, fault(2.5, 8.5, ['w1.1@chaos'])]).pauses == 1
    runs = [*run_of('a', 1.0), *run_of('a', 8.0, worker='w2.1@chaos', delivery=2)]
    assert judge([accepted('a'), *runs, paused]).explained == ['a']
    assert judge([accepted('a'), *runs]).twice == ['a']


def test_a_process_records_its_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, times = Ledger(tmp_path / 'ledger'), iter([0.0, 0.6, 0.6, 5.0])
    monkeypatch.setattr('chaos.machine.time', SimpleNamespace(monotonic=lambda: next(times, 5.0)))
    with pauses_noted(ledger):
        [event] = wait_for(ledger.new_events, 'the pause')
    assert (event['event'], event['began'], event['ended'], event['workers']) == ('machine', 0.6, 5.0, None)


def test_leftovers_break_the_promise() -> None:
    assert not Verdict(remains=['1 messages are running in queue celery']).holds


# -- ledger and table


def test_ledger_is_read_as_it_grows(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / 'ledger')
    progress = Progress(Ledger(ledger.path))
    progress.update()
    assert progress.events == []
    for event in [accepted('a', 'b'), *run_of('a', 1.0, pid=17)]:
        ledger.note(**event)
        progress.update()
    assert (progress.orders, progress.accepted, progress.ended) == ({'a'}, {'a', 'b'}, {'a'})
    assert progress.children == {'w1.1@chaos': 17}
    with ledger.path.open('a') as file:
        file.write('{"event": "half')
    progress.update()
    assert len(progress.events) == 4


def test_table() -> None:
    verdicts = {
        'Seed 1': judge([accepted('a', 'b'), *run_of('a', 1.0), fault(0.0, 1.0)]),
        'Seed 2': Verdict(tasks=10_000),
    }
    table = [line.split() for line in verdicts_table(verdicts).splitlines()]
    assert ['Tasks', 'accepted', '2', '10,000'] in table
    assert ['Lost', '1', '0'] in table
    assert ['fault', '1', '0'] in [line.split() for line in faults_table(verdicts).splitlines()]
    assert complaints(verdicts['Seed 1']) == 'lost: b'


# -- the server's clock


@pytest.mark.parametrize(
    ('ahead', 'began', 'excused'),
    [(90.0, 1.0, True), (90.0, 3.0, False), (90.0, -20.0, False), (-90.0, 1.0, False), (0.0, 1.0, False)],
)
def test_clock_that_is_ahead_explains_a_task_that_runs_early(ahead: float, began: float, excused: bool) -> None:
    """By the server's time it was due when it was delivered, at 2.0."""
    verdict = judge(
        [accepted('a'), due('a', 9.0), *run_of('a', 2.5, received=2.0), fault(began, began + 8.0, ahead=ahead)]
    )
    assert bool(verdict.too_early) != excused


# -- the listener


@pytest.mark.parametrize(
    ('events', 'deaf'),
    [
        ([], False),
        (told(0), False),
        (told(0, heard=False), True),
        (told(0) + told(1, heard=False), True),
        (told(0, heard=False) + told(1), False),
    ],
)
def test_listener_hears_the_last_event(events: list[Event], deaf: bool) -> None:
    verdict = judge(events)
    assert (verdict.deaf, verdict.holds) == (deaf, not deaf)
    assert ('missed the last event: the listener' in complaints(verdict)) == deaf


def test_progress_has_the_last_received_event(tmp_path: Path) -> None:
    progress = Progress(ledger := Ledger(tmp_path / 'ledger'))
    progress.update()
    assert progress.heard == -1
    for event in told(0) + told(1) + told(2, heard=False):
        ledger.note(**{**event, 'event': event['event']})
    progress.update()
    assert progress.heard == 1
