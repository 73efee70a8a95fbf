"""Which consumers listen, which rest, and when these are woken, with a clock that is set."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from types import SimpleNamespace

import pytest

from kombu_couchdb.fleet import attention as module
from kombu_couchdb.fleet.attention import Attention, BellRinger, Peers


class World:
    """Consumers of the queue `q`, and time."""

    def __init__(self, consumers: int = 10) -> None:
        self.now = 1000.0
        self.peers = Peers()
        self.attention: Attention
        for number in range(consumers):
            self.peers.seen({'_id': f'm{number}', 'queues': ['q']})
        self.ranked, others = self.peers.listeners, [f'm{number}' for number in range(consumers)]
        #: A consumer that is no listener by its rank.
        self.other = next(name for name in others if name not in self.ranked)

    def monotonic(self) -> float:
        return self.now

    def update(
        self, own: str, credit: str = 'q', *, queues: str = 'q', quiet: str = '', may_rest: bool = True
    ) -> set[str]:
        """Return the queues that must be read."""
        return self.attention.update(own, [*queues], {*credit}, quiet=quiet, may_rest=may_rest)

    def update_worker(self, credit: str) -> set[str]:
        """Return the same for a worker with a queue `p` for remote control, for which it always has credit."""
        return self.update(self.other, credit + 'p', queues='qp', quiet='p')

    def rest(self, credit: str = 'q') -> Attention:
        """Return the attention of a consumer that rests; its first look was just now."""
        self.update(self.other, credit)
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


# -- who listens


def test_two_of_ten_consumers_listen(world: World) -> None:
    listen = []
    for number in range(10):
        world.attention = Attention(world.peers)
        world.update(f'm{number}')
        if world.attention.listens:
            listen.append(f'm{number}')
            assert world.attention.rank == world.ranked.index(f'm{number}')
            assert world.attention.look_at == inf
    assert sorted(listen) == sorted(world.ranked)


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


def test_when_the_listeners_leave_another_one_listens(world: World) -> None:
    attention = world.rest()
    world.peers.keep({world.other, 'm-none'})
    assert world.update(world.other) == {'q'}  # what happened before is not followed
    assert attention.listens
    assert world.update(world.other) == set()


# -- looks


def test_consumer_rests_only_after_a_look_at_everything_with_credit(world: World) -> None:
    assert world.update(world.other, 'qr', queues='qrs') == set()  # it listens: nobody else serves `r` and `s`
    world.peers.seen({'_id': 'm-more', 'queues': ['r', 's']})
    world.peers.seen({'_id': 'm-most', 'queues': ['q', 'r', 's']})
    world.peers.seen({'_id': 'm-last', 'queues': ['q', 'r', 's']})
    world.peers.set_own(world.other, 'qr')
    assert world.update(world.other, 'qr', queues='qrs') == {'q', 'r'}
    assert not world.attention.listens
    assert world.update(world.other, 'qr', queues='qrs') == set()


@pytest.mark.parametrize(('consumers', 'seconds'), [(3, 0.875), (10, 2.625), (50, 13.125), (1000, 26.25)])
def test_looks_are_rarer_the_more_consumers_there_are(world: World, consumers: int, seconds: float) -> None:
    for number in range(10, consumers):
        world.peers.seen({'_id': f'm{number}', 'queues': ['q']})
    if consumers == 3:
        world.peers.keep({*world.ranked, world.other})
    world.other = next(
        f'm{n}'
        for n in range(consumers)
        if f'm{n}' in world.peers.of('q', world.other) and f'm{n}' not in world.peers.listeners
    )
    attention = world.rest()
    assert attention.look_at == pytest.approx(world.now + seconds)
    world.now += seconds + 0.001
    assert world.update(world.other) == {'q'}
    assert attention.look_at == pytest.approx(world.now + seconds)


def test_consumer_without_credit_does_not_look(world: World) -> None:
    attention = world.rest('')
    assert attention.look_at == inf
    world.now += 100.0
    assert world.update(world.other, '') == set()


def test_regained_credit_for_one_queue_makes_it_look_there(world: World) -> None:
    for name in ('m0', 'm1', 'm2'):
        world.peers.seen({'_id': name, 'queues': ['q', 'r']})
    own = next(name for name in ('m0', 'm1', 'm2') if name not in world.peers.listeners)
    world.update(own, 'q', queues='qr')
    world.now += 0.1
    assert world.update(own, 'qr', queues='qr') == {'r'}


def test_one_of_those_that_become_free_after_long_tasks_listens(world: World) -> None:
    world.rest('')
    world.now += 20.0
    assert world.update(world.other) == {'q'}
    assert world.attention.listens
    world.now += 9.9
    world.update(world.other)
    assert world.attention.listens
    world.now += 0.2
    assert world.update(world.other) == {'q'}
    assert not world.attention.listens


# -- the bell


def test_bell_makes_it_look_soon(world: World) -> None:
    attention = world.rest()
    attention.heard('q')
    assert world.now <= attention.look_at <= world.now + 0.05
    assert world.update(world.other) == set()
    world.now = attention.look_at
    assert world.update(world.other) == {'q'}
    assert attention.hurries('q')
    assert not attention.hurries('q')
    assert attention.look_at > world.now + 0.5


def test_bell_changes_nothing_for_a_listener_and_without_credit(world: World) -> None:
    attention = world.rest()
    before = attention.look_at
    attention.heard('r')
    assert attention.look_at == before
    assert not attention.hurries('r')
    attention = world.rest('')
    attention.heard('q')
    assert attention.look_at == inf
    assert not attention.hurries('q')
    world.update(world.ranked[0])
    attention.heard('q')
    assert world.update(world.ranked[0]) == set()
    assert not attention.hurries('q')  # it listens


# -- consumers that listen because they found work


def test_consumer_that_found_a_message_listens_for_some_time(world: World) -> None:
    attention = world.rest()
    attention.won(0)
    assert world.update(world.other) == {'q'}
    assert (attention.listens, attention.rank) == (True, None)
    world.now += 10.1
    assert world.update(world.other) == {'q'}
    assert not attention.listens


def test_after_a_burst_only_some_of_those_that_found_a_message_listen(world: World) -> None:
    attention = world.rest()
    attention.won(100)
    world.update(world.other)
    assert not attention.listens
    attention.won(2)
    world.update(world.other)
    assert attention.listens
    world.now += 9.0
    attention.won(100)  # it listens already
    world.now += 9.0
    world.update(world.other)
    assert attention.listens


def test_time_without_credit_does_not_count(world: World) -> None:
    attention = world.rest()
    attention.won(0)
    world.update(world.other)
    world.update(world.other, '')
    for _ in range(6):
        world.now += 5.0
        world.update(world.other, '')
    world.update(world.other)
    assert attention.listens


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


# -- without credit


def test_listener_does_not_follow_while_it_knows_that_messages_wait(world: World) -> None:
    world.update(world.ranked[0], '')
    world.attention.bell.waits('q', 0, ['a'])
    assert world.update(world.ranked[0], '') == set()
    assert not world.attention.listens
    assert world.attention.followed == set()
    world.attention.bell.forget('q')
    assert world.update(world.ranked[0], '') == {'q'}
    assert world.attention.listens


def test_listener_follows_its_other_queues_while_messages_wait_in_one(world: World) -> None:
    world.update(world.ranked[0], '')
    assert world.attention.followed == {'q'}  # to ring for others
    world.peers.set_own(world.ranked[0], 'qr')
    world.update(world.ranked[0], 'r', queues='qr')
    world.attention.bell.waits('q', 0, ['a'])
    world.update(world.ranked[0], 'r', queues='qr')
    assert world.attention.listens
    assert world.attention.followed == {'r'}


def test_other_consumer_without_credit_follows_for_a_second_only(world: World) -> None:
    attention = world.rest()
    attention.won(0)
    world.update(world.other)
    world.now += 0.5
    world.update(world.other, '')
    assert attention.listens
    assert attention.followed == {'q'}
    world.now += 0.6
    world.update(world.other, '')
    assert not attention.listens
    assert attention.look_at == inf


# -- a queue for broadcasts


def test_most_looks_leave_out_the_queue_for_broadcasts(world: World) -> None:
    assert world.update_worker('q') == {'q', 'p'}
    assert not world.attention.listens  # although its queue for broadcasts has no other consumer
    looks = []
    for _ in range(12):
        world.now = world.attention.look_at
        looks.append(world.update_worker('q'))
    assert looks.count({'q'}) == 10
    assert looks.count({'q', 'p'}) == 2


def test_busy_worker_does_not_listen_because_of_its_queue_for_broadcasts(world: World) -> None:
    world.update_worker('q')
    world.attention.won(0)
    world.now += 2.0
    world.update_worker('')
    assert not world.attention.listens
    world.now += 60.0
    assert world.update_worker('q') == {'q', 'p'}  # it begins to listen: others are evidently busy
    assert world.attention.listens
    world.now += 60.0
    world.update_worker('q')
    assert not world.attention.listens


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


@pytest.mark.parametrize(('head', 'rang'), [('', []), ('cd', []), ('bc', [0.1])], ids=repr)
def test_bell_rings_if_some_of_the_messages_are_left(world: World, head: str, rang: list[float]) -> None:
    bell = BellRinger()
    assert (bell.due, bell.due_at, bell.knows('q')) == ([], inf, False)
    bell.waits('q', 0, ['a', 'b'])
    assert rings(bell, world, 0.5, head) == rang
    assert bell.knows('q') == bool(rang)


def test_bell_rings_for_queues_that_the_consumer_serves_and_cannot_take_from(world: World) -> None:
    bell = BellRinger()
    for queue in 'qrs':
        bell.waits(queue, 0, ['a'])
    world.now += 0.09
    bell.waits('r', 0, ['a', 'b'])  # the time counts from the first message
    bell.forget('q')
    bell.forget('q')
    bell.keep({'q', 'r'})
    assert bell.due_at == pytest.approx(world.now + 0.01)
    world.now += 10.0
    assert bell.due == ['r']


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


def test_pauses_begin_anew_with_other_messages(world: World) -> None:
    bell = BellRinger()
    bell.waits('q', 0, ['a'])
    rings(bell, world, 20.0)
    assert rings(bell, world, 5.0, 'xyz') == []
    bell.waits('q', 0, ['x'])
    assert rings(bell, world, 5.0, 'x') == pytest.approx([0.1, 4.1])


@pytest.mark.parametrize('rank', [0, 3, None])
def test_bell_of_another_consumer_postpones_the_own(world: World, rank: int | None) -> None:
    bell = BellRinger()
    bell.waits('q', rank, ['a'])
    world.now += 0.05
    bell.heard('q')
    assert rings(bell, world, 2.0) == []
    assert len(rings(bell, world, 2.1)) == 1


def test_bell_just_before_the_messages_postpones_the_own(world: World) -> None:
    bell = BellRinger()
    bell.heard('q')
    world.now += 0.3
    bell.waits('q', 0, ['a'])
    bell.waits('r', 0, ['b'])
    assert bell.due_at == pytest.approx(world.now + 0.1)  # another queue
    bell.forget('r')
    assert bell.due_at == pytest.approx(world.now + 1.7)


@pytest.mark.parametrize('age', [0.0, 5.0, 60.0])
def test_listener_notices_within_two_seconds_that_the_messages_are_gone(world: World, age: float) -> None:
    """Until then it does not follow the feed, and would not learn of new ones."""
    bell = BellRinger()
    bell.waits('q', 1, ['a'])
    rings(bell, world, age, 'a')
    gone = world.now
    rings(bell, world, 2.01, 'new')
    assert not bell.knows('q'), gone
