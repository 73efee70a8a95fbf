"""Which consumers listen, which rest, and when these are woken (`kombu_couchdb.fleet.attention`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest

from kombu_couchdb.fleet import attention as module
from kombu_couchdb.fleet.attention import Attention, BellRinger, Peers

# -- the consumers of a queue, and the listeners by rank


def peers_of(consumers: Mapping[str, Iterable[str]]) -> Peers:
    peers = Peers()
    for name, queues in consumers.items():
        peers.seen({'_id': name, 'queues': list(queues)})
    return peers


@pytest.fixture
def peers() -> Peers:
    """Four consumers of `q`, one of which also consumes `r`, and one consumer of `r` only."""
    return peers_of({'d': 'q', 'b': 'qr', 'a': 'q', 'c': 'q', 'x': 'r'})


def test_all_consumers_agree_on_the_order(peers: Peers) -> None:
    assert [peers.consumers_of('q', name) for name in 'abcd'] == [['a', 'b', 'c', 'd']] * 4
    assert [peers.consumers_of('r', name) for name in 'bx'] == [['b', 'x']] * 2


def test_last_seen_document_counts(peers: Peers) -> None:
    peers.seen({'_id': 'a', 'queues': ['r']})
    peers.seen({'_id': 'c', '_deleted': True})
    peers.seen({'_id': 'unknown', '_deleted': True})
    assert peers.consumers_of('q', 'me') == ['b', 'd', 'me']
    assert peers.consumers_of('r', 'b') == ['a', 'b', 'x']
    peers.keep({'b', 'unknown'})
    assert peers.consumers_of('q', 'me') == ['b', 'me']


def test_all_consumers_choose_the_same_listeners(peers: Peers) -> None:
    chosen = []
    for own, queues in [('a', 'q'), ('b', 'qr'), ('x', 'r')]:
        other = peers_of({'x': 'r', 'c': 'q', 'b': 'qr', 'a': 'q', 'd': 'q'})
        other.set_own(own, queues)
        chosen.append(other.listeners)
    assert chosen == [peers.listeners] * 3


def test_two_of_the_consumers_of_a_queue_listen() -> None:
    peers = peers_of({f'm{number}': 'q' for number in range(100)})
    assert len(peers.listeners) == len(peers.listeners_of('q')) == 2


def test_consumers_with_the_most_queues_listen_first() -> None:
    peers = peers_of({'a': 'q', 'b': 'r', 'c': 'qrs', 'd': 'q', 'e': 'r', 'f': 'qrs'})
    assert sorted(peers.listeners) == ['c', 'f']
    assert peers.listeners_of('q') == ['c', 'f']


def test_with_many_queues_one_consumer_of_each_listens() -> None:
    ten = peers_of({f'{queue}{number}': [f'q{queue}'] for queue in range(10) for number in range(3)})
    assert len(ten.listeners) == 10
    assert {len(ten.listeners_of(f'q{queue}')) for queue in range(10)} == {1}
    six = peers_of({f'{queue}{number}': [f'q{queue}'] for queue in range(6) for number in range(3)})
    assert len(six.listeners) == 12
    many = peers_of({f'{queue}-{number}': [f'q{queue}'] for queue in range(40) for number in range(3)})
    assert len(many.listeners) == 40  # no queue is without one


# -- who listens, and when the others look


class World:
    """Consumers of the queue `q`, and a clock that is set."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.peers = Peers()
        self.attention: Attention
        consumers = [f'm{number}' for number in range(10)]
        for name in consumers:
            self.peers.seen({'_id': name, 'queues': ['q']})
        self.ranked = self.peers.listeners
        #: A consumer that is no listener by its rank.
        self.other = next(name for name in consumers if name not in self.ranked)

    def monotonic(self) -> float:
        return self.now

    def update(
        self, own: str, credit: str = 'q', *, queues: str = 'q', quiet: str = '', may_rest: bool = True
    ) -> set[str]:
        """Return the queues that must be read."""
        return self.attention.update(own, [*queues], {*credit}, quiet=quiet, may_rest=may_rest)

    def rest(self) -> Attention:
        """Return the attention of a consumer that rests; its first look was just now."""
        self.update(self.other)
        assert not self.attention.listens
        return self.attention


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(module, 'time', world)
    world.attention = Attention(world.peers)
    monkeypatch.setattr(
        module, 'random', SimpleNamespace(uniform=lambda least, most: (least + most) / 2, random=lambda: 0.5)
    )
    return world


def test_who_has_a_queue_alone_or_no_broadcasts_database_listens(world: World) -> None:
    world.update(world.other, 'qr', queues='qr')
    assert world.attention.listens
    attention = Attention(Peers())
    attention.update('me', ['q'], {'q'}, may_rest=True)
    assert (attention.listens, attention.rank, attention.followed) == (True, 0, {'q'})
    world.rest()
    for credit in ('q', ''):
        world.update(world.other, credit, may_rest=False)
        assert world.attention.listens
    assert world.update(world.other, '', queues='') == set()
    assert not world.attention.listens


