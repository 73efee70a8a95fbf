"""Jobs after their end, and retries, with real workers: what is kept and shown."""

from __future__ import annotations

import pytest

from celery_couchdb.jobs import Jobs
from tests.acceptance.conftest import Site, couchdb, listed, sentence, succeeded
from tests.conftest import PATIENCE, wait_for
from tests.support import items


def test_completed_tasks_are_kept_and_listed(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    worker = site.worker(pool='prefork')
    result, other = site.send('kept', 42), site.send('add', 1, 2)
    asked, failed = site.send('add', 3, 4, keep_done=600), site.send('fail', 'oh', keep_done=600)
    assert [one.get(timeout=PATIENCE) for one in (result, other, asked)] == [42, 3, 7]
    assert isinstance(failed.get(timeout=PATIENCE, propagate=False), ValueError)
    wait_for(lambda: [doc.get('status') for doc in items(site.client)] == ['fail'], 'the acknowledgements')
    found = {job['id']: job for job in listed(site, 'jobs', 'list', '--state', 'done')}
    assert {job['id']: job['result'] for job in found.values()} == {
        result.id: 'SUCCESS',
        asked.id: 'SUCCESS',
        failed.id: 'FAILURE',
    }
    assert [job['id'] for job in listed(site, 'jobs', 'list', '--state', 'dead')] == [failed.id]
    job = found[result.id]
    assert (job['task'], job['args'], job['worker'], job['state']) == ('kept', [42], worker.hostname(), 'done')
    assert job['published'] <= job['started'] <= job['finished']
    assert job['expires'] == job['finished'] + 3600
    selected = listed(site, 'jobs', 'list', '--state', 'done', '--args', '42', '--since', '1h')
    assert [job['id'] for job in selected] == [result.id]
    shown = succeeded(couchdb(site, 'show', result.id[:8]))
    assert f'worker     {worker.hostname()}' in shown
    assert 'finished' in shown
    table = succeeded(couchdb(site, 'jobs', 'list', '--state', 'done', COLUMNS='200')).splitlines()
    assert all(worker.hostname() in line for line in table[1:])
    assert ['done (FAILURE)' in line for line in table if 'done (' in line] == [failed.id in line for line in table[1:]]
    assert "Invalid value for '--since'" in couchdb(site, 'jobs', 'list', '--since', 'soon').stderr
    removal = couchdb(site, 'jobs', 'remove', '--yes', result.id)
    assert (removal.exit_code, removal.stderr.strip()) == (1, f'{result.id}: it is done: there is nothing to remove')
    site.use(site.environment['BROKER_URL'], f'{site.environment["RESULT_URL"]}_none')
    elsewhere = couchdb(site, 'jobs', 'list', '--state', 'done')
    assert elsewhere.exit_code == 0
    assert 'the states of the results are not shown: ' in caplog.text
    assert 'done (' not in elsewhere.stdout


def test_waiting_retry_carries_the_error_of_its_last_attempt(site: Site) -> None:
    site.worker(pool='prefork')
    result = site.send('retried', 'no customer of this name ' + 'x' * 2000, keep_done=600)
    [item] = wait_for(lambda: [doc for doc in items(site.client) if doc['date']], 'the retry')
    [first] = item['message']['headers']['tries']
    assert first.keys() == {'date', 'worker', 'type', 'text'}
    assert len(first['text']) == 500
    assert item['message']['properties']['keep_done'] == 600
    wait_for(lambda: len(items(site.client)) == 1, 'the acknowledgement of the first attempt')
    [job] = listed(site, 'jobs', 'list', '--state', 'scheduled')
    assert job['error'].startswith('ValueError: no customer')
    assert ': try 1 failed at ' in succeeded(couchdb(site, 'show', result.id))


def test_waiting_job_is_moved_and_edited_by_commands(site: Site) -> None:
    result = site.send('add', 1, 2, countdown=3600)
    succeeded(couchdb(site, 'jobs', 'edit', result.id[:8], '--new-args', '[3, 4]'))
    moved = couchdb(site, 'jobs', 'move', result.id, '--due', 'now', '--priority', '7')
    assert (moved.stdout, moved.stderr) == ('1 job moved.\n', 'Warning: no worker consumes celery.\n')
    assert 'priority   7' in succeeded(couchdb(site, 'jobs', 'show', result.id))
    assert (
        "'--new-args': it must be a list in JSON" in couchdb(site, 'jobs', 'edit', result.id, '--new-args', '{}').stderr
    )
    assert "'--due': it must be a date" in couchdb(site, 'jobs', 'move', result.id, '--due', 'soon').stderr
    assert "there is no queue 'typo'" in sentence(couchdb(site, 'jobs', 'move', result.id, '--to', 'typo'))
    site.worker()
    assert result.get(timeout=PATIENCE) == 7
    wait_for(lambda: not items(site.client), 'the acknowledgement')
    assert 'is not in a queue' in couchdb(site, 'jobs', 'move', result.id, '--priority', '1').stderr


def test_task_asks_whether_its_lease_holds(site: Site) -> None:
    site.worker(pool='prefork', concurrency=1)
    result, jobs = site.send('holder', str(site.journal)), Jobs(site.app)
    wait_for(lambda: site.journalled() == ['held True'], 'the task to start')
    jobs.remove(result.id)
    site.go_on()
    wait_for(lambda: site.journalled() == ['held True', 'held False'], 'the task to end')
    wait_for(lambda: not items(site.client), 'the deletion')
    jobs.client.close()
