"""An ordinary member of databases that were set up may do all that workers, publishers and monitors do.

These are the tests of the other files, run by such a user, who is refused nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Site
from .test_canvas import test_canvas
from .test_dead_letters import (
    test_refused_tasks_are_listed_shown_replayed_and_dropped,
    test_task_that_kills_its_worker_stops_doing_so,
)
from .test_events import test_events
from .test_jobs import (
    test_jobs_are_listed_and_shown,
    test_running_job_is_halted_if_that_is_asked_for,
    test_state_is_awaited,
)
from .test_remote_control import test_control, test_inspect, test_revoke
from .test_tasks import test_tasks
from .test_unique import test_many_publishers_and_workers, test_sent_while_it_runs

__all__ = [
    'test_canvas',
    'test_control',
    'test_events',
    'test_inspect',
    'test_jobs_are_listed_and_shown',
    'test_many_publishers_and_workers',
    'test_refused_tasks_are_listed_shown_replayed_and_dropped',
    'test_revoke',
    'test_running_job_is_halted_if_that_is_asked_for',
    'test_sent_while_it_runs',
    'test_state_is_awaited',
    'test_task_that_kills_its_worker_stops_doing_so',
    'test_tasks',
]


@pytest.fixture
def site(site: Site, member: dict[str, str]) -> Iterator[Site]:
    """A site without workers, of a member; only `site.client` is an administrator's."""
    site.set_up(member['user'])
    site.use_as(**member)
    yield site
    for worker in site.workers:
        assert 'refused user' not in worker.logs()
        assert member['password'] not in worker.logs()
