"""When the running tasks of a worker make its next heartbeat early (`kombu_couchdb.consumer.report`)."""

from __future__ import annotations

import math
from collections.abc import Collection
from types import SimpleNamespace

import pytest

from kombu_couchdb.consumer import report as module
from kombu_couchdb.consumer import worker_hooks
from kombu_couchdb.consumer.report import TaskReport
from kombu_couchdb.consumer.worker_hooks import RunningTask
from kombu_couchdb.couchdb.clock import ServerClock


class World:
    """A consumer of a worker that begins and ends tasks, and time. The clock of the server is 100 seconds ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sent = 1000.0, 1000.0
        self.tasks: list[RunningTask] = []
        self.is_worker = True
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + 5000)
        monkeypatch.setattr(module, 'time', clock)
        monkeypatch.setattr(worker_hooks, '_hooks', {'running': self.running})
        monkeypatch.setattr(worker_hooks, '_members', {})
        server = ServerClock()
        monkeypatch.setattr(server, 'now', lambda: self.now + 5100)
        self.report = TaskReport(server)

    def running(self, queues: Collection[str]) -> list[RunningTask] | None:
        return self.tasks if self.is_worker else None

    def begin(self, task_id: str) -> None:
        """Begin a task whose message was claimed just now."""
        self.tasks.append(RunningTask(task_id, 'shop.pay', 'q', self.now + 5000, True))
        self.report.expect()

    def end(self) -> None:
        """End all tasks; the worker acknowledges their messages."""
        self.tasks = []
        self.report.expect()

    def heartbeats(self, seconds: float) -> list[tuple[float, set[str]]]:
        """Let time pass; return the early heartbeats: after how many seconds, and the ids that they name."""
        began, written = self.now, list[tuple[float, set[str]]]()
        while (at := max(self.report.due_at(self.sent), self.now)) <= began + seconds:
            self.now = at
            if self.report.is_due(['q'], self.sent):
                running = self.report.members(['q']).get('running')
                written.append((round(at - began, 3), {task['id'] for task in running['tasks']} if running else set()))
                self.report.stored()
                self.sent = self.now
        self.now = began + seconds
        return written


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_task_is_reported_when_it_has_run_for_a_second_and_when_it_has_ended(world: World) -> None:
    world.sent -= 100
    world.begin('a')
    assert world.heartbeats(30) == [(1, {'a'})]
    world.end()
    assert world.heartbeats(30) == [(1, set())]
    assert world.report.due_at(world.sent) == math.inf  # nothing runs: the thread sleeps


def test_end_of_a_task_that_was_acknowledged_early_is_noticed(world: World) -> None:
    world.sent -= 100
    world.begin('a')
    assert world.heartbeats(2) == [(1, {'a'})]
    world.tasks = []
    assert world.heartbeats(30) == [(4, set())]


def test_program_that_is_no_worker_looks_for_no_tasks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_hooks, '_hooks', {})
    world.report.expect()
    assert world.report.due_at(world.sent) == math.inf


def test_short_tasks_cause_no_heartbeat(world: World) -> None:
    for number in range(100):
        world.begin(str(number))
        assert world.heartbeats(0.9) == []
        world.end()
    assert world.heartbeats(30) == []


def test_at_most_one_heartbeat_in_five_seconds(world: World) -> None:
    written = []
    for number in range(30):
        world.begin(str(number))
        written += world.heartbeats(2)
        world.end()
    assert 11 <= len(written) <= 12


def test_what_a_heartbeat_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(150):
        world.begin(str(number))
        world.now += 0.01
    world.tasks = [*world.tasks, RunningTask('x' * 1000, 'shop.pay', 'q', 0.0, False)]
    world.now += 2
    running = world.report.members(['q'])['running']
    assert running['queues'] == {'q': [151, 150]}
    assert [task['id'] for task in running['tasks']] == [str(number) for number in range(100)]
    assert running['tasks'][0] == {'id': '0', 'task': 'shop.pay', 'queue': 'q', 'since': 6100.0}
    monkeypatch.setattr(worker_hooks, '_members', {'more': lambda: 5, 'less': lambda: None})
    assert world.report.members(['q']).keys() == {'running', 'more'}
    assert world.report.last_members().keys() == {'more'}
    world.is_worker = False  # of this queue
    assert not world.report.members(['q'])
    assert not world.report.last_members()


def test_member_that_is_no_json_does_not_stop_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    worker_hooks.report_member('wrong', lambda: {'sum': math.inf})
    worker_hooks.report_member('right', lambda: {'sum': 1.0})
    assert world.report.members(['q']) == {'right': {'sum': 1.0}}
