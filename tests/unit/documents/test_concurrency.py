"""Concurrency keys: headers, slots, and parked items."""

from __future__ import annotations

from typing import Any

import pytest

from kombu_couchdb.documents import concurrency, workitem

HEADERS: dict[str, Any] = {'id': 'a', 'task': 't', 'concurrency_key': 'k', 'concurrency_limit': 2}


def item(published: float = 1.0, **headers: Any) -> Any:
    message = {
        'body': '',
        'headers': {**HEADERS, **headers},
        'properties': {'delivery_tag': str(published)},
        'content-type': 'text/plain',
    }
    return {**workitem.new('id', 'q', message, published), '_rev': '1-a'}


def leaf(rev: str, by: str, **more: Any) -> dict[str, Any]:
    return {'_id': 'slot:k:0', '_rev': rev, 'by': by, **more}


@pytest.mark.parametrize('limit', [True, False, 0, -1, 1001, 2.0, '2', None, [2]])
def test_invalid_limit(limit: Any) -> None:
    assert 'the header concurrency_limit must be a whole number from 1 to 1000' in str(
        concurrency.limit_problem({**HEADERS, 'concurrency_limit': limit})
    )


@pytest.mark.parametrize('key', ['', 'x' * 501, 5, ['k'], 'half of a pair \ud800', 'rate:q:k'])
def test_invalid_key(key: Any) -> None:
    """Keys that begin with `rate:` are those of messages that wait for a start."""
    assert 'the header concurrency_key must ' in str(concurrency.limit_problem({**HEADERS, 'concurrency_key': key}))


@pytest.mark.parametrize(('one', 'other'), [('a', 'a:0'), ('a', 'a%3A'), ('a/b', 'a%2Fb'), ('é', 'e\u0301')])
def test_keys_share_no_slot(one: str, other: str) -> None:
    assert not concurrency.prefix(one).startswith(concurrency.prefix(other))
    assert not concurrency.prefix(other).startswith(concurrency.prefix(one))


def test_conflicting_slots() -> None:
    """Only leaves of consumers that are gone are deleted."""
    leaves = [leaf('1-a', 'alive'), leaf('1-b', 'gone'), leaf('2-c', 'gone', _deleted=True)]
    assert concurrency.resolve_slot(leaves, {'alive'}) == [{'_id': 'slot:k:0', '_rev': '1-b', '_deleted': True}]
    assert concurrency.resolve_slot([leaf('1-a', 'x'), leaf('1-b', 'y')], {'x', 'y'}) is None
    assert concurrency.resolve_slot([leaf('1-a', 'x')], {'x'}) == []


def waiting(**limits: int) -> list[dict[str, Any]]:
    """Return messages that wait for slots of the key `k`, by name with their limits."""
    return [
        concurrency.park({**item(concurrency_limit=limit), '_id': name}, 'k', 5.0) for name, limit in limits.items()
    ]


@pytest.mark.parametrize(
    ('limits', 'free', 'expected'),
    [
        ({'a': 2, 'b': 2, 'c': 2}, {0, 1}, [(1, 'a'), (0, 'b')]),
        ({'low': 1, 'high': 5}, {3}, [(3, 'high')]),
        ({'high': 5, 'low': 1}, {0, 3}, [(3, 'high'), (0, 'low')]),
        ({'high': 5, 'low': 1}, {0}, [(0, 'high')]),
        ({'low': 1}, {1, 2}, []),
        ({'a': 1}, set(), []),
    ],
)
def test_free_slots_are_given_to_the_first_messages_that_can_use_them(
    limits: dict[str, int], free: set[int], expected: list[tuple[int, str]]
) -> None:
    assert [(number, doc['_id']) for number, doc in concurrency.assign(waiting(**limits), free)] == expected


def test_a_changed_message_goes_on_without_a_slot() -> None:
    without_limit, of_another_key = waiting(a=1, b=1)
    without_limit['message']['headers']['concurrency_limit'] = 0
    of_another_key['message']['headers']['concurrency_key'] = 'other'
    assert concurrency.assign([without_limit, of_another_key], {0}) == [(None, without_limit), (None, of_another_key)]
