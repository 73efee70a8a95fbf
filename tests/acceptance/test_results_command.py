"""The commands `celery couchdb results`, with results of real workers."""

from __future__ import annotations

import pytest

from celery_couchdb.stored_results import NotSent, StoredResults
from tests.conftest import PATIENCE
from tests.support import items

from .conftest import Site, couchdb, listed, sentence, succeeded


def failed(site: Site, *names: str, task: str = 'fragile', **options: object) -> list[str]:
    """Let one task after the other fail; return their ids."""
    ids = []
    for name in names:
        result = site.send(task, str(site.journal), name, **options)
        with pytest.raises(ValueError, match=name):
            result.get(timeout=PATIENCE)
        ids.append(result.id)
    return ids


def test_failed_tasks_are_listed_and_sent_again(site: Site) -> None:
    worker = site.worker('-Q', 'celery,mail', result_extended=True)
    first, second = failed(site, 'first', 'second')
    [third] = failed(site, 'third', queue='mail', kwargs={'prefix': 'the '})
    found = listed(site, 'results', 'list')
    assert [(each['id'], each['error']) for each in found] == [
        (third, 'ValueError: third may not pass'),
        (second, 'ValueError: second may not pass'),
        (first, 'ValueError: first may not pass'),
    ]
    assert found[1]['args'] == [str(site.journal), 'second']
    assert [(each['task'], each['state'], each['queue']) for each in found[:2]] == [
        ('fragile', 'FAILURE', 'mail'),
        ('fragile', 'FAILURE', 'celery'),
    ]
    assert 'raise ValueError' in found[1]['traceback']
    selected = listed(site, 'results', 'list', '--task', 'fragile', '--limit', '1', '--since', '1h')
    assert [each['id'] for each in selected] == [third]
    assert succeeded(couchdb(site, 'results', 'list', '--since', '2100-01-01T12:30')) == (
        'There are no results in the state FAILURE.\n'
    )
    table = couchdb(site, 'results', 'list', '--limit', '2', COLUMNS='120')
    assert 'ValueError: second may not pass' in table.stdout
    assert table.stderr == 'These are the first 2; there are more (--limit).\n'

    assert couchdb(site, 'results', 'retry', first).exit_code == 1, 'it was not confirmed'
    site.journal.with_name('may pass').touch()
    assert succeeded(couchdb(site, 'results', 'retry', first, '--yes')) == '1 sent again.\n'
    assert site.app.AsyncResult(first).get(timeout=PATIENCE) == 'first'
    assert succeeded(couchdb(site, 'results', 'retry', '--all', '--yes')) == '2 sent again.\n'
    for task_id, name in ((second, 'second'), (third, 'third')):
        assert site.app.AsyncResult(task_id).get(timeout=PATIENCE) == name
    assert sorted(site.journalled()) == ['first', 'second', 'the third']
    assert succeeded(couchdb(site, 'results', 'retry', '--all', '--yes')) == '0 sent again.\n'
    done = couchdb(site, 'results', 'retry', first, '--yes')
    assert (done.exit_code, done.stderr) == (1, f'{first}: its state is SUCCESS: only failed tasks can be sent again\n')
    states = [each['result'] for each in listed(site, 'results', 'list', '--state', 'SUCCESS', '--since', '2026-01-01')]
    assert sorted(states) == ['first', 'second', 'third']

    site.journal.with_name('may pass').unlink()
    [fourth] = failed(site, 'fourth')
    assert worker.container.terminate() == 0
    results = StoredResults(site.app)
    failure = results.get(fourth)
    assert failure is not None
    results.retry(failure)
    assert site.app.AsyncResult(fourth).state == 'RETRY'
    with pytest.raises(NotSent, match='another process changed its result just now'):
        results.retry(failure)
    # As a process leaves it that is killed before it changes the state:
    waiting = results.client.get(failure.document['_id'])
    results.client.put({**failure.document, '_rev': waiting['_rev']})
    again = results.get(fourth)
    assert again is not None
    results.retry(again)
    assert len(items(site.client)) == 1


def test_arguments_must_be_stored(site: Site) -> None:
    site.app.backend.store_result('failed', ValueError('once'), 'FAILURE')
    succeeded(couchdb(site, 'setup'))
    done = couchdb(site, 'results', 'retry', '--all', '--yes')
    assert (done.exit_code, done.stdout) == (1, '0 sent again.\n')
    assert done.stderr.startswith('failed: its arguments are not stored: set result_extended = True')
    assert listed(site, 'results', 'list')[0]['args'] is None


def test_mistakes_get_a_sentence(site: Site) -> None:
    site.set_up()
    assert sentence(couchdb(site, 'results', 'retry', 'unknown')) == "Error: there is no result of a task 'unknown'"
    done = couchdb(site, 'results', 'list', '--since', 'yesterday')
    assert done.exit_code == 2
    assert "'yesterday' is neither a duration (90s, 30m, 2h, 1d) nor a date (2026-11-22)." in done.stderr
