"""Switches adaptive mechanisms of the packages off, for `tests.benchmarks.ablation`; the product has no options for it.

`BENCHMARK_WITHOUT` names a mechanism. Each process of a benchmark imports this module: programs, workers and what they
fork. A mechanism that is removed from the packages is removed here, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ['MECHANISMS', 'Mechanism']


class Mechanism(NamedTuple):
    """One adaptive mechanism: what it is, the cases that it may matter to, and the function that switches it off."""

    title: str
    cases: tuple[str, ...]
    switch_off: Callable[[], None]


def _replace(target: Any, **members: Any) -> None:
    for name, value in members.items():
        assert hasattr(target, name), f'{target!r} has no {name!r} any more'
        setattr(target, name, value)


def _no_claims_ahead() -> None:
    from kombu_couchdb.flow import Throughput

    _replace(Throughput, ahead=lambda self, limit, stock, now: 0)


def _no_read_ahead() -> None:
    from celery_couchdb.waiting import read_ahead

    _replace(read_ahead, _MIN_READS=10**9)
    _replace(read_ahead.ReadAhead, to_watch=lambda self, doc_id: [])


def _no_expectation() -> None:
    from celery_couchdb.waiting.watched import Expectation

    _replace(Expectation, learn=lambda self, seconds: None)


def _no_collecting() -> None:
    from celery_couchdb.waiting.watched import Pacing

    _replace(Pacing, pause=lambda self, count, others, now: 0.0)


def _no_polling() -> None:
    from celery_couchdb.waiting import subscriber

    _replace(subscriber, _SHORT_WAIT_SECONDS=0.0)


def _no_gathering() -> None:
    from kombu_couchdb.flow import Flow

    _replace(Flow, pause=0.0, next_at=property(lambda self: self._began))


def _no_bell() -> None:
    from kombu_couchdb.fleet.attention import BellRinger

    _replace(BellRinger, waits=lambda self, queue, rank, ids: None)


def _no_active_listeners() -> None:
    from kombu_couchdb.fleet.attention import Attention

    _replace(Attention, is_active=property(lambda self: False))


def _no_claim_order() -> None:
    from kombu_couchdb.fleet.claim_order import ClaimOrder

    _replace(ClaimOrder, turn_of=lambda self, key: (0, 0.0))


def _no_busy_listeners() -> None:
    from kombu_couchdb.fleet import claim_order

    _replace(claim_order.ClaimOrder, _note=lambda self, **kwargs: False)


def _no_runs() -> None:
    from kombu_couchdb.fleet import claim_order

    _replace(claim_order, _LONG=10**9, _SHORT=10**9)


def _no_penalty() -> None:
    from kombu_couchdb import flow

    _replace(flow, _MAX_PENALTY=0)


def _no_free_listeners() -> None:
    from kombu_couchdb.fleet import attention

    _replace(attention, _FREE_SHARE=0.0)


def _no_losses() -> None:
    from kombu_couchdb.fleet.attention import Attention

    _replace(Attention, lost=lambda self: None)


def _no_quiet_queues() -> None:
    from kombu_couchdb.fleet import attention

    _replace(attention, _QUIET_LOOKS=1)


def _refreshing_looks() -> None:
    from kombu_couchdb.fleet import candidates

    _replace(candidates, _MAX_REFRESHING=1)


def _no_own_left() -> None:
    from kombu_couchdb.fleet import candidates

    _replace(candidates, _MIN_OWN_LEFT=0)


def _no_moment() -> None:
    from kombu_couchdb.fleet import claim_order

    _replace(claim_order, _MOMENT_SECONDS=0.0)


def _no_growing_reads() -> None:
    from kombu_couchdb.consumer import claims

    _replace(claims, _FIRST_DOCS=claims._MAX_DOCS)


def _no_growing_read_ahead() -> None:
    from celery_couchdb.waiting import read_ahead

    _replace(read_ahead, _MIN_READ=100, _MAX_READ=100, _MIN_WATCHED=100, _MAX_WATCHED=100)


_TASKS, _UNEVEN, _DELAYS = 'tasks', 'uneven tasks', 'delays'
_WAITING, _MANY, _CROWD = '10 programs', '40 programs', 'programs among others'
_FLEET, _LARGE_FLEET = 'fleet of 10', 'fleet of 100'
_FLEETS = (_FLEET, _LARGE_FLEET)

MECHANISMS: Mapping[str, Mechanism] = {
    'ahead': Mechanism('claims ahead of the prefetch count', (_TASKS, _UNEVEN, _DELAYS, _FLEET), _no_claims_ahead),
    'penalty': Mechanism('fewer claims ahead after each stall', (_UNEVEN,), _no_penalty),
    'gather': Mechanism('gathering while documents flow', (_TASKS, _DELAYS, _WAITING), _no_gathering),
    'read-ahead': Mechanism('reading and watching results ahead', (_TASKS, _WAITING), _no_read_ahead),
    'read-ahead-size': Mechanism('the size of that, which grows', (_TASKS,), _no_growing_read_ahead),
    'expectation': Mechanism('the expected time of a result', (_WAITING, _MANY, _CROWD), _no_expectation),
    'collecting': Mechanism('a pause that collects results', (_TASKS,), _no_collecting),
    'polling': Mechanism('polling while new waits begin', (_TASKS, _WAITING, _MANY), _no_polling),
    'docs': Mechanism('the number of documents in a read, which grows', (_TASKS,), _no_growing_reads),
    'bell': Mechanism('the bell', (_FLEET,), _no_bell),
    'active': Mechanism('active listeners', _FLEETS, _no_active_listeners),
    'free': Mechanism('listeners that have become free', (_FLEET,), _no_free_listeners),
    'losses': Mechanism('active listeners that others outrun', (_FLEET,), _no_losses),
    'quiet': Mechanism('quiet queues', (_FLEET,), _no_quiet_queues),
    'order': Mechanism('the claim order', _FLEETS, _no_claim_order),
    'busy-order': Mechanism('busy listeners in the claim order', _FLEETS, _no_busy_listeners),
    'moment': Mechanism('a moment for the first listener', (_FLEET,), _no_moment),
    'runs': Mechanism('runs of messages in the claim order', (_FLEET,), _no_runs),
    'refresh': Mechanism('looks of which one in a second updates the index', (_FLEET,), _refreshing_looks),
    'own-left': Mechanism('no claims ahead of what others may need', (_FLEET,), _no_own_left),
}

if name := os.environ.get('BENCHMARK_WITHOUT'):
    MECHANISMS[name].switch_off()
