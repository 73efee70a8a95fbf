"""Unique jobs with real workers: at most one waits and one runs, and a job sent while it runs, runs once more."""

from __future__ import annotations

from typing import Any

from celery_couchdb.unique import UniqueTask
from tests.conftest import PATIENCE, wait_for
from tests.support import items

from .conftest import Site


def task_of(site: Site) -> Any:
    @site.app.task(name='report', base=UniqueTask, shared=False)
    def report(journal: str, name: str, seconds: float | None = 0.0, failures: int = 0) -> str:
        return name

    return report


def test_job_sent_while_it_runs_and_its_retries_are_one_job(site: Site) -> None:
    report = task_of(site)
    site.worker(concurrency=4)
    first = report.apply_async((str(site.journal), 'first', None), job_key='k')
    wait_for(lambda: site.journalled() == ['start first'], 'the first job to start')
    others = [report.apply_async((str(site.journal), f'other {number}', 0.2), job_key='k') for number in range(5)]
    assert [result.outcome for result in others] == ['again', 'moved', 'moved', 'moved', 'moved']
    site.go_on()
    assert {result.get(timeout=PATIENCE) for result in [first, *others]} == {'first', 'other 0'}
    wait_for(lambda: not items(site.client), 'the job to be completed')
    assert site.journalled() == ['start first', 'end first', 'start other 0', 'end other 0']
    result = report.apply_async((str(site.journal), 'flaky', 0, 2), job_key='k')
    assert result.get(timeout=PATIENCE) == 'flaky'
    assert site.journalled()[4:] == ['start flaky'] * 3 + ['end flaky']
    wait_for(lambda: not items(site.client), 'the job to be completed')
    assert report.apply_async((str(site.journal), 'anew'), job_key='k').outcome == 'enqueued'