@pytest.mark.parametrize(('consumers', 'seconds'), [(10, 2.625), (1000, 26.25)])
def test_looks_are_rarer_the_more_consumers_there_are(world: World, consumers: int, seconds: float) -> None:
    for number in range(10, consumers):
        world.peers.seen({'_id': f'm{number}', 'queues': ['q']})
    world.other = next(name for name in world.peers.consumers_of('q', world.other) if name not in world.peers.listeners)
    attention = world.rest()
    assert attention.look_at == pytest.approx(world.now + seconds)
    world.now += seconds + 0.001
    assert world.update(world.other) == {'q'}
    assert attention.look_at == pytest.approx(world.now + seconds)


# -- consumers that listen because they found work


def test_consumer_that_found_a_message_listens_for_some_time(world: World) -> None:
    attention = world.rest()
    attention.won(0)
    assert world.update(world.other) == {'q'}
    assert (attention.listens, attention.rank) == (True, None)
    world.now += 10.1
    assert world.update(world.other) == {'q'}
    assert not attention.listens


def test_consumer_stops_listening_after_losses(world: World) -> None:
    attention = world.rest()
    attention.won(0)
    attention.lost()
    world.update(world.other)
    assert attention.listens
    attention.won(0)
    attention.lost()
    attention.lost()
    assert world.update(world.other) == {'q'}  # the last look
    assert not attention.listens
    world.update(world.ranked[1])
    assert attention.listens  # by its rank


# -- a queue for broadcasts


def test_most_looks_leave_out_the_queue_for_broadcasts(world: World) -> None:
    looks = []
    for _ in range(13):
        looks.append(world.update(world.other, 'qp', queues='qp', quiet='p'))
        assert not world.attention.listens  # although its queue for broadcasts has no other consumer
        world.now = world.attention.look_at
    assert looks[0] == {'q', 'p'}
    assert looks.count({'q'}) == 10


# -- when the consumers that rest are woken


def rings(bell: BellRinger, world: World, seconds: float, head: str = 'abc') -> list[float]:
    """Let time pass while the messages `head` wait; return when the bell rang, in seconds from now on."""
    rang, begun = list[float](), world.now
    while bell.due_at <= begun + seconds:
        world.now = max(world.now, bell.due_at)
        for queue in bell.due:
            if bell.check(queue, [*head]):
                rang.append(round(world.now - begun, 3))
                bell.heard(queue)
    world.now = begun + seconds
    return rang


@pytest.mark.parametrize(
    ('rank', 'expected'), [(None, [2.2, 4.4, 8.8, 17.6, 33.0, 33.0]), (0, [4.0, 6.0, 10.0, 18.0, 34.0, 34.0])]
)
def test_pauses_double_while_the_same_messages_wait(world: World, rank: int | None, expected: list[float]) -> None:
    """A listener rings only when it reads, every two seconds."""
    bell = BellRinger()
    bell.waits('q', rank, ['a'])
    pauses = [after - before for before, after in pairwise(rings(bell, world, 200.0))]
    assert pauses[:6] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(('rank', 'seconds'), [(0, 0.1), (1, 0.2), (2, 0.3), (None, 1.5)])
def test_the_listener_of_the_first_rank_rings_first(world: World, rank: int | None, seconds: float) -> None:
    bell = BellRinger()
    bell.waits('q', rank, ['a'])
    assert bell.knows('q')
    assert not bell.knows('r')
    assert bell.due == []
    assert bell.due_at == pytest.approx(world.now + seconds)
    world.now += seconds
    assert bell.due == ['q']
    assert bell.check('q', ['a'])


def test_bell_just_before_the_messages_postpones_the_own(world: World) -> None:
    bell = BellRinger()
    bell.heard('q')
    world.now += 0.3
    bell.waits('q', 0, ['a'])
    assert bell.due_at == pytest.approx(world.now + 1.7)


def test_listener_notices_within_two_seconds_that_the_messages_are_gone(world: World) -> None:
    """Until then it does not follow the feed, and would not learn of new ones."""
    bell = BellRinger()
    bell.waits('q', 1, ['a'])
    rings(bell, world, 60.0, 'a')
    rings(bell, world, 2.01, 'new')
    assert not bell.knows('q')


def test_quiet_queue_is_read_once_a_second_and_when_all_others_are_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Attention(peers_of({'me': ['q', 'quiet']}))

    def unread(*queues: str) -> set[str]:
        attention.unread_quiet = {'quiet'}  # the consumer is busy, and follows no feed
        return attention.update('me', queues, {*queues}, quiet={'quiet'}, may_rest=True)

    assert unread('q', 'quiet') == {'quiet'}
    assert unread('q', 'quiet') == set()
    assert time.monotonic() < attention.look_at < inf
    monkeypatch.setattr(module, '_QUIET_SECONDS', 0.0)
    for queues in (('q', 'quiet'), ('quiet',)):
        attention = Attention(peers_of({'me': ['q', 'quiet']}))
        assert 'quiet' in unread(*queues)
    assert time.monotonic() < attention.look_at, 'nothing is left to be read'
