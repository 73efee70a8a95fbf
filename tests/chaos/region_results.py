"""Results of a run of regions: the programs of each region wait for those of the tasks that they have sent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from celery import states
from celery.exceptions import TimeoutError as ResultMissing

from kombu_couchdb.errors import CouchDBError

from .blame import hits
from .ledger import Progress
from .region_orders import Order
from .region_site import Regions, RegionSite
from .verdict import Verdict, judge

__all__ = ['Results']

#: How long a thread waits for one result before it waits for the next one, in seconds.
_TURN = 2.0


class _Expected(NamedTuple):
    home: RegionSite
    order: Order
    number: int


class Results:
    """A context manager: a thread for each region calls `get()` for each task until it returns."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._expected: dict[str, _Expected] = {}
        #: For each task with a final result its state, and what it returned, or the exception.
        self._answers: dict[str, tuple[str, Any]] = {}
        self._waiting = {region.name: deque[str]() for region in regions.all}
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._wait, args=(region,), daemon=True) for region in regions.all]

    def expect(self, home: RegionSite, order: Order, keys: Sequence[str]) -> None:
        """Wait for the results of an order that was sent; it counts as accepted, unless it will be cancelled."""
        self._expected.update({key: _Expected(home, order, number) for number, key in enumerate(keys, order.number)})
        if not order.is_cancelled:
            self._note(order, keys)
        self._waiting[home.name].extend(keys)

    def missing(self) -> set[str]:
        """Return the keys of the tasks without a result."""
        return dict(self._expected).keys() - dict(self._answers).keys()

    def excused(self, progress: Progress) -> set[str]:
        """Return the keys of tasks that were acknowledged early, and lost with their worker, or their results were."""
        stored = [key for key, (state, _) in dict(self._answers).items() if state == states.SUCCESS]
        verdict = judge([*progress.events, {'event': 'stored', 'keys': stored}])
        return {*verdict.at_most_once, *verdict.results_at_most_once}

    def judged(self, progress: Progress) -> Verdict:
        """Return the verdict, which judges the results that are stored now."""
        self._regions.ledger.note('stored', keys=self._regions.stored(sorted(self._expected)))
        progress.update()
        verdict = judge(progress.events)
        excused = {*verdict.at_most_once, *verdict.results_at_most_once}
        interrupted = {
            event['key']
            for event in progress.events
            if event['event'] == 'end'
            and any(
                fault['interrupts'] and hits(fault, event)
                for fault in progress.events
                if fault['event'] in ('fault', 'machine')
            )
        }
        for key, (state, value) in dict(self._answers).items():
            order = self._expected[key].order
            if state == states.SUCCESS:
                is_right = value == self._expected[key].number
            elif state == states.REVOKED and order.is_cancelled:
                is_right = key not in progress.ended or key in interrupted
            else:
                is_right = key in excused
            if not is_right:
                verdict.remains.append(f'task {key} has the wrong result {state} {value!r:.100}')
        return verdict

    def _note(self, order: Order, keys: Sequence[str]) -> None:
        self._regions.ledger.note(
            'accepted',
            order=keys[0],
            kind=order.kind,
            keys=list(keys),
            to=list(order.to),
            tries=1,
            early=order.kind == 'early',
            results=True,
        )

    def _wait(self, home: RegionSite) -> None:
        waiting = self._waiting[home.name]
        while not self._end.is_set():
            if not waiting:
                self._end.wait(_TURN / 10)
                continue
            key = waiting.popleft()
            result = home.app.AsyncResult(key)
            try:
                value = result.get(timeout=_TURN, propagate=False)
                self._answer(key, result.state, value)
            except (ResultMissing, CouchDBError):
                waiting.append(key)

    def _answer(self, key: str, state: str, value: Any) -> None:
        order = self._expected[key].order
        if order.is_cancelled and state == states.SUCCESS:
            self._note(order, [key])
        elif order.is_cancelled:
            self._regions.ledger.note('revoked', keys=[key])
        self._answers[key] = (state, value)

    def __enter__(self) -> Results:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
