"""A run: send the orders, let the faults happen, wait until all tasks have ended, and judge."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice

from .faults import Fault
from .ledger import Progress
from .machine import pauses_noted
from .plan import Order, Plan, Strike
from .site import Site
from .verdict import Verdict, judge

__all__ = ['UNDER_WAY', 'run']

#: How many tasks may be sent and not ended, and how many may be sent beyond the next fault: enough to keep all workers
#: busy, few enough that faults also affect publishers and all happen while there is work.
UNDER_WAY = 100

#: The maximum number of faults at the same time.
_AT_ONCE = 3

#: The pause between two looks at the ledger, in seconds.
_LOOK = 0.05

#: How long to wait for an event to be received before the next is sent, and how long to go on with that, in seconds.
_ANSWERED, _CALLED = 5.0, 120.0


def run(
    plan: Plan,
    site: Site,
    kinds: Mapping[str, type[Fault]],
    patience: float,
    tell: Callable[[str], None],
    under_way: int = UNDER_WAY,
) -> Verdict:
    """Carry out the plan and return the verdict. Give up after `patience` seconds without progress.

    At most `under_way` tasks are sent ahead.
    """
    conductor = _Conductor(plan, site, kinds, patience, tell, under_way)
    with pauses_noted(site.ledger):
        try:
            conductor.work()
        finally:
            conductor.heal()
        conductor.call()
        remains = conductor.troubles + conductor.settle()
    conductor.look_up_results()
    verdict = judge(conductor.progress.events)
    verdict.remains = remains
    return verdict


class _Conductor:
    def __init__(
        self,
        plan: Plan,
        site: Site,
        kinds: Mapping[str, type[Fault]],
        patience: float,
        tell: Callable[[str], None],
        under_way: int,
    ) -> None:
        self.progress = Progress(site.ledger)
        #: What went wrong with the run itself, in sentences.
        self.troubles: list[str] = []
        self._plan, self._site, self._kinds, self._patience, self._tell = plan, site, kinds, patience, tell
        self._under_way = under_way
        self._unsent, self._strikes, self._sent = deque(plan.orders), deque(plan.strikes), 0
        self._slots = threading.Semaphore(_AT_ONCE)
        self._happening: list[threading.Thread] = []

    def work(self) -> None:
        """Send orders and begin faults; return when everything is done or nothing progresses."""
        seen, since = 0, time.monotonic()
        while not self._is_done():
            self.progress.update()
            if len(self.progress.events) != seen or any(thread.is_alive() for thread in self._happening):
                seen, since = len(self.progress.events), time.monotonic()
            elif time.monotonic() - since > self._patience:
                self.troubles.append(f'no progress for {self._patience:g} s')
                break
            reached = min([len(self.progress.ended), *(strike.after for strike in islice(self._strikes, 1))])
            while self._unsent and self._sent - reached < self._under_way:
                order = self._unsent.popleft()
                self._site.send(asdict(order))
                self._sent += order.tasks
            if (
                self._strikes
                and len(self.progress.ended) >= self._strikes[0].after
                and self._slots.acquire(blocking=False)
            ):
                self._begin(self._strikes.popleft())
            time.sleep(_LOOK)

    def heal(self) -> None:
        """Wait until all faults are healed, so that a stopped server runs again."""
        for thread in self._happening:
            thread.join()
        self.progress.update()

    def call(self) -> None:
        """Send events until the listener has received one. If it receives none, the verdict says so."""
        deadline = time.monotonic() + min(self._patience, _CALLED)
        for number in itertools.count():
            self._site.send(asdict(Order(str(number), 'news', 0.0, 1, 0.0)))
            answered = time.monotonic() + _ANSWERED
            while self.progress.heard < number and time.monotonic() < answered:
                time.sleep(_LOOK)
                self.progress.update()
            if self.progress.heard == number or time.monotonic() > deadline:
                break

    def settle(self) -> list[str]:
        """Wait until the databases contain only running processes, stop these, and return what remains."""
        ended = [
            place.worker for place in self._site.places if place.process is None or place.process.poll() is not None
        ]
        living = {place.process.pid for place in self._site.places if place.process}
        if self._site.listener is not None:
            living.add(self._site.listener.process.pid)
        deadline = time.monotonic() + self._patience
        while (found := self._site.remains(living, self._unfinished())) and time.monotonic() < deadline:
            time.sleep(0.5)
        stubborn = [place.worker for place in self._site.places if not place.stop()]
        if self._site.listener is not None:
            self._site.listener.close()
        return [
            *(f'{name} ended unexpectedly' for name in ended),
            *found,
            *(f'{name} did not stop' for name in stubborn),
            *self._site.remains(set(), self._unfinished()),
        ]

    def look_up_results(self) -> None:
        """Record which results are stored. Only a worker that has stopped stores no more."""
        self.progress.update()
        self._site.ledger.note('stored', keys=self._site.stored(sorted(self.progress.accepted)))
        self.progress.update()

    def _unfinished(self) -> int:
        self.progress.update()
        return judge(self.progress.events).unfinished

    def _is_done(self) -> bool:
        if (
            self._unsent
            or self._strikes
            or len(self.progress.orders) < len(self._plan.orders)
            or any(thread.is_alive() for thread in self._happening)
        ):
            return False
        # The full check is slow: it runs only when nearly all tasks have ended.
        return (
            len(self.progress.accepted - self.progress.ended) < self._under_way and not judge(self.progress.events).lost
        )

    def _begin(self, strike: Strike) -> None:
        fault = self._kinds[strike.fault](self._site, strike.target)

        def happen() -> None:
            try:
                fault.happen(strike.seconds, self.progress.children)
            except Exception as exc:
                self.troubles.append(f'the fault "{strike.fault}" failed: {exc!r}')
            finally:
                self._slots.release()

        self._happening = [thread for thread in self._happening if thread.is_alive()]
        self._happening.append(threading.Thread(target=happen, daemon=True))
        self._happening[-1].start()
        self._tell(
            f'{len(self.progress.ended)} tasks have ended, {len(self._strikes)} faults to come; now: '
            f'{strike.fault} ({strike.seconds:g} s)'
        )
