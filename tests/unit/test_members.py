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
    assert Members().place('me', 'q') == (0, 1)


def test_all_have_places_of_their_own(members: Members) -> None:
    assert [members.place(name, 'q') for name in 'abcd'] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [members.place(name, 'r') for name in 'bx'] == [(0, 2), (1, 2)]


def test_who_is_not_known_yet_counts_itself(members: Members) -> None:
    assert members.place('bb', 'q') == (2, 5)
    assert members.place('bb', 'other') == (0, 1)
    assert members.place('x', 'q') == (4, 5)


def test_what_is_seen_later_counts(members: Members) -> None:
    members.seen({'_id': 'a', 'queues': ['r']})
    assert members.place('b', 'q') == (0, 3)
    assert members.place('b', 'r') == (1, 3)


def test_who_was_deleted_is_forgotten(members: Members) -> None:
    members.seen({'_id': 'a', '_deleted': True})
    members.seen({'_id': 'unknown', '_deleted': True})
    assert members.place('b', 'q') == (0, 3)


def test_only_the_living_are_kept(members: Members) -> None:
    members.keep({'b', 'd', 'unknown'})
    assert [members.place(name, 'q') for name in 'bd'] == [(0, 2), (1, 2)]
    assert members.place('unknown', 'q') == (2, 3)


@pytest.mark.parametrize('queues', [None, []])
def test_a_consumer_of_nothing_takes_no_place(members: Members, queues: list[str] | None) -> None:
    members.seen({'_id': '0', 'queues': queues})
    members.seen({'_id': '1'})
    assert members.place('a', 'q') == (0, 4)
