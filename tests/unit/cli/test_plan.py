"""`celery -A app couchdb plan`, which sends no request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_couchdb import plans
from celery_couchdb.plans import LITE, STANDARD, Units, Workload, capacity, suffices
from examples.managed.service import PLANS
from tests.support import command_of

BROKER, RESULTS = 'couchdb://localhost:1/broker', 'couchdb://localhost:1/results'


@pytest.fixture
def plan() -> Callable[..., dict[str, Any]]:
    """A function that returns what the command prints as JSON, for an app with some settings."""

    def run(*given: str, backend: str | None = RESULTS, **settings: Any) -> dict[str, Any]:
        app = Celery(set_as_current=False, broker=BROKER, backend=backend)
        app.conf.update(settings)
        done = command_of(app)('plan', *given, '--json')
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_a_task_with_a_result_is_four_writes(plan: Callable[..., dict[str, Any]]) -> None:
    found = plan('--tasks-per-second', '100')
    assert found['total']['writes'] == pytest.approx(400, abs=1)
    assert not found['lite']
    assert found['standard_units'] >= 10
    assert plan('--tasks-per-second', '1')['lite']


def test_what_options_leave_open_is_as_in_the_settings(plan: Callable[..., dict[str, Any]]) -> None:
    def parts(*given: str, **settings: Any) -> set[str]:
        return {*plan('--tasks-per-second', '5', *given, **settings)['parts']} - {'tasks', 'idle workers'}

    assert parts() == {'results'}
    assert parts('--no-results') == set()
    assert parts(task_ignore_result=True) == set()
    assert parts(backend=None) == set()
    assert parts('--results', backend=None) == {'results'}
    assert parts('--events') == {'results', 'events'}
    assert parts(worker_send_task_events=True) == {'results', 'events'}
    assert parts('--no-events', worker_send_task_events=True) == {'results'}
    assert parts(task_track_started=True) == {'results', 'state STARTED'}
    assert parts(broker_transport_options={'keep_done': 60}) == {'results', 'completed jobs'}


def test_the_table_says_what_decides_and_what_to_set() -> None:
    app = Celery(set_as_current=False, broker=BROKER, backend=RESULTS)
    lines = command_of(app)('plan', '--tasks-per-second', '20', '--workers', '2', '--events').stdout.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ['units', 'tasks', 'results', 'events', 'idle']
    assert any(line.startswith('The plan Standard with ') and 'Lite does not' in line for line in lines)
    assert 'The writes decide, and most of them are for: events.' in lines
    [events, results] = [line for line in lines if line.startswith('- ')]
    assert events.startswith('- Start workers without -E')
    assert results.startswith('- Set task_ignore_result=True')
    assert results.endswith('saves 20.0 reads, 20.0 writes a second.')


def test_no_tasks_fit_into_the_smallest_plan() -> None:
    app = Celery(set_as_current=False, broker=BROKER, backend=RESULTS)
    lines = command_of(app)('plan', '--tasks-per-second', '0').stdout.splitlines()
    assert any(line.startswith('The plan Lite suffices.') for line in lines)


@pytest.mark.parametrize('tasks', ['nan', 'inf', '-inf', '1e308', '-1'])
def test_a_number_of_tasks_that_no_service_has_is_refused(tasks: str) -> None:
    done = command_of(Celery(set_as_current=False, broker=BROKER))('plan', '--tasks-per-second', tasks)
    assert done.exit_code == 2
    assert 'it must be a number from 0 to 1,000,000,000' in done.stderr


def test_the_broker_may_be_another_one() -> None:
    app = Celery(set_as_current=False, broker='memory://', backend=RESULTS)
    assert command_of(app)('plan', '--tasks-per-second', '1').exit_code == 0


def test_part_of_the_limits_is_left() -> None:
    assert suffices(Units(16, 8, 4), LITE)
    assert not suffices(Units(16, 8.1, 4), LITE)
    assert [capacity(Units(0, writes, 0)) for writes in (0, 40, 41, 400)] == [1, 1, 2, 10]
    assert capacity(Units(0, 0, 9)) == 3
    assert Units(0, 1, 3).scarce() == 'queries'
    assert Units(15, 1, 3).scarce() == 'reads'
    assert Units(15, 9, 3).scarce() == 'queries'  # of Standard, because Lite has too few writes
    assert Workload(0, 1).total().writes < 1


def test_limits_are_those_of_the_fake() -> None:
    for plan, name in ((LITE, 'lite'), (STANDARD, 'standard')):
        assert {kind.value: limit for kind, limit in PLANS[name].items()} == {
            'read': plan.reads,
            'write': plan.writes,
            'query': plan.queries,
        }
    assert 0 < plans.USABLE < 1
