"""Who else consumes, and who goes first (`kombu_couchdb.leases.peers`)."""

from __future__ import annotations

import pytest

from kombu_couchdb.leases.peers import Peers, Turns


@pytest.fixture
def peers() -> Peers:
    """Four consumers of `q`, one of them of `r` too, and another of `r` only."""
    peers = Peers()
    for name, queues in [('d', ['q']), ('b', ['q', 'r']), ('a', ['q']), ('c', ['q']), ('x', ['r'])]:
        peers.seen({'_id': name, 'queues': queues})
    return peers


def test_who_knows_nobody_is_alone() -> None:
    assert Peers().of('q', 'me') == ['me']


def test_all_have_places_of_their_own(peers: Peers) -> None:
    assert [peers.of('q', name) for name in 'abcd'] == [['a', 'b', 'c', 'd']] * 4
    assert [peers.of('r', name) for name in 'bx'] == [['b', 'x']] * 2


def test_who_is_not_known_yet_counts_itself(peers: Peers) -> None:
    assert peers.of('q', 'bb') == ['a', 'b', 'bb', 'c', 'd']
    assert peers.of('other', 'bb') == ['bb']
    assert peers.of('q', 'x') == ['a', 'b', 'c', 'd', 'x']


def test_what_is_seen_later_counts(peers: Peers) -> None:
    peers.seen({'_id': 'a', 'queues': ['r']})
    assert peers.of('q', 'b') == ['b', 'c', 'd']
    assert peers.of('r', 'b') == ['a', 'b', 'x']


def test_who_was_deleted_is_forgotten(peers: Peers) -> None:
    peers.seen({'_id': 'a', '_deleted': True})
    peers.seen({'_id': 'unknown', '_deleted': True})
    assert peers.of('q', 'b') == ['b', 'c', 'd']


def test_only_the_living_are_kept(peers: Peers) -> None:
    peers.keep({'b', 'd', 'unknown'})
    assert [peers.of('q', name) for name in 'bd'] == [['b', 'd']] * 2
    assert peers.of('q', 'unknown') == ['b', 'd', 'unknown']


@pytest.mark.parametrize('queues', [None, []])
def test_a_consumer_of_nothing_takes_no_place(peers: Peers, queues: list[str] | None) -> None:
    peers.seen({'_id': '0', 'queues': queues})
    peers.seen({'_id': '1'})
    assert peers.of('q', 'a') == ['a', 'b', 'c', 'd']


NAMES = ['a', 'b', 'c', 'd']
ITEMS = [f'item{number}' for number in range(200)]


def turns(own: str, busy: str = '') -> Turns:
    return Turns(NAMES, own, busy)


@pytest.mark.parametrize('busy', ['', 'c', 'ab'])
def test_each_item_has_one_that_goes_first_and_an_order_of_those_who_are_idle(busy: str) -> None:
    idle = [name for name in NAMES if name not in busy]
    for item in ITEMS:
        assert sorted(turns(name, busy).idle_before(item) for name in idle) == list(range(len(idle)))


def test_everybody_goes_first_for_a_share() -> None:
    assert min(sum(turns(name).first(item) == name for item in ITEMS) for name in NAMES) > len(ITEMS) / 8


@pytest.mark.parametrize('own', NAMES)
def test_before_names_who_goes_before(own: str) -> None:
    for item in ITEMS:
        before = turns(own).before(item)
        assert [turns(name).idle_before(item) for name in before] == list(range(len(before)))
        assert turns(own).idle_before(item) == len(before)
        assert (before or [own])[0] == turns(own).first(item) == turns(own).first_idle(item)


def test_the_only_idle_one_goes_first_for_all() -> None:
    alone = turns('b', 'acd')
    assert {alone.idle_before(item) for item in ITEMS} == {0}
    assert {alone.first_idle(item) for item in ITEMS} == {'b'}


def test_what_is_noted_is_news_once() -> None:
    some = turns('a')
    assert some.note(busy=['b', 'unknown', 'a'])
    assert not some.note(busy=['b'])
    assert some.busy == {'b'}
    assert some.note(idle=['b'])
    assert not some.note(idle=['b', 'unknown'])
