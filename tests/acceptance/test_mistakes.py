"""Mistakes in settings or rights end a real worker with one sentence. An outage does not end a worker."""

from __future__ import annotations

import importlib.util
from typing import Any
from urllib.parse import quote

import pytest

from celery_couchdb.testing import Server
from tests.conftest import PATIENCE, wait_for

from .conftest import Site, celery

SECRET = 'tell-nobody'

#: CouchDB calls this function for each write. It allows only those of administrators.
READ_ONLY = {
    '_id': '_design/read-only',
    'validate_doc_update': """function (newDoc, oldDoc, userCtx) {
    if (userCtx.roles.indexOf('_admin') < 0) { throw({forbidden: 'these results are read-only'}); }
}""",
}


def ends(site: Site, sentence: str, **how: Any) -> list[str]:
    """Start a worker, check that it ends with one line that contains the sentence, and return its log."""
    worker = site.start(**how)
    assert worker.container.wait(PATIENCE) == 1
    lines = worker.logs().splitlines()
    assert len([line for line in lines if sentence in line]) == 1
    assert not [line for line in lines if 'Traceback' in line or SECRET in line or ' ready.' in line]
    return lines


@pytest.mark.parametrize(
    ('variable', 'url', 'sentence'),
    [
        (
            'BROKER_URL',
            f'couchdb://me:{SECRET}/x@localhost/db',
            'broker_url: the URL cannot be read; write couchdb://user:password@host:port/db',
        ),
        ('RESULT_URL', f'http://me:{SECRET}@localhost/db', 'result_backend: write couchdb:// instead of http://'),
    ],
)
def test_wrong_url_ends_a_worker_with_one_sentence(site: Site, variable: str, url: str, sentence: str) -> None:
    """`tests/hostile/test_urls.py` has the other mistakes."""
    site.environment[variable] = url
    ends(site, sentence)


def test_wrong_option_ends_a_worker_with_one_sentence(site: Site) -> None:
    ends(site, "unknown transport option 'request_timeuot'", broker_transport_options={'request_timeuot': 5})


def test_other_celery_programs_also_print_one_sentence(site: Site) -> None:
    url = f'couchdb://me:{SECRET}/x@localhost/db'
    done = celery('beat', **{**site.environment, 'BROKER_URL': url})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith('Error: broker_url: the URL cannot be read; ')
    assert 'Traceback' not in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_worker_without_a_user_says_so(site: Site, server: Server, apache_couchdb: bool) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server has no rights')
    site.set_up()
    site.use_as('')
    ends(site, 'no user in the URL')


def test_worker_whose_results_are_refused_does_not_start(site: Site, member: dict[str, str]) -> None:
    site.set_up(member['user'])
    site.server.client(site.results).put(READ_ONLY)
    site.use_as(**member)
    ends(
        site,
        f"results cannot be stored: {site.server.client(site.results).address.url} refused user '{member['user']}': "
        f'these results are read-only; check the user, password and rights',
        pool='prefork',
    )


def test_revoked_rights_are_one_log_line_for_each_result(site: Site, member: dict[str, str]) -> None:
    site.set_up(member['user'])
    site.use_as(**member)
    worker = site.worker(pool='prefork')
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    site.server.client(site.results).put(READ_ONLY)
    for task_id in [site.send('add', 1, number).id for number in range(3)]:
        said = f'the result of add[{task_id}] (SUCCESS) is lost: '
        wait_for(lambda said=said: said in worker.logs(), said)  # type: ignore[misc]
    assert 'Traceback' not in worker.logs()
    worker = site.worker(task_ignore_result=True)
    assert 'read-only' not in worker.logs()


def test_gevent_worker_that_loses_its_rights_logs_sentences(site: Site, member: dict[str, str]) -> None:
    if importlib.util.find_spec('gevent') is None:
        pytest.skip('gevent is not installed')
    site.set_up(member['user'])
    site.use_as(**member)
    worker = site.worker(pool='gevent')
    wait_for(lambda: 'pidbox: Connected' in worker.logs(), 'the connection of remote control')
    site.client.request('PUT', '/_security', body={'members': {'names': ['nobody']}})
    wait_for(lambda: 'remote control of this worker has ended: http' in worker.logs(), 'the sentence')
    assert 'Traceback' not in worker.logs()


def test_worker_starts_during_an_outage_of_the_results(site: Site) -> None:
    site.use(site.environment['BROKER_URL'], f'couchdb://me:{quote(SECRET)}@127.0.0.1:1/results')
    worker = site.worker()
    assert 'results cannot be stored just now: http://127.0.0.1:1/results: ' in worker.logs()
