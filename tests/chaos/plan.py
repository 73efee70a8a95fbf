"""The plan, a pure function of the seed: which tasks are sent, and what fails when."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

__all__ = ['Order', 'Plan', 'Strike', 'plan']

#: The share of each kind of order, in percent.
KINDS = {'late': 49, 'large': 4, 'early': 8, 'planned': 12, 'tried': 8, 'group': 6, 'chord': 7, 'chain': 6}

#: How long tasks run, in seconds. Most are short; some are long enough to be running when a fault happens.
_LENGTHS = (*[0.0] * 12, *[0.02] * 5, 0.2, 0.2, 1.0)

#: The share of the work during which faults happen; the rest is for recovery.
_UNSAFE = 0.95


@dataclass(frozen=True)
class Order:
    """Something to send. `size` is the number of tasks of a group or chain, of parts of a chord, or of tries of a task.

    An order of the kind `news` is not a task but an event; its name is the event's number.
    """

    name: str
    kind: str
    seconds: float
    size: int
    #: The countdown in seconds.
    countdown: float

    @property
    def tasks(self) -> int:
        """The number of its tasks."""
        return {'group': self.size, 'chain': self.size, 'chord': self.size + 1}.get(self.kind, 1)


@dataclass(frozen=True)
class Strike:
    """A planned fault: begins when `after` tasks have ended, and is healed after `seconds`."""

    after: int
    fault: str
    #: A number that selects the victim.
    target: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """All orders and all faults, in order."""

    seed: int
    orders: Sequence[Order]
    strikes: Sequence[Strike]

    @property
    def tasks(self) -> int:
        """The number of tasks to send."""
        return sum(order.tasks for order in self.orders)


def plan(seed: int, tasks: int, faults: int, spans: Mapping[str, tuple[float, float]], *, early: bool = True) -> Plan:
    """Return a plan with at least `tasks` tasks and `faults` faults; `spans` has the duration range of each kind.

    Without `early` there are late tasks in place of those that are always acknowledged early.
    """
    dice = random.Random(seed)
    orders: list[Order] = []
    sent = 0
    while sent < tasks:
        order = _order(dice, f't{len(orders)}')
        orders.append(order if early or order.kind != 'early' else replace(order, kind='late'))
        sent += orders[-1].tasks
    names = _dealt(dice, sorted(spans))
    strikes = [
        Strike(
            int((number + dice.random()) / faults * _UNSAFE * sent),
            name := next(names),
            dice.randrange(1000),
            round(dice.uniform(*spans[name]), 2),
        )
        for number in range(faults)
    ]
    return Plan(seed, orders, strikes)


def _order(dice: random.Random, name: str) -> Order:
    [kind] = dice.choices(list(KINDS), list(KINDS.values()))
    size = dice.randint(2, 6) if kind in ('group', 'chord', 'chain') else dice.randint(2, 3) if kind == 'tried' else 1
    return Order(name, kind, dice.choice(_LENGTHS), size, round(dice.uniform(1, 8), 2) if kind == 'planned' else 0.0)


def _dealt(dice: random.Random, names: Sequence[str]) -> Iterator[str]:
    """Yield all names in random order, again and again, so that each occurs equally often."""
    while True:
        yield from dice.sample(names, len(names))
