"""The commands `celery couchdb results`, with results of real workers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from celery_couchdb.stored_results import NotSent, StoredResults
from tests.conftest import PATIENCE
from tests.support import items

from .conftest import Site
from .test_command import couchdb, sentence, succeeded
from .test_paused_queues import end_worker


def listed(site: Site, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in succeeded(couchdb(site, 'results', 'list', '--json', *arguments)).splitlines()]


def failed(site: Site, *names: str, task: str = 'fragile', **options: Any) -> list[str]:
    """Let one task after the other fail; return their ids."""
    ids = []
    for name in names:
        result = site.send(task, str(site.journal), name, **options)
        with pytest.raises(ValueError, match=name):
            result.get(timeout=PATIENCE)
        ids.append(result.id)
    return ids


def test_failed_tasks_are_listed_with_their_errors(site: Site) -> None:
    site.worker(result_extended=True)
    ids = failed(site, 'first', 'second')
    with pytest.raises(ValueError, match='third'):
        site.send('fail', 'third').get(timeout=PATIENCE)
    assert site.send('add', 1, 2).get(timeout=PATIENCE) == 3
    found = listed(site)
    assert [each['error'] for each in found] == [
        'ValueError: third',
        'ValueError: second may not pass',
        'ValueError: first may not pass',
    ]
    assert [each['id'] for each in found[:0:-1]] == ids
    assert found[1]['args'] == [str(site.journal), 'second']
    assert (found[1]['task'], found[1]['state'], found[1]['queue']) == ('fragile', 'FAILURE', 'celery')
    assert 'raise ValueError' in found[1]['traceback']
    assert [each['id'] for each in listed(site, '--task', 'fragile', '--limit', '1', '--since', '1h')] == ids[1:]
    assert [each['result'] for each in listed(site, '--state', 'SUCCESS', '--since', '2026-01-01')] == [3]
    assert succeeded(couchdb(site, 'results', 'list', '--since', '2100-01-01T12:30')) == (
        'There are no results in the state FAILURE.\n'
    )
    table = couchdb(site, 'results', 'list', '--limit', '2', COLUMNS='120')
    assert 'ValueError: second may not pass' in table.stdout
    assert table.stderr == 'These are the first 2; there are more (--limit).\n'


def test_failed_tasks_are_sent_again(site: Site) -> None:
    site.worker('-Q', 'celery,mail', result_extended=True)
    first, second = failed(site, 'first', 'second')
    [third] = failed(site, 'third', queue='mail', kwargs={'prefix': 'the '})
    assert couchdb(site, 'results', 'retry', first).returncode == 1, 'it was not confirmed'
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'results', 'retry', first, '--yes')) == '1 sent again.\n'
    assert site.app.AsyncResult(first).get(timeout=PATIENCE) == 'first'
    assert succeeded(couchdb(site, 'results', 'retry', '--all', '--yes')) == '2 sent again.\n'
    for task_id, name in ((second, 'second'), (third, 'third')):
        assert site.app.AsyncResult(task_id).get(timeout=PATIENCE) == name
    assert sorted(site.journalled()) == ['first', 'second', 'the third']
    assert succeeded(couchdb(site, 'results', 'retry', '--all', '--yes')) == '0 sent again.\n'
    done = couchdb(site, 'results', 'retry', first, '--yes')
    assert (done.returncode, done.stderr) == (
        1,
        f'{first}: its state is SUCCESS: only failed tasks can be sent again\n',
    )


def test_failure_is_sent_once_and_waits_with_the_state_retry(site: Site) -> None:
    worker = site.worker(result_extended=True)
    [task_id] = failed(site, 'first')
    end_worker(worker)
    results = StoredResults(site.app)
    found = results.get(task_id)
    assert found is not None
    results.retry(found)
    assert site.app.AsyncResult(task_id).state == 'RETRY'
    assert [item['queue'] for item in items(site.client)] == ['celery']
    with pytest.raises(NotSent, match='another process changed its result just now'):
        results.retry(found)
    # As a process leaves it that is killed before it changes the state:
    waiting = results.client.get(found.document['_id'])
    results.client.put({**found.document, '_rev': waiting['_rev']})
    again = results.get(task_id)
    assert again is not None
    results.retry(again)
    assert len(items(site.client)) == 1


def test_arguments_must_be_stored(site: Site) -> None:
    site.worker()
    [task_id] = failed(site, 'first')
    done = couchdb(site, 'results', 'retry', '--all', '--yes')
    assert (done.returncode, done.stdout) == (1, '0 sent again.\n')
    assert done.stderr.startswith(f'{task_id}: its arguments are not stored: set result_extended = True')
    assert listed(site)[0]['args'] is None


def test_mistakes_get_a_sentence(site: Site) -> None:
    site.set_up()
    assert sentence(couchdb(site, 'results', 'retry', 'unknown')) == "Error: there is no result of a task 'unknown'"
    for arguments in ((), ('id', '--all'), ('id', '--task', 'fragile')):
        done = couchdb(site, 'results', 'retry', *arguments)
        assert done.returncode == 2
        assert 'Name tasks by id, or give --all' in done.stderr
    done = couchdb(site, 'results', 'list', '--since', 'yesterday')
    assert done.returncode == 2
    assert "'yesterday' is neither a duration (90s, 30m, 2h, 1d) nor a date (2026-11-22)." in done.stderr
