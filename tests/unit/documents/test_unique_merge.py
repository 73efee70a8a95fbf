"""What becomes of a message with a job key, by what is there already (`kombu_couchdb.unique.merge`)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.documents.unique_merge import AGAIN, ENQUEUED, MOVED, Outcome, merge
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
) -> dict[str, Any]:
    """A new item for a task sent with a job key."""
    properties = {'delivery_tag': tag or f'tag-{task_id}', **({'expiration': str(expiration)} if expiration else {})}
    headers = {
        'id': task_id,
        'task': task,
        'job_key': key,
        'eta': eta,
        'expires': f'{expiration} ms' if expiration else None,
    }
    return workitem.new('plain', queue, {'body': task_id, 'headers': headers, 'properties': properties}, now)


def stored(doc: dict[str, Any]) -> dict[str, Any]:
    return {**doc, '_rev': '1-a'}


def running(doc: dict[str, Any]) -> dict[str, Any]:
    return {**workitem.claim(doc, 'me', NOW), '_rev': '2-a'}


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
def test_key_that_cannot_be_one_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError, match='job_key must be text of 1 to 500 characters'):
        job('a', key=key)


def test_nothing_is_there() -> None:
    assert merge(None, job('a'), NOW) == ([job('a')], Outcome(ENQUEUED, 'a'))


def test_waiting_one_moves_later_with_its_expiry() -> None:
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


def test_waiting_one_moves_earlier() -> None:
    found = stored(job('a', eta='2025-11-21T08:00:00+00:00', expiration=1000))
    [moved], outcome = merge(found, job('b'), NOW)
    assert outcome == Outcome(MOVED, 'a')
    assert moved['date'] is None
    assert 'expires' not in moved
    assert moved['message']['headers']['eta'] is None


def test_what_would_change_nothing_is_not_written() -> None:
    assert merge(stored(job('a')), job('b'), NOW) == ([], Outcome(MOVED, 'a'))


def test_that_it_was_sent_again_is_noted_for_its_queue_s_ttl() -> None:
    found = stored(job('a'))
    [noted], outcome = merge(found, job('b', now=NOW + 5), NOW + 5)
    assert outcome == Outcome(MOVED, 'a')
    assert noted == {**found, 'sent': NOW + 5}
    assert workitem.ready_since(noted) == NOW + 5
    assert merge(noted, job('c', now=NOW + 5.5), NOW + 5.5) == ([], Outcome(MOVED, 'a'))


@pytest.mark.parametrize('behind', [False, True], ids=['alone', 'with another behind it'])
def test_one_that_has_expired_is_finished(behind: bool) -> None:
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


def test_what_waited_behind_is_ready_since_its_turn_came() -> None:
    [marked], _ = merge(running(stored(job('a'))), job('b'), NOW)
    assert workitem.ready_since(workitem.acked(marked, NOW + 60)) == NOW + 60


def test_copies_of_one_dead_letter_are_one() -> None:
    [marked], _ = merge(running(stored(job('a'))), job('b'), NOW)
    [changed], _ = merge(marked, job('c', eta='2025-11-21T08:00:00+00:00'), NOW)
    ids = {
        dead_letter.apart(dead_letter.made_of(doc, 'because', date), date)[0]['_id']
        for date, doc in enumerate([marked, changed])
    }
    assert len(ids) == 1
    assert ids != {dead_letter.copy(dead_letter.made_of(job('d'), 'because', NOW))['_id']}


def test_running_one_runs_again_once() -> None:
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
    assert workitem.flaw(done) is None
    assert 'next' not in done
    assert workitem.acked(done, NOW) == {'_id': held['_id'], '_rev': '2-a', '_deleted': True, 'done': 'tag-b'}


def test_retry_goes_before_what_waits_behind() -> None:
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


def test_retry_of_one_that_was_given_back_takes_its_place() -> None:
    found = stored(job('a'))
    [changed], outcome = merge(found, job('a', tag='retry', eta='2025-11-21T08:00:00+00:00'), NOW)
    assert outcome == Outcome(ENQUEUED, 'a')
    assert changed['message']['properties']['delivery_tag'] == 'retry'
    assert changed['date'] is not None
    assert changed['_rev'] == '1-a'


@pytest.mark.parametrize('found', [stored(job('a')), running(stored(job('a')))], ids=['waiting', 'running'])
def test_same_message_again_is_the_same(found: dict[str, Any]) -> None:
    assert merge(found, job('a'), NOW) == ([], Outcome(ENQUEUED, 'a'))


def test_same_message_again_behind_a_running_one() -> None:
    [marked], _ = merge(running(stored(job('a'))), job('b'), NOW)
    assert merge(marked, job('b'), NOW) == ([], Outcome(AGAIN, 'b'))


def test_dead_one_is_kept_and_the_job_enqueued_anew() -> None:
    dead = stored(dead_letter.made_of(job('a'), 'because', NOW))
    [copy, new], outcome = merge(dead, job('b'), NOW + 1)
    assert outcome == Outcome(ENQUEUED, 'b')
    assert new == {**job('b'), '_rev': '1-a'}
    assert copy == {**{k: v for k, v in dead.items() if k != '_rev'}, '_id': copy['_id']}
    assert copy['_id'] != dead['_id']
    assert merge(dead, job('c'), NOW + 2)[0][0] == copy


def test_spoilt_one_is_kept_as_a_dead_letter() -> None:
    spoilt = {'_id': job('a')['_id'], '_rev': '1-a', 'type': 'WorkItem', 'message': None}
    [copy, new], outcome = merge(spoilt, job('b'), NOW)
    assert outcome.what == ENQUEUED
    assert copy['status'] == 'fail'
    assert copy['reason'].startswith('malformed')
    assert new['_rev'] == '1-a'


def test_what_is_spoilt_behind_a_running_one_is_dropped() -> None:
    held = {**running(stored(job('a'))), 'next': [5, {'message': 'x'}]}
    [marked], outcome = merge(held, job('b'), NOW)
    assert outcome == Outcome(AGAIN, 'b')
    assert [workitem.task_id(one) for one in marked['next']] == ['b']


def test_dead_one_with_others_behind_makes_way() -> None:
    [marked], _ = merge(running(stored(job('a'))), job('b'), NOW)
    [copy, following] = dead_letter.apart(dead_letter.made_of(marked, 'because', NOW), NOW)
    assert (workitem.task_id(copy), copy['status'], 'next' in copy, '_rev' in copy) == ('a', 'fail', False, False)
    assert (following['_id'], following['_rev'], workitem.task_id(following)) == (marked['_id'], '2-a', 'b')
    assert workitem.is_waiting(following)


def test_nothing_that_is_given_is_changed() -> None:
    held, new = running(stored(job('a'))), job('b')
    before = deepcopy((held, new))
    merge(held, new, NOW)
    assert (held, new) == before


def test_one_that_cannot_be_read_is_written_over() -> None:
    found = {name: stored(job('a'))[name] for name in ('_id', '_rev')}
    assert merge(found, job('b'), NOW) == ([{**job('b'), '_rev': found['_rev']}], Outcome(ENQUEUED, 'b'))
