"""Merging a message with a job key into the existing document (`kombu_couchdb.documents.unique_merge`)."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.documents import dead_letter, unique_merge, validation, workitem
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
    assert moved['message']['headers'] == {
        **found['message']['headers'],
        'eta': '2025-11-21T08:00:00+00:00',
        'expires': '9000 ms',
    }


def test_repeated_publish_is_recorded_for_the_message_ttl() -> None:
    found = stored(job('a'))
    [noted], outcome = merge(found, job('b', now=NOW + 5), NOW + 5)
    assert outcome == Outcome(MOVED, 'a')
    assert noted == {**found, 'sent': NOW + 5}
    assert workitem.ready_since(noted) == NOW + 5
    assert merge(noted, job('c', now=NOW + 5.5), NOW + 5.5) == ([], Outcome(MOVED, 'a'))


@pytest.mark.parametrize('behind', [False, True], ids=['alone', 'with another behind it'])
def test_expired_job_is_replaced(behind: bool) -> None:
    expired = stored(job('a', expiration=1000))
    if behind:
        [marked], _ = merge(running(expired), job('b'), NOW)
        expired = workitem.release(marked)
    docs, outcome = merge(expired, job('c', now=NOW + 2), NOW + 2)
    if behind:
        assert outcome == Outcome(MOVED, 'b')
        [moved] = docs
        assert (workitem.task_id(moved), 'next' in moved, 'expires' in moved) == ('b', False, False)
    else:
        assert (docs, outcome) == ([{**job('c', now=NOW + 2), '_rev': '1-a'}], Outcome(ENQUEUED, 'c'))


def test_running_job_runs_once_more() -> None:
    held = running(stored(job('a')))
    [first], outcome = merge(held, job('b'), NOW)
    assert outcome == Outcome(AGAIN, 'b')
    assert {name: first[name] for name in held} == held
    [second], outcome = merge(first, job('c', eta='2025-11-21T08:00:00+00:00'), NOW)
    assert outcome == Outcome(MOVED, 'b')
    assert [one['message']['body'] for one in second['next']] == ['b']
    assert second['next'][0]['date'] == job('c', eta='2025-11-21T08:00:00+00:00')['date']
    done = workitem.acked(second, NOW)
    assert workitem.task_id(done) == 'b'
    assert (done['_id'], done['_rev'], done['key'], done['attempts'], done['claimed']) == (
        held['_id'],
        '2-a',
        'k',
        0,
        None,
    )
    assert validation.flaw(done) is None
    assert 'next' not in done
    assert workitem.acked(done, NOW) == {'_id': held['_id'], '_rev': '2-a', '_deleted': True, 'done': 'tag-b'}


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


@pytest.mark.parametrize('found', [stored(job('a')), running(stored(job('a')))], ids=['waiting', 'running'])
def test_publishing_the_same_message_again_has_no_effect(found: dict[str, Any]) -> None:
    assert merge(found, job('a'), NOW) == ([], Outcome(ENQUEUED, 'a'))


def test_dead_job_is_kept_and_a_new_one_is_enqueued() -> None:
    dead = stored(dead_letter.made_of(job('a'), 'because', NOW))
    [copy, new], outcome = merge(dead, job('b'), NOW + 1)
    assert outcome == Outcome(ENQUEUED, 'b')
    assert new == {**job('b'), '_rev': '1-a'}
    assert copy == {**{k: v for k, v in dead.items() if k != '_rev'}, '_id': copy['_id']}
    assert copy['_id'] != dead['_id']
    assert merge(dead, job('c'), NOW + 2)[0][0] == copy


def test_dead_job_gives_way_to_the_next() -> None:
    [marked], _ = merge(running(stored(job('a'))), job('b'), NOW)
    [copy, following] = dead_letter.apart(dead_letter.made_of(marked, 'because', NOW))
    assert (workitem.task_id(copy), copy['status'], 'next' in copy, '_rev' in copy) == ('a', 'fail', False, False)
    assert (following['_id'], following['_rev'], workitem.task_id(following)) == (marked['_id'], '2-a', 'b')
    assert workitem.is_waiting(following)
