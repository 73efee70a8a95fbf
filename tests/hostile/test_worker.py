"""A real worker in a database with the worst documents that members can write: it runs tasks and stops cleanly."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.acceptance.conftest import Site, site
from tests.acceptance.test_unique import task_of
from tests.conftest import PATIENCE, wait_for

from .documents import BROKER, WORKITEM
from .worst import HARD_TO_STORE, LARGEST, broker_texts, deep, result_texts, store

__all__ = ['site']


@pytest.mark.slow
def test_worker_runs_tasks_despite_the_worst_documents(site: Site, apache_couchdb: bool) -> None:
    site.set_up()
    most = 5000 if apache_couchdb else 1500  # the embedded server accepts no deeper documents
    texts = broker_texts('celery', most)
    store(site.client, texts)
    store(site.server.client(site.results), result_texts(most))
    worker = site.worker('-l', 'INFO')
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    assert site.app.control.ping(timeout=PATIENCE, limit=1)
    # The same documents for an idle worker, which receives them through the changes feed.
    store(
        site.client,
        [
            text.replace('broker:broadcast:1', 'broker:broadcast:2')
            .replace('"fanout"', '"celery.pidbox"')
            .replace('broker:consumer:gone ', 'broker:consumer:new ')
            .replace(WORKITEM['_id'], WORKITEM['_id'] + '2')
            for text in texts
            if '"broker:broadcast' in text
            or '"broker:consumer:gone ' in text
            or (WORKITEM['_id'] in text and ' large"' not in text)
        ],
    )
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    assert site.app.control.ping(timeout=PATIENCE, limit=1)
    assert worker.container.terminate(PATIENCE) == 0
    log = worker.logs()
    assert 'was made a dead letter' in log
    # The worker had no error that it retries.
    assert not [
        line for line in log.splitlines() if re.search('Unrecoverable|thread failed|trying again|RecursionError', line)
    ]


def test_unique_job_replaces_a_malformed_document(site: Site) -> None:
    report = task_of(site)
    site.set_up()
    job = {**BROKER['unique'], 'queue': 'celery', 'status': 'fail', 'next': []}
    malformed: dict[str, dict[str, Any]] = {
        'late': {'published': 1e305},
        'deep': {'x': 'here'},
        'attached': {'_attachments': {'body': {'data': 'aGVsbG8='}}},
        'odd': {'next': [HARD_TO_STORE]},
        'often': {'attempts': int(LARGEST[0])},
    }
    for key, members in malformed.items():
        text = json.dumps({**job, **members, '_id': f'job:["celery","report","{key}"]', 'key': key})
        store(site.client, [text.replace('"here"', deep(1400))])
        assert report.apply_async((str(site.journal), key), job_key=key).outcome == 'enqueued'
    worker = site.worker()
    ran = sorted(f'{what} {key}' for key in malformed for what in ('start', 'end'))
    wait_for(lambda: sorted(site.journalled()) == ran, 'the jobs to run')
    assert worker.container.terminate(PATIENCE) == 0
