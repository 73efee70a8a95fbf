"""What is sent and what fails when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ['Order', 'Plan', 'Strike', 'plan']

#: How often each kind of order occurs, in percent.
KINDS = {'late': 54, 'large': 4, 'early': 8, 'planned': 12, 'tried': 8, 'group': 7, 'chord': 7}

#: How long tasks run, in seconds: most are short, and some run when something fails.
_LENGTHS = (*[0.0] * 12, *[0.02] * 5, 0.2, 0.2, 1.0)

#: Of the work, the part in which things fail; the rest is left for what they left behind.
_UNSAFE = 0.95


@dataclass(frozen=True)
class Order:
    """Something to be sent. `size` is the number of tasks of a group or parts of a chord, and of tries of a task.

    Of the kind `news` it is no task, but an event, whose number is its name.
    """

    name: str
    kind: str
    seconds: float
    size: int
    #: In how many seconds it is due.
    countdown: float

    @property
    def tasks(self) -> int:
        """How many tasks it is."""
        return {'group': self.size, 'chord': self.size + 1}.get(self.kind, 1)


@dataclass(frozen=True)
class Strike:
    """A fault: it begins when so many tasks have ended, and is healed after so many seconds."""

    after: int
    fault: str
    #: Chooses the victim among those that there are.
    target: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """All that is sent, and all that fails, in order."""

    seed: int
    orders: Sequence[Order]
    strikes: Sequence[Strike]

    @property
    def tasks(self) -> int:
        """How many tasks are sent."""
        return sum(order.tasks for order in self.orders)


def plan(seed: int, tasks: int, faults: int, spans: Mapping[str, tuple[float, float]]) -> Plan:
    """Return a plan with at least so many tasks, and so many of the faults, whose `spans` say how long they may last."""
    dice = random.Random(seed)
    orders: list[Order] = []
    sent = 0
    while sent < tasks:
        orders.append(_order(dice, f't{len(orders)}'))
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
    size = dice.randint(2, 6) if kind in ('group', 'chord') else dice.randint(2, 3) if kind == 'tried' else 1
    return Order(name, kind, dice.choice(_LENGTHS), size, round(dice.uniform(1, 8), 2) if kind == 'planned' else 0.0)


def _dealt(dice: random.Random, names: Sequence[str]) -> Iterator[str]:
    """Yield names as cards are dealt, so that each comes up as often as the others."""
    while True:
        yield from dice.sample(names, len(names))
