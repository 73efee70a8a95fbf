"""Messages that are lent to another region (`kombu_couchdb.contrib.regions.region`)."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.contrib.regions import region
from kombu_couchdb.documents import conflict_rules, workitem

NOW = 1763709000.0


def item(**changes: Any) -> dict[str, Any]:
    message = {
        'body': '[[], {}, {}]',
        'headers': {'task': 'add', 'id': 'a'},
        'properties': {'region': 'any', 'delivery_tag': 'tag', 'body_encoding': 'utf-8'},
        'content-type': 'application/json',
        'content-encoding': 'utf-8',
    }
    return {**workitem.new('one', 'celery', message, NOW), '_rev': '1-a', **changes}


def test_only_messages_that_wait_for_long_enough_are_lent() -> None:
    assert region.is_lendable(item(), NOW)
    assert not region.is_lendable(item(), NOW - 0.1)
    assert not region.is_lendable(item(date=NOW + 1), NOW)


@pytest.mark.parametrize(
    'changes',
    [
        {'type': 'DoneItem'},
        {'status': 'fail'},
        {'_deleted': True},
        {'claimed': {'by': 'broker:consumer:x', 'date': NOW}},
        {'parked': {'key': 'k', 'date': NOW}},
        {'attempts': 1},
        {'key': 'k'},
        {'message': None},
    ],
)
def test_other_items_are_not_lent(changes: dict[str, Any]) -> None:
    assert not region.is_lendable(item(**changes), NOW)


def test_item_that_stays_at_home_is_not_lent_again() -> None:
    found = region.not_lent(region.lent(item(), 'eu', NOW))
    assert workitem.is_waiting(found)
    assert not region.is_lendable(found, NOW)
    assert {*found} == {*item()}


def test_record_names_region_and_task_and_keeps_the_rest_of_the_lifetime() -> None:
    found = region.lent_parcel(item(expires=NOW + 60), 'us', 'eu', None, NOW + 10)
    assert (found['_id'], found['routing_key'], found['lent']) == ('p:eu:a:one', 'celery', NOW + 10)
    assert found['message']['headers']['x-from-region'] == 'us'
    assert found['message']['properties']['expiration'] == '50000'
    assert 'region' not in found['message']['properties']


def test_proven_claim_is_not_touched_while_an_unproven_lent_item_exists() -> None:
    claim = {**workitem.claim(item(), 'x', NOW), '_rev': '2-f'}  # type: ignore[arg-type]
    marked = {**region.lent(item(), 'eu', NOW), '_rev': '2-a'}
    assert conflict_rules.resolve_item([claim, marked], {'x'}, NOW) is None


def test_record_of_a_message_with_a_fixed_id_names_its_task() -> None:
    found = region.lent_parcel(item(_id='once:1'), 'us', 'eu', None, NOW)
    assert found['_id'].rpartition(':')[0] == 'p:eu:a'
