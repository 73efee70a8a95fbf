"""Sizes of a run: quick (about two minutes), default (about half an hour) and full (hours)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ['SIZES', 'Fleets', 'Load', 'Size', 'amount', 'count']


@dataclass(frozen=True)
class Load:
    """Load on the consumers: they receive `take` of the `backlog` messages; `body` is in bytes."""

    prefetch: int
    consumers: int = 1
    body: int = 200
    backlog: int = 1000
    take: int = 1000


@dataclass(frozen=True)
class Fleets:
    """Fleets of consumers: their sizes, and the amounts for each."""

    sizes: tuple[int, ...] = (1, 10, 30, 100)
    #: The number of messages whose delay is measured, while the fleet is idle and while it is busy.
    probes: int = 40
    #: How long an idle fleet is observed, in seconds. It settles for a quarter of this before.
    idle: float = 20.0
    backlog: int = 6000


@dataclass(frozen=True)
class Size:
    """The amounts of one run."""

    rounds: int
    #: The number of messages to publish by the size of their body in bytes.
    published: Mapping[int, int]
    threads: tuple[int, ...]
    loads: tuple[Load, ...]
    #: The number of messages whose delay is measured.
    probes: int
    #: The number of tasks sent to a Celery worker.
    tasks: int
    #: The number of tasks of a group, and of the header of a chord.
    group: int
    chord: int
    #: The number of chains.
    chains: int
    #: How long tasks are sent at a steady rate, in seconds.
    steady: float
    #: The number of results to store and get.
    results: int
    #: The number of tasks that each program sends and waits for, by the number of programs.
    waiting: Mapping[int, int]
    #: The number of scheduled tasks while the memory of a worker is measured, with and without batches.
    planned: Mapping[bool, int]
    #: The number of messages whose requests are counted.
    counted: int
    #: How long an idle worker is observed, in seconds.
    idle: float
    fleets: Fleets
    #: The number of rounds for what takes long (idle worker, Celery job, large backlogs) or hardly varies (requests),
    #: unless the command line gives the number of rounds.
    long_rounds: int
    #: Measures that run only if the command line names them.
    skipped: frozenset[str] = frozenset()


_PREFETCH = (Load(1, take=200), Load(8, take=500), Load(64), Load(256))
_CONSUMERS = tuple(Load(64, consumers, backlog=3000, take=3000) for consumers in (1, 4, 8))
_BODIES = (Load(64, body=2000), Load(64, body=100_000, backlog=100, take=100))
_FEW = tuple(Load(prefetch, consumers, backlog=200, take=200) for prefetch, consumers in ((1, 1), (64, 1), (64, 4)))
_LONG = tuple(
    Load(64, consumers, backlog=backlog, take=5000) for backlog in (100_000, 1_000_000) for consumers in (1, 8)
)

SIZES = {
    'quick': Size(
        1,
        {200: 100},
        (1, 8),
        _FEW,
        probes=20,
        tasks=100,
        group=50,
        chord=30,
        chains=5,
        steady=3.0,
        results=50,
        waiting={1: 10, 10: 5},
        planned={True: 500, False: 100},
        counted=200,
        idle=3.0,
        fleets=Fleets((1, 10), probes=6, idle=2.0, backlog=300),
        long_rounds=1,
        skipped=frozenset({'idle', 'memory'}),
    ),
    'default': Size(
        3,
        {200: 400, 2000: 400, 100_000: 50},
        (1, 8),
        (*_PREFETCH, *_CONSUMERS, *_BODIES),
        probes=100,
        tasks=2000,
        group=500,
        chord=300,
        chains=50,
        steady=10.0,
        results=100,
        waiting={1: 60, 10: 40, 40: 40},
        planned={True: 20_000, False: 2000},
        counted=500,
        idle=15.0,
        fleets=Fleets(),
        long_rounds=1,
    ),
    'full': Size(
        5,
        {200: 2000, 2000: 2000, 100_000: 200},
        (1, 8),
        (*(Load(prefetch, consumers) for prefetch in (1, 8, 64, 256) for consumers in (1, 4, 8)), *_BODIES, *_LONG),
        probes=200,
        tasks=2000,
        group=500,
        chord=300,
        chains=50,
        steady=30.0,
        results=1000,
        waiting={1: 200, 10: 100, 40: 100},
        planned={True: 1_000_000, False: 10_000},
        counted=2000,
        idle=60.0,
        fleets=Fleets(probes=200, idle=60.0),
        long_rounds=3,
    ),
}


def amount(size: int) -> str:
    """Return a number of bytes with its unit.

    >>> amount(200), amount(2000)
    ('200 B', '2 kB')
    """
    return f'{size} B' if size < 1000 else f'{size // 1000} kB'


def count(number: int, one: str) -> str:
    """Return a number with its noun, singular or plural.

    >>> count(1, 'thread'), count(8, 'thread'), count(100_000, 'message')
    ('1 thread', '8 threads', '100,000 messages')
    """
    return f'{number:,} {one}{"" if number == 1 else "s"}'
