"""Unit tests of the other consumers, and of the choice of listeners (`kombu_couchdb.fleet.attention`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from kombu_couchdb.fleet.attention import Peers


def peers_of(consumers: Mapping[str, Iterable[str]]) -> Peers:
    peers = Peers()
    for name, queues in consumers.items():
        peers.seen({'_id': name, 'queues': list(queues)})
    return peers


@pytest.fixture
def peers() -> Peers:
    """Four consumers of `q`, one of which also consumes `r`, and one consumer of `r` only."""
    return peers_of({'d': 'q', 'b': 'qr', 'a': 'q', 'c': 'q', 'x': 'r'})


def test_without_known_peers_a_consumer_is_alone() -> None:
    assert Peers().of('q', 'me') == ['me']
    assert not Peers().is_shared('q', 'me')


def test_all_consumers_agree_on_the_order(peers: Peers) -> None:
    assert [peers.of('q', name) for name in 'abcd'] == [['a', 'b', 'c', 'd']] * 4
    assert [peers.of('r', name) for name in 'bx'] == [['b', 'x']] * 2


def test_last_seen_document_counts(peers: Peers) -> None:
    peers.seen({'_id': 'a', 'queues': ['r']})
    peers.seen({'_id': 'c', '_deleted': True})
    peers.seen({'_id': 'unknown', '_deleted': True})
    assert peers.of('q', 'me') == ['b', 'd', 'me']
    assert peers.of('r', 'b') == ['a', 'b', 'x']
    peers.keep({'b', 'unknown'})
    assert peers.of('q', 'me') == ['b', 'me']


# -- listeners


def listening(peers: Peers, queue: str) -> int:
    return len(peers.listeners_of(queue))


def test_all_consumers_choose_the_same_listeners(peers: Peers) -> None:
    chosen = []
    for own, queues in [('a', 'q'), ('b', 'qr'), ('x', 'r')]:
        other = peers_of({'x': 'r', 'c': 'q', 'b': 'qr', 'a': 'q', 'd': 'q'})
        other.set_own(own, queues)
        chosen.append(other.listeners)
    assert chosen == [peers.listeners] * 3


def test_two_of_the_consumers_of_a_queue_listen() -> None:
    peers = peers_of({f'm{number}': 'q' for number in range(100)})
    assert len(peers.listeners) == listening(peers, 'q') == 2


def test_consumers_with_the_most_queues_listen_first() -> None:
    peers = peers_of({'a': 'q', 'b': 'r', 'c': 'qrs', 'd': 'q', 'e': 'r', 'f': 'qrs'})
    assert sorted(peers.listeners) == ['c', 'f']
    assert peers.listeners_of('q') == ['c', 'f']


def test_with_many_queues_one_consumer_of_each_listens() -> None:
    ten = peers_of({f'{queue}{number}': [f'q{queue}'] for queue in range(10) for number in range(3)})
    assert len(ten.listeners) == 10
    assert {listening(ten, f'q{queue}') for queue in range(10)} == {1}
    six = peers_of({f'{queue}{number}': [f'q{queue}'] for queue in range(6) for number in range(3)})
    assert len(six.listeners) == 12
    many = peers_of({f'{queue}-{number}': [f'q{queue}'] for queue in range(40) for number in range(3)})
    assert len(many.listeners) == 40  # no queue is without one
