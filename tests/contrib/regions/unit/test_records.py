"""The rules of records: where a task is that was given away, who may take it, and what home does about it."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.contrib.regions import region
from kombu_couchdb.contrib.regions.region import Giver, HomeDecision

RECORD: dict[str, Any] = {'_id': region.record_id('eu', 'task:1', 'tag'), 'published': 100.0}

FALLBACK = {'fallback': 'asia', 'fallback_at': 130.0}

THERE, CANCELLED, REFUSED = {'state': 'there'}, {'cancelled': 101.0}, {'status': 'fail', 'reason': 'no queue'}

HOME, ASIA, NEVER = HomeDecision('run', 'us'), HomeDecision('run', 'asia'), HomeDecision('cancelled')


@pytest.mark.parametrize(
    ('members', 'now', 'decision'),
    [
        ({}, 1e9, None),
        (CANCELLED, 1e9, NEVER),
        ({**CANCELLED, **THERE}, 1e9, None),  # its region has it in its queue
        (FALLBACK, 129.0, None),
        (FALLBACK, 130.0, ASIA),
        ({'lent': 100.0}, 100.0 + region.LEND_SECONDS - 1, None),
        ({'lent': 100.0}, 100.0 + region.LEND_SECONDS, HOME),
        ({**FALLBACK, **CANCELLED}, 102.0, NEVER),
        ({'lent': 100.0, **CANCELLED}, 102.0, NEVER),
        *(({**FALLBACK, **THERE, **more}, 1e9, None) for more in ({}, CANCELLED)),
        ({'state': 'withdrawn', 'run_in': 'us', **CANCELLED}, 0.0, HOME),  # it may run already
        ({'state': 'withdrawn', 'run_in': ''}, 0.0, NEVER),
        ({**FALLBACK, **REFUSED}, 102.0, ASIA),
        ({'lent': 100.0, **REFUSED}, 102.0, HOME),
        (REFUSED, 102.0, HomeDecision('failed', reason='region eu has refused the task: no queue')),
        (
            {**FALLBACK, **REFUSED, 'state': 'withdrawn', 'run_in': 'asia'},
            1e9,
            HomeDecision('failed', reason='region asia has refused the task: no queue'),
        ),
    ],
)
def test_what_home_decides(members: dict[str, Any], now: float, decision: HomeDecision | None) -> None:
    assert region.decide({**RECORD, **members}, 'us', now) == decision


@pytest.mark.parametrize('at', [None, 'soon', True, [1], {}])
def test_malformed_date_is_due_at_once(at: Any) -> None:
    assert region.decide({**RECORD, 'fallback': 'asia', 'fallback_at': at}, 'us', 0.0) == ASIA
    assert region.decide({**RECORD, 'lent': at}, 'us', 0.0) == HOME


@pytest.mark.parametrize('members', [{}, FALLBACK, {'lent': 100.0}, CANCELLED, {**FALLBACK, **CANCELLED}, REFUSED])
def test_home_decides_when_the_record_is_due(members: dict[str, Any]) -> None:
    doc = {**RECORD, **members}
    if (due := region.due_at(doc)) is not None:
        assert region.decide(doc, 'us', due)
        assert due == 0.0 or not region.decide(doc, 'us', due - 1)


def test_task_is_taken_or_withdrawn() -> None:
    doc = {**RECORD, **FALLBACK, **REFUSED, 'delayed': 'x'}
    assert not region.is_takeable(doc, 'server')
    assert not region.is_takeable(region.withdrawn(doc, 'asia'), 'server')
    assert not region.is_takeable({**RECORD, **CANCELLED}, 'server')
    assert region.is_takeable(RECORD, 'server')
    assert region.is_takeable(region.there(RECORD, 'server', 5.0), 'server')
    assert not region.is_takeable(region.there(RECORD, 'another server', 5.0), 'server')
    assert region.state_of(region.withdrawn(doc, 'asia')) == 'withdrawn'  # not refused any more


@pytest.mark.parametrize(
    ('members', 'state'),
    [
        ({}, 'sent'),
        (THERE, 'there'),
        ({**THERE, **REFUSED}, 'refused'),
        ({'state': 'sold'}, 'sent'),
        ({'state': [1]}, 'sent'),
    ],
)
def test_state(members: dict[str, Any], state: str) -> None:
    assert region.state_of(members) == state


def test_giver_is_read_from_a_header() -> None:
    giver = Giver('eu', 'eu_regions', 'us', 'task:1', RECORD['_id'])
    assert Giver.of({'x-giver': list(giver)}) == giver
    for malformed in (None, 'x' * 5, [*giver, 'x'], [*giver[:4], 5], {'own': 'eu'}):
        assert Giver.of({'x-giver': malformed}) is None


def test_ids_name_the_region_and_the_task() -> None:
    assert (region.region_of(RECORD['_id']), region.task_id_of(RECORD['_id'])) == ('eu', 'task:1')
    back = region.returned('us', 'task:1', 'tag', {'_id': 'r', '_rev': '1-a', 'expires': 5.0}, None, 5.0)
    assert (back['result'], region.region_of(back['_id'])) == ({'_id': 'r'}, 'us')
