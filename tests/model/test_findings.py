"""What the machine found in the product, each as the shortest run that showed it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .couchdb import Write
from .machine import PUBLISHED, WRONG, Cluster, Protocol, Single
from .world import LEASE, Process


@contextmanager
def begun(machine: type[Protocol], credit: int = 1, salt: int = 0, wrong: float = 0.0) -> Iterator[Protocol]:
    """Three consumers that have done nothing yet; in the end everything comes to rest."""
    run = machine()
    try:
        run.begin(skews=(0.0, 0.0, 0.0), credit=credit, salt=salt, wrong=wrong)
        yield run
        run.at_every_moment()
    finally:
        run.teardown()


def write_of(process: Process) -> Write:
    """Return the write that a process is about to send."""
    assert process.write is not None
    return process.write


def about_to_end_a_lease(run: Protocol, who: int) -> Write:
    """Let a sweeper go on, while time passes, until it is about to delete a heartbeat, and return that write."""
    for _ in range(60):
        run.go(who=who, until='write', at=0)
        process = run.world.processes[who]
        if not process.asks:
            run.tick(seconds=0.9)
        elif process.write and any(doc.get('_deleted') for doc in process.write.docs):
            return process.write
    raise AssertionError('it does not')


def test_nothing_is_claimed_before_the_first_heartbeat_is_proven() -> None:
    """Others looked for a heartbeat on two nodes that had missed it, and took its consumer for gone."""
    with begun(Cluster, credit=2) as run:
        run.go(who=1, until='write', at=0)
        run.land(which=0, at=0, lost=True)
        run.land(which=0, at=2, lost=True)
        run.go(who=1, until='write', at=0)
        assert not run.world.processes[1].held
        run.pause(who=0, at=2)


def test_late_heartbeat_beside_its_own_deletion_is_none() -> None:
    """A node that had missed the deletion accepted it, and the consumer held on to what others had been given."""
    with begun(Cluster, credit=2) as run:
        run.pause(who=2, at=2)
        run.pause(who=0, at=0)
        run.go(who=0, until='write', at=2)
        run.go(who=0, until='next', at=2)
        run.at_every_moment()


def test_swept_consumer_does_not_come_back_by_heartbeats_that_a_node_missed_the_deletion_for() -> None:
    """The next heartbeat is clean, when all nodes have heard of both: only the other leaf tells that the lease was ended."""
    with begun(Cluster, credit=2) as run:
        couchdb, (swept, sweeper, _) = run.world.couchdb, run.world.processes
        run.go(who=0, until='idle', at=0)
        run.tick(seconds=LEASE + 5.0)
        deletion = about_to_end_a_lease(run, 1)
        couchdb.land(deletion, 0, lost=True)
        run.go(who=1, until='idle', at=1)
        run.go(who=1, until='idle', at=1)
        assert sorted(sweeper.held) == ['a', 'b']
        run.go(who=0, until='write', at=0)
        run.go(who=0, until='idle', at=0)
        for _ in range(2):
            couchdb.synchronise()
            run.tick(seconds=LEASE / 3)
            run.go(who=1, until='idle', at=1)
            run.go(who=0, until='idle', at=0)
            run.at_every_moment()
        assert not swept.held


def test_lease_ends_only_if_that_is_proven() -> None:
    """A heartbeat came between reading the last one and deleting it: one node has the deletion, two have the heartbeat."""
    with begun(Cluster, credit=2) as run:
        couchdb, (holder, sweeper, _) = run.world.couchdb, run.world.processes
        run.go(who=0, until='idle', at=0)
        run.tick(seconds=LEASE + 5.0)
        run.go(who=0, until='write', at=0)
        deletion, beat = about_to_end_a_lease(run, 1), write_of(holder)
        for node in (1, 2):
            couchdb.land(beat, node)
        for node in (0, 1, 2):
            couchdb.land(deletion, node)
        run.go(who=0, until='next', at=1)
        for _ in range(3):
            run.go(who=1, until='idle', at=1)
            run.at_every_moment()
        assert (sorted(holder.held), sorted(sweeper.held)) == (['a', 'b'], [])


def test_lease_outlives_a_heartbeat_whose_answer_was_lost() -> None:
    """The next heartbeat was in conflict with the one before it, and the consumer gave up all that it held."""
    with begun(Single) as run:
        run.go(who=0, until='idle', at=0)
        [held] = run.world.processes[0].held
        run.tick(seconds=LEASE / 3)
        run.go(who=0, until='write', at=0)
        run.land(which=0, at=0, lost=False)
        run.cut(which=0)
        run.go(who=0, until='idle', at=0)
        run.go(who=0, until='idle', at=0)
        assert list(run.world.processes[0].held) == [held]


@pytest.mark.parametrize('salt', range(6))  # whose leaf readers see is a coin
@pytest.mark.parametrize('crash', [True, False])
def test_claim_that_stands_beside_another_s(salt: int, crash: bool) -> None:
    """A consumer was gone whose void claim was the one that readers saw: it was released, though another held the item."""
    with begun(Cluster, credit=2, salt=salt) as run:
        loser, holder = run.world.processes[:2]
        for who in (0, 1):
            run.go(who=who, until='write', at=0)
            run.go(who=who, until='write', at=0)
        run.world.couchdb.land(write_of(loser), 0)
        for node in (1, 2):
            run.world.couchdb.land(write_of(holder), node)
            run.world.couchdb.land(write_of(loser), node)
        for who in (1, 0):
            run.go(who=who, until='next', at=0)
        assert (sorted(holder.held), sorted(loser.held)) == (['a', 'b'], [])
        if crash:
            run.crash(who=0)
        run.world.couchdb.synchronise()
        for _ in range(2):
            run.pause(who=0, at=0)
            run.at_every_moment()
            assert sorted(holder.held) == ['a', 'b']


@pytest.mark.parametrize('machine', [Single, Cluster])
@pytest.mark.parametrize('wrong', PUBLISHED)
def test_item_that_was_published_while_the_clock_was_wrong(machine: type[Protocol], wrong: float) -> None:
    """A clock that was ahead and was set back hid what was ready."""
    with begun(machine, wrong=wrong):
        pass  # in the end all is done


@pytest.mark.parametrize('wrong', [one for one in WRONG if one])
def test_leases_outlive_a_clock_that_is_set(wrong: float) -> None:
    """A sweep ended the leases of all the others when the server's clock was set forward."""
    with begun(Single, credit=2) as run:
        for who in (0, 1, 2):
            run.go(who=who, until='idle', at=0)
        ids = [process.consumer.id for process in run.world.processes]
        run.set_server_clock(wrong=wrong)
        for _ in range(6):
            run.tick(seconds=LEASE / 3)
            for who in (2, 1, 0):
                run.go(who=who, until='idle', at=0)
        assert [process.consumer.id for process in run.world.processes] == ids


@pytest.mark.parametrize('first', range(3))
def test_leases_outlive_a_server_that_hangs(first: int) -> None:
    """Whoever came back first ended the leases of the others, which had not been able to prolong them."""
    with begun(Single, credit=2) as run:
        run.hang(first=first, at=0)
