"""The orders of a run of regions: which tasks each region sends, and to which regions."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from celery import chain

from kombu_couchdb.contrib.regions import records
from kombu_couchdb.errors import CouchDBError

from .region_site import RegionSite

__all__ = ['Order', 'planned_orders']

#: How often an order of each kind is sent, among 100.
_SHARES = {'late': 36, 'early': 18, 'fallback': 18, 'chain': 12, 'cancelled': 15, 'any': 1}

#: The number of tasks of an order that may run in any region: more than a worker runs at once, so that some are lent.
_BURST = (24, 48)

#: How long the tasks work, in seconds.
_SECONDS = (0.01, 0.05, 0.2, 1.0)

#: The pause before a task is tried to be cancelled again, in seconds.
_PAUSE = 0.5


@dataclass(frozen=True)
class Order:
    """A task, or some tasks of the same kind, that one region sends."""

    kind: str
    #: Its number, and the one that its first task returns; the others return the next ones.
    name: int
    number: int
    #: The region that sends it, and the region that each of its tasks names.
    home: str
    to: Sequence[str]
    #: How long each task works, in seconds.
    seconds: float
    #: When it is cancelled, or runs in the region `fallback`, in seconds from now.
    delay: float
    fallback: str

    @property
    def is_cancelled(self) -> bool:
        """Tell whether its task is cancelled after `delay`."""
        return self.kind == 'cancelled'

    def accepted(self, home: RegionSite) -> list[str]:
        """Send the tasks until that succeeds; return their ids."""
        for again in itertools.count():
            keys = [f'{self.home}-{self.name}.{again}.{step}-{to}' for step, to in enumerate(self.to)]
            try:
                self._send(home, keys)
            except home.app.connection_for_write().recoverable_connection_errors:
                continue  # they may have been sent all the same: the next attempt uses other ids
            return keys
        raise AssertionError

    def _send(self, home: RegionSite, keys: Sequence[str]) -> None:
        task = 'early' if self.kind == 'early' else 'part'
        steps = [
            home.app.signature(task, (self.seconds, number), immutable=True).set(task_id=key, region=to)
            for number, (key, to) in enumerate(zip(keys, self.to, strict=True), self.number)
        ]
        if self.kind == 'chain':
            chain(steps).apply_async()
            return
        more: dict[str, object] = {}
        if self.kind == 'fallback':
            more = {'fallback': self.fallback, 'fallback_after': self.delay}
        elif self.kind == 'cancelled':
            more = {'countdown': 2 * self.delay}
        for step in steps:
            step.apply_async(**more)

    def cancel(self, home: RegionSite, keys: Sequence[str]) -> None:
        """Cancel its task, if it has not ended, until that succeeds."""
        while True:
            try:
                for key in keys:
                    records.cancel(home.client['regions'], key)
                return
            except CouchDBError:
                time.sleep(_PAUSE)


def planned_orders(seed: int, tasks: int, names: Sequence[str]) -> list[Order]:
    """Return orders with so many tasks, or slightly more; the regions send in turn."""
    dice, found, number = random.Random(seed), list[Order](), 0
    while number < tasks:
        [kind] = dice.choices([*_SHARES], [*_SHARES.values()])
        home = names[len(found) % len(names)]
        others = [name for name in names if name != home]
        if kind == 'any':
            to = ['any'] * dice.randint(*_BURST)
        elif kind == 'chain':
            to = dice.choices(names, k=dice.randint(2, 4))
        else:
            to = [dice.choice(others if kind in ('fallback', 'cancelled') else names)]
        seconds = 0.5 if kind == 'any' else dice.choice(_SECONDS)
        fallback = dice.choice([name for name in names if name != to[0]])
        delay = round(dice.uniform(*((2.0, 15.0) if kind == 'fallback' else (0.0, 4.0))), 1)
        found.append(Order(kind, len(found), number, home, to, seconds, delay, fallback))
        number += len(to)
    return found
