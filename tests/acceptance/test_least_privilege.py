"""Members of databases that are set up have all rights that workers, publishers, monitors and commands need.

Most of the tests are those of other files, run as such a user.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import chain, group

from tests.conftest import PATIENCE

from .conftest import Site
from .test_events import test_events
from .test_failures import (
    test_failed_tasks_are_listed_and_retried,
    test_refused_tasks_are_listed_shown_retried_and_dropped,
    test_task_that_kills_its_worker_becomes_a_dead_letter,
)
from .test_jobs import test_running_jobs_are_terminated_on_request
from .test_paused_queues import test_purge_and_delete, test_running_tasks_finish_and_others_wait
from .test_remote_control import test_inspect_and_control
from .test_unique import test_job_sent_while_it_runs_and_its_retries_are_one_job

__all__ = [
    'test_events',
    'test_failed_tasks_are_listed_and_retried',
    'test_inspect_and_control',
    'test_job_sent_while_it_runs_and_its_retries_are_one_job',
    'test_purge_and_delete',
    'test_refused_tasks_are_listed_shown_retried_and_dropped',
    'test_running_jobs_are_terminated_on_request',
    'test_running_tasks_finish_and_others_wait',
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


def test_canvas(site: Site) -> None:
    site.worker()
    add, total = site.app.signature('add', (1,)), site.app.signature('total')
    result = chain(add.clone((1,)), group([add] * 30, app=site.app), total, app=site.app).delay()
    assert result.get(timeout=PATIENCE) == 90
