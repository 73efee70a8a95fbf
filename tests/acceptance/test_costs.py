"""What tasks and workers cost a managed service, in units of each kind: the figures of `celery_couchdb.plans`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord, group

from celery_couchdb import plans
from celery_couchdb.plans import Units
from celery_couchdb.testing import Server
from examples.managed.service import PLANS, Service
from kombu_couchdb.couchdb.pacing import RequestKind
from tests.conftest import PATIENCE, wait_for

from .conftest import Site

pytestmark = pytest.mark.slow

#: How many tasks are sent, and for how many seconds workers without tasks are watched: a minute, as in `plans`.
TASKS, WATCHED = 20, 60.0

#: For how long nothing may be counted until all work has ended, and workers have settled after their start, in seconds.
QUIET, SETTLING = 2.0, 12.0


@pytest.fixture
def service(server: Server, apache_couchdb: bool) -> Iterator[Service]:
    """A service that limits queries: workers send fewer of them then."""
    if not apache_couchdb:
        pytest.skip('the figures are those of Apache CouchDB')
    with Service(server.url, {RequestKind.QUERY: PLANS['lite'][RequestKind.QUERY]}) as service:
        yield service


@pytest.fixture
def site(service: Service, server: Server, database: str, tmp_path: Path) -> Iterator[Site]:
    """A site whose requests are counted."""
    with server.fresh_database() as results:
        site = Site(Server(service.url), database, results, tmp_path)
        yield site
        site.close()


class Meter:
    """Counts units."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def units(self) -> Units:
        """Return what was counted so far."""
        counted = self._service.snapshot()['units']
        return Units(*(counted.get(kind, 0) for kind in ('read', 'write', 'query')))

    def settle(self) -> None:
        """Wait until all work has ended, and what workers ask when they start."""
        last, since = self.units(), time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            if (now := self.units()) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since > QUIET

        wait_for(is_quiet, 'the end of all work')

    def of(self, work: Callable[[], object]) -> Units:
        """Return what some work costs."""
        self.settle()
        self._service.restart_counts()
        work()
        self.settle()
        return self.units()

    def during(self, seconds: float, work: Callable[[], object] = lambda: None) -> Units:
        """Return what some work and the next seconds cost, after all have settled."""
        time.sleep(SETTLING)
        self._service.restart_counts()
        work()
        time.sleep(seconds)
        return self.units()


@pytest.fixture
def meter(service: Service) -> Meter:
    return Meter(service)


def check(found: Units, expected: Units) -> None:
    """Check that writes are as many as expected, and reads and queries about as many or fewer."""
    assert found.writes == pytest.approx(expected.writes, rel=0.1, abs=0.2)
    assert found.reads <= expected.reads * 1.2 + 0.3
    assert found.queries <= expected.queries * 1.2 + 0.3


def each(units: Units, count: int) -> Units:
    return units.times(1 / count)


def one_by_one(site: Site, name: str, *args: Any, **options: Any) -> Callable[[], object]:
    """Return a function that sends tasks and waits for each."""
    return lambda: [site.send(name, *args, **options).get(timeout=PATIENCE) for _ in range(TASKS)]


@pytest.mark.parametrize('workers', [1, 2])
def test_a_task_with_its_result(site: Site, meter: Meter, workers: int) -> None:
    for _ in range(workers):
        site.worker()
    check(each(meter.of(one_by_one(site, 'add', 1, 2)), TASKS), plans.TASK.plus(plans.RESULT))


def test_a_task_of_a_group(site: Site, meter: Meter) -> None:
    site.worker()
    tasks = group(site.app.signature('add', (number, number)) for number in range(5 * TASKS))
    found = meter.of(lambda: tasks.apply_async().get(timeout=PATIENCE))
    check(each(found, 5 * TASKS), plans.TASK.plus(plans.RESULT))


def test_a_task_without_result(site: Site, meter: Meter) -> None:
    site.worker()

    def work() -> None:
        for _ in range(TASKS):
            site.send('add', 1, 2, ignore_result=True)

    check(each(meter.of(work), TASKS), plans.TASK)


@pytest.mark.parametrize('late', [False, True])
def test_a_task_that_fails(site: Site, meter: Meter, late: bool) -> None:
    """Its message is kept in the write that would have deleted it, or in one more if it was acknowledged early."""
    site.worker(task_acks_late=late)
    found = meter.of(lambda: [site.send('fail', 'no').get(timeout=PATIENCE, propagate=False) for _ in range(TASKS)])
    check(each(found, TASKS), plans.TASK.plus(plans.RESULT).plus(Units(0, 0 if late else 1, 0)))


def test_a_member_of_a_chord(site: Site, meter: Meter) -> None:
    site.worker()
    tasks = [site.app.signature('add', (number, number)) for number in range(5 * TASKS)]
    found = meter.of(lambda: chord(tasks, site.app.signature('total')).apply_async().get(timeout=PATIENCE))
    check(each(found, 5 * TASKS), plans.CHORD_MEMBER)


def test_a_retry(site: Site, meter: Meter) -> None:
    site.worker()
    found = each(meter.of(one_by_one(site, 'flaky', 1, 0.2)), TASKS)
    check(found, plans.TASK.plus(plans.RESULT).plus(plans.RETRY))


def test_the_state_started(site: Site, meter: Meter) -> None:
    site.worker(task_track_started=True)
    found = each(meter.of(one_by_one(site, 'add', 1, 2)), TASKS)
    # The state of a task that ends at once is not written.
    most = plans.TASK.plus(plans.RESULT).plus(plans.STARTED)
    assert plans.TASK.plus(plans.RESULT).writes - 0.1 <= found.writes <= most.writes + 0.1


def test_events_that_a_monitor_receives(site: Site, meter: Meter) -> None:
    site.worker('-E')
    with site.app.connection() as connection:
        receiver = site.app.events.Receiver(connection, handlers={'*': lambda event: None})
        ended = threading.Event()

        def receive() -> None:
            for _ in receiver.itercapture(limit=None, timeout=None, wakeup=False):
                if ended.is_set():
                    return

        monitor = threading.Thread(target=receive)
        monitor.start()
        try:
            idle = meter.during(WATCHED)
            began = time.monotonic()
            working = meter.during(SETTLING, one_by_one(site, 'add', 1, 2))
            minutes = (time.monotonic() - began - SETTLING) / 60
        finally:
            ended.set()
            monitor.join(PATIENCE)
    check(idle, plans.WORKER_EVENTS.plus(plans.WORKER))
    found = each(working.plus(idle.times(-minutes)), TASKS)
    # Events of tasks that run at the same time share messages.
    most = plans.TASK.plus(plans.RESULT).plus(plans.TASK_EVENTS)
    assert plans.TASK.writes + plans.RESULT.writes + 1 < found.writes <= most.writes + 0.5
    check(found._replace(writes=most.writes), most)


@pytest.mark.parametrize('workers', [1, 4])
def test_workers_without_tasks(site: Site, meter: Meter, workers: int) -> None:
    for started in [site.start() for _ in range(workers)]:
        started.ready()
    found = each(meter.during(WATCHED), workers)
    assert all(units <= most * 1.2 + 1 for units, most in zip(found, plans.WORKER, strict=True)), found
