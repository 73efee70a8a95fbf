"""Merging a message with a job key into the existing document (`kombu_couchdb.documents.unique_merge`)."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.documents import unique_merge, workitem
from kombu_couchdb.documents.types import WorkItem
from kombu_couchdb.documents.unique_merge import AGAIN, ENQUEUED, MOVED, Outcome
from kombu_couchdb.errors import ConfigurationError

NOW = 1_763_709_000.25


def job(
    task_id: str,
    *,
    key: Any = 'k',
    queue: str = 'q',
    task: str = 't',
    tag: str = '',
    eta: str | None = None,
    expiration: int | None = None,
    now: float = NOW,
) -> WorkItem:
    """Return a new item for a task with a job key."""
    properties = {'delivery_tag': tag or f'tag-{task_id}', **({'expiration': str(expiration)} if expiration else {})}
    headers = {
        'id': task_id,
        'task': task,
        'job_key': key,
        'eta': eta,
        'expires': f'{expiration} ms' if expiration else None,
    }
    message = {'body': task_id, 'headers': headers, 'properties': properties, 'content-type': 'text/plain'}
    return workitem.new('plain', queue, message, now)


def stored(doc: Any) -> Any:
    return {**doc, '_rev': '1-a'}


def running(doc: Any) -> Any:
    return {**workitem.claim(doc, 'me', NOW), '_rev': '2-a'}


def merge(found: Any, doc: WorkItem, now: float) -> tuple[list[Any], Outcome]:
    """Merge a new item into a stored document, which may be malformed."""
    return unique_merge.merge(found, doc, now)


def test_id_is_made_of_queue_task_and_key() -> None:
    ids = {
        job('a', queue=queue, task=task, key=key)['_id']
        for queue in 'xy'
        for task in 'xy'
        for key in ('x', 'y', 'x","y')
    }
    assert len(ids) == 12
    assert job('a')['_id'] == job('b', now=NOW + 5)['_id'] == 'job:["q","t","k"]'
    assert workitem.new('plain', 'q', {'body': '', 'headers': {'id': 'a'}, 'properties': {}}, NOW)['_id'] == 'plain'


@pytest.mark.parametrize('key', ['', 'x' * 501, 5, True, ['k'], {}, '\ud800'], ids=repr)
def test_invalid_key_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError, match='job_key must be text of 1 to 500 characters'):
        job('a', key=key)


def test_waiting_job_moves_later_with_its_expiry() -> None:
    found = stored(job('a', expiration=1000))
    later = job('b', eta='2025-11-21T08:00:00+00:00', expiration=9000)
    [moved], outcome = merge(found, later, NOW)
    assert outcome == Outcome(MOVED, 'a')
    assert (moved['_id'], moved['_rev'], moved['published']) == (found['_id'], '1-a', found['published'])
    assert (moved['date'], moved['expires']) == (later['date'], later['expires'])
    assert moved['message']['body'] == 'a'
    assert moved['message']['headers'] == {**later['message']['headers'], 'id': 'a'}


@pytest.mark.parametrize('behind', [False, True], ids=['alone', 'with another behind it'])
def test_expired_job_is_replaced_and_kept_for_a_worker_to_revoke(behind: bool) -> None:
    expired = stored(job('a', expiration=1000))
    if behind:
        [marked], _ = merge(running(expired), job('b'), NOW)
        expired = workitem.release(marked)
    [kept, *docs], outcome = merge(expired, job('c', now=NOW + 2), NOW + 2)
    assert (workitem.task_id(kept), workitem.is_waiting(kept), workitem.is_unique(kept)) == ('a', True, False)
    assert workitem.has_expired(kept, NOW + 2)
    assert not {'next', '_rev'} & kept.keys()
    if behind:
        assert outcome == Outcome(MOVED, 'b')
        [moved] = docs
        assert (workitem.task_id(moved), 'next' in moved, 'expires' in moved) == ('b', False, False)
    else:
        assert (docs, outcome) == ([{**job('c', now=NOW + 2), '_rev': '1-a'}], Outcome(ENQUEUED, 'c'))


def test_retry_runs_before_the_next_job() -> None:
    [marked], _ = merge(running(stored(job('a'))), job('b'), NOW)
    [both], outcome = merge(marked, job('a', tag='retry'), NOW)
    assert outcome == Outcome(AGAIN, 'a')
    assert [workitem.task_id(one) for one in both['next']] == ['a', 'b']
    [again], _ = merge(both, job('a', tag='second retry'), NOW)
    assert [one['message']['properties']['delivery_tag'] for one in again['next']] == ['second retry', 'tag-b']
    [kept], outcome = merge(again, job('c', eta='2025-11-21T08:00:00+00:00'), NOW)
    assert outcome == Outcome(MOVED, 'b')
    assert [workitem.task_id(one) for one in kept['next']] == ['a', 'b']
    retrying = workitem.acked(kept, NOW)
    assert (workitem.task_id(retrying), [workitem.task_id(one) for one in retrying['next']]) == ('a', ['b'])


def test_publishing_the_same_message_again_has_no_effect() -> None:
    for found in (stored(job('a')), running(stored(job('a')))):
        assert merge(found, job('a'), NOW) == ([], Outcome(ENQUEUED, 'a'))


def test_message_that_was_published_once_is_kept_with_the_job() -> None:
    [new], _ = unique_merge.merge(None, job('a'), NOW, 'once:a')
    assert unique_merge.moved(new) == {'once:a': 'a'}
    [merged], outcome = unique_merge.merge(stored(job('b')), job('a'), NOW, 'once:a')
    assert (outcome, unique_merge.moved(merged)) == (Outcome(MOVED, 'b'), {'once:a': 'b'})
    [behind], _ = merge(running(merged), job('c'), NOW)
    following = workitem.acked(behind, NOW)
    assert unique_merge.moved(following) == {'once:a': 'b'}
    ended = workitem.acked(stored(following), NOW)
    assert [marker['_id'] for marker in unique_merge.markers(ended)] == ['once:a']


def test_new_job_in_place_of_a_dead_one_keeps_what_was_published_once() -> None:
    dead = {**stored(job('a')), 'moved': {'once:a': 'a'}, 'status': 'fail', 'reason': 'rejected', 'failed': NOW}
    copy, new = merge(dead, job('b'), NOW)[0]
    assert unique_merge.moved(new) == {'once:a': 'a'}
    assert not unique_merge.moved(copy)


def test_leaf_that_stays_gets_what_others_published_once() -> None:
    kept = {**stored(job('a')), 'moved': {'once:a': 'a'}}
    found = unique_merge.add_missing(kept, [{**stored(job('a')), 'moved': {'once:b': 'a'}}], ())
    assert unique_merge.moved(found) == {'once:a': 'a', 'once:b': 'a'}
