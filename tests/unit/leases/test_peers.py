"""Unit tests of the other consumers and the order of claims (`kombu_couchdb.leases.peers`)."""

from __future__ import annotations

import pytest

from kombu_couchdb.leases.peers import Peers, Turns


@pytest.fixture
def peers() -> Peers:
    """Four consumers of `q`, one of which also consumes `r`, and one consumer of `r` only."""
    peers = Peers()
    for name, queues in [('d', ['q']), ('b', ['q', 'r']), ('a', ['q']), ('c', ['q']), ('x', ['r'])]:
        peers.seen({'_id': name, 'queues': queues})
    return peers


def test_without_known_peers_a_consumer_is_alone() -> None:
    assert Peers().of('q', 'me') == ['me']


def test_all_consumers_agree_on_the_order(peers: Peers) -> None:
    assert [peers.of('q', name) for name in 'abcd'] == [['a', 'b', 'c', 'd']] * 4
    assert [peers.of('r', name) for name in 'bx'] == [['b', 'x']] * 2


def test_own_id_is_always_in_the_order(peers: Peers) -> None:
    assert peers.of('q', 'bb') == ['a', 'b', 'bb', 'c', 'd']
    assert peers.of('other', 'bb') == ['bb']
    assert peers.of('q', 'x') == ['a', 'b', 'c', 'd', 'x']


def test_last_seen_document_counts(peers: Peers) -> None:
    peers.seen({'_id': 'a', 'queues': ['r']})
    assert peers.of('q', 'b') == ['b', 'c', 'd']
    assert peers.of('r', 'b') == ['a', 'b', 'x']


def test_deleted_consumer_is_forgotten(peers: Peers) -> None:
    peers.seen({'_id': 'a', '_deleted': True})
    peers.seen({'_id': 'unknown', '_deleted': True})
    assert peers.of('q', 'b') == ['b', 'c', 'd']


def test_keep_forgets_all_other_consumers(peers: Peers) -> None:
    peers.keep({'b', 'd', 'unknown'})
    assert [peers.of('q', name) for name in 'bd'] == [['b', 'd']] * 2
    assert peers.of('q', 'unknown') == ['b', 'd', 'unknown']


@pytest.mark.parametrize('queues', [None, []])
def test_consumer_without_queues_is_in_no_order(peers: Peers, queues: list[str] | None) -> None:
    peers.seen({'_id': '0', 'queues': queues})
    peers.seen({'_id': '1'})
    assert peers.of('q', 'a') == ['a', 'b', 'c', 'd']


NAMES = ['a', 'b', 'c', 'd']
MESSAGES = [f'message{number}' for number in range(200)]


def turns(own: str, busy: str = '') -> Turns:
    return Turns(NAMES, own, busy)


@pytest.mark.parametrize('busy', ['', 'c', 'ab'])
def test_idle_consumers_have_distinct_positions_for_each_message(busy: str) -> None:
    idle = [name for name in NAMES if name not in busy]
    for message in MESSAGES:
        assert sorted(turns(name, busy).idle_before(message) for name in idle) == list(range(len(idle)))


def test_each_consumer_is_first_for_a_share_of_messages() -> None:
    assert min(sum(turns(name).first(message) == name for message in MESSAGES) for name in NAMES) > len(MESSAGES) / 8


@pytest.mark.parametrize('own', NAMES)
def test_before_returns_the_consumers_in_order(own: str) -> None:
    for message in MESSAGES:
        before = turns(own).before(message)
        assert [turns(name).idle_before(message) for name in before] == list(range(len(before)))
        assert turns(own).idle_before(message) == len(before)
        assert (before or [own])[0] == turns(own).first(message) == turns(own).first_idle(message)


def test_only_idle_consumer_is_first_for_all_messages() -> None:
    alone = turns('b', 'acd')
    assert {alone.idle_before(message) for message in MESSAGES} == {0}
    assert {alone.first_idle(message) for message in MESSAGES} == {'b'}


def test_note_tells_whether_anything_changed() -> None:
    some = turns('a')
    assert some.note(busy=['b', 'unknown', 'a'])
    assert not some.note(busy=['b'])
    assert some.busy == {'b'}
    assert some.note(idle=['b'])
    assert not some.note(idle=['b', 'unknown'])
