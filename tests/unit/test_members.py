"""Who else consumes, and one's own place (`kombu_couchdb.members`)."""

from __future__ import annotations

import pytest

from kombu_couchdb.members import Members


@pytest.fixture
def members() -> Members:
    """Four consumers of `q`, one of them of `r` too, and another of `r` only."""
    members = Members()
    for name, queues in [('d', ['q']), ('b', ['q', 'r']), ('a', ['q']), ('c', ['q']), ('x', ['r'])]:
        members.seen({'_id': name, 'queues': queues})
    return members


def test_who_knows_nobody_is_alone() -> None:
    assert Members().of('q', 'me') == ['me']


def test_all_have_places_of_their_own(members: Members) -> None:
    assert [members.of('q', name) for name in 'abcd'] == [['a', 'b', 'c', 'd']] * 4
    assert [members.of('r', name) for name in 'bx'] == [['b', 'x']] * 2


def test_who_is_not_known_yet_counts_itself(members: Members) -> None:
    assert members.of('q', 'bb') == ['a', 'b', 'bb', 'c', 'd']
    assert members.of('other', 'bb') == ['bb']
    assert members.of('q', 'x') == ['a', 'b', 'c', 'd', 'x']


def test_what_is_seen_later_counts(members: Members) -> None:
    members.seen({'_id': 'a', 'queues': ['r']})
    assert members.of('q', 'b') == ['b', 'c', 'd']
    assert members.of('r', 'b') == ['a', 'b', 'x']


def test_who_was_deleted_is_forgotten(members: Members) -> None:
    members.seen({'_id': 'a', '_deleted': True})
    members.seen({'_id': 'unknown', '_deleted': True})
    assert members.of('q', 'b') == ['b', 'c', 'd']


def test_only_the_living_are_kept(members: Members) -> None:
    members.keep({'b', 'd', 'unknown'})
    assert [members.of('q', name) for name in 'bd'] == [['b', 'd']] * 2
    assert members.of('q', 'unknown') == ['b', 'd', 'unknown']


@pytest.mark.parametrize('queues', [None, []])
def test_a_consumer_of_nothing_takes_no_place(members: Members, queues: list[str] | None) -> None:
    members.seen({'_id': '0', 'queues': queues})
    members.seen({'_id': '1'})
    assert members.of('q', 'a') == ['a', 'b', 'c', 'd']
