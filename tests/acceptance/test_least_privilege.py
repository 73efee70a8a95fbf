"""Members of databases that are set up have all rights that workers, publishers and monitors need.

The tests are those of other files, run as such a user.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Site
from .test_canvas import test_canvas
from .test_dead_letters import (
    test_refused_tasks_are_listed_shown_replayed_and_dropped,
    test_task_that_kills_its_worker_becomes_a_dead_letter,
)
from .test_events import test_events
from .test_jobs import (
    test_jobs_are_listed_and_shown,
    test_running_job_is_terminated_on_request,
)
from .test_paused_queues import test_patterns_and_all, test_purge_and_delete
from .test_remote_control import test_control, test_inspect, test_revoke
from .test_results_command import test_failed_tasks_are_sent_again
from .test_unique import test_job_sent_while_it_runs

__all__ = [
    'test_canvas',
    'test_control',
    'test_events',
    'test_failed_tasks_are_sent_again',
    'test_inspect',
    'test_job_sent_while_it_runs',
    'test_jobs_are_listed_and_shown',
    'test_patterns_and_all',
    'test_purge_and_delete',
    'test_refused_tasks_are_listed_shown_replayed_and_dropped',
    'test_revoke',
    'test_running_job_is_terminated_on_request',
    'test_task_that_kills_its_worker_becomes_a_dead_letter',
]


@pytest.fixture
def site(site: Site, member: dict[str, str]) -> Iterator[Site]:
    """A site without workers, used as a member. Only `site.client` is an administrator."""
    site.set_up(member['user'])
    site.use_as(**member)
    yield site
    for worker in site.workers:
        assert 'refused user' not in worker.logs()
        assert member['password'] not in worker.logs()
