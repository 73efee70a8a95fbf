"""The end of a chord belongs to a task: its body is sent, and its errbacks run, as the end of its last part."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError
from pytest_celery import CeleryTestWorker

from tests.conftest import PATIENCE, wait_for
from tests.worker_process import WorkerProcess

from .conftest import Site

APP = {'app.py': b'from tests.acceptance.tenants import app'}


def start(site: Site, pool: str = 'prefork', **settings: Any) -> CeleryTestWorker:
    """Start a worker whose tasks belong to tenants."""
    environment = {**site.environment, 'JOURNAL': str(site.journal), 'SETTINGS': json.dumps(settings)}
    worker = site.run(WorkerProcess.command('--pool', pool, '--concurrency', '2'), environment, APP)
    worker.ready()
    return worker


def parts(site: Site, count: int, *others: Any) -> list[Any]:
    """Return the header of a chord of the tenant *acme*: the others are the last of its `count` parts."""
    header = [site.app.signature('whose') for _ in range(count - len(others))] + list(others)
    for part in header:
        part.set(headers={'tenant': 'acme'})
    return header


def error_of(site: Site, task_id: str) -> str:
    """Wait until a chord has failed, and return the text of the error of its part."""
    with pytest.raises(ChordError, match='Dependency') as caught:
        site.app.AsyncResult(task_id).get(timeout=PATIENCE)
    return str(caught.value).partition("ValueError('")[2].partition("'")[0]


@pytest.mark.parametrize('pool', ['prefork', 'solo', 'threads'])
def test_what_follows_belongs_to_the_tenant_of_the_parts(site: Site, pool: str) -> None:
    """A task waits until its part is counted if it is the first for a while; the last of 12 tasks does not."""
    start(site, pool)
    whose = site.app.signature('whose')
    sent = [chord(parts(site, count), app=site.app)(whose.clone()) for count in (2, 12, 1, 12)]
    sent.append(chain(group(parts(site, 2), app=site.app), whose.clone(), whose.clone(), app=site.app).delay())
    nested = chain(group(parts(site, 2), app=site.app), group([whose] * 2, app=site.app), whose.clone(), app=site.app)
    sent.append(nested.delay())
    assert [result.get(timeout=PATIENCE) for result in sent] == [['acme', 'acme']] * len(sent)


def test_errback_runs_where_tasks_run(site: Site) -> None:
    start(site)
    for number, count in enumerate((2, 12), 1):
        body = site.app.signature('whose').on_error(site.app.signature('clean_up'))
        failing = site.app.signature('fail', ('no',))
        result = chord(parts(site, count, failing), app=site.app)(body)
        assert error_of(site, result.id) == 'no'
        assert site.journalled() == ['failed for acme'] * number


def test_slow_errback_keeps_no_other_chord_from_its_end(site: Site) -> None:
    start(site)
    body = site.app.signature('whose').on_error(site.app.signature('slow_clean_up'))
    failing = site.app.signature('fail', ('no',))
    slow = chord(parts(site, 12, failing), app=site.app)(body)
    wait_for(site.journalled, 'the errback to begin')
    assert chord(parts(site, 12), app=site.app)(site.app.signature('whose')).get(timeout=PATIENCE) == ['acme', 'acme']
    assert site.journalled() == ['slow']
    site.go_on()
    assert error_of(site, slow.id) == 'no'


def test_time_limit_ends_an_errback(site: Site) -> None:
    worker = start(site, task_soft_time_limit=1)
    body = site.app.signature('whose').on_error(site.app.signature('slow_clean_up'))
    failing = [site.app.signature('fail', ('no',)) for _ in range(12)]
    result = chord(parts(site, 12, *failing), app=site.app)(body)
    assert error_of(site, result.id) == 'no'
    assert site.journalled() == ['slow']
    assert 'SoftTimeLimitExceeded' in worker.logs()
