"""Faults that the state machine found in the product, each as the shortest run that showed it.

The docstring of a test describes the fault, which is repaired.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from .couchdb import Write
from .limited import LimitedCluster
from .machine import PUBLISHED, WRONG, Cluster, Protocol, Single
from .removing import RemovingCluster
from .world import LEASE, Process


@contextmanager
def begun(
    machine: type[Protocol], credit: int = 1, salt: int = 0, wrong: float = 0.0, ahead: int = 0, keeps: bool = False
) -> Iterator[Protocol]:
    """Start three consumers that have sent nothing yet; at the end, check that all work gets done."""
    run = machine()
    try:
        run.begin(skews=(0.0, 0.0, 0.0), credit=credit, salt=salt, wrong=wrong, ahead=ahead, keeps=keeps)
        yield run
        run.at_every_moment()
    finally:
        run.teardown()


def write_of(process: Process) -> Write:
    """Return the write that a process is about to send."""
    assert process.write is not None
    return process.write


def about_to_end_a_lease(run: Protocol, who: int) -> Write:
    """Let a sweeper run, while time passes, until it is about to delete a heartbeat, and return that write."""
    for _ in range(60):
        run.go(who=who, until='write', at=0)
        process = run.world.processes[who]
        if not process.asks:
            run.tick(seconds=0.9)
        elif process.write and any(doc.get('_deleted') for doc in process.write.docs):
            return process.write
    raise AssertionError('the sweeper deletes no heartbeat')


def test_nothing_is_claimed_before_the_first_heartbeat_is_proven() -> None:
    """Other consumers read the two nodes that had missed the heartbeat, and concluded that its lease had expired."""
    with begun(Cluster, credit=2) as run:
        run.go(who=1, until='write', at=0)
        run.land(which=0, at=0, lost=True)
        run.land(which=0, at=2, lost=True)
        run.go(who=1, until='write', at=0)
        assert not run.world.processes[1].held
        run.pause(who=0, at=2)


def test_late_heartbeat_in_conflict_with_its_deletion_does_not_count() -> None:
    """A node that had missed the deletion stored the heartbeat, and the consumer kept messages of others."""
    with begun(Cluster, credit=2) as run:
        run.pause(who=2, at=2)
        run.pause(who=0, at=0)
        run.go(who=0, until='write', at=2)
        run.go(who=0, until='next', at=2)
        run.at_every_moment()


def test_heartbeats_on_a_node_that_missed_the_deletion_do_not_restore_the_lease() -> None:
    """After replication the next heartbeat succeeds: only the deleted leaf shows that the lease has ended."""
    with begun(Cluster, credit=2) as run:
        couchdb, (swept, sweeper, _) = run.world.couchdb, run.world.processes
        run.go(who=0, until='idle', at=0)
        for _ in range(2):
            run.tick(seconds=LEASE / 3)
            run.go(who=1, until='idle', at=0)
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


def test_unproven_deletion_does_not_end_a_lease() -> None:
    """The sweeper had not seen the last heartbeat: one node has the deletion, two have the heartbeat."""
    with begun(Cluster, credit=2) as run:
        couchdb, (holder, sweeper, _) = run.world.couchdb, run.world.processes
        run.go(who=0, until='idle', at=0)
        for _ in range(2):
            run.tick(seconds=LEASE / 3)
            run.go(who=1, until='idle', at=0)
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


def test_lease_survives_a_lost_response_to_a_heartbeat() -> None:
    """The next heartbeat was in conflict with the one before it, and the consumer released all its messages."""
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


@pytest.mark.parametrize('salt', range(6))  # decides which leaf revision wins
@pytest.mark.parametrize('crash', [True, False])
def test_proven_claim_survives_a_conflicting_unproven_claim(salt: int, crash: bool) -> None:
    """The winning leaf was the unproven claim of an ended consumer: the item was released, though another held it."""
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


@pytest.mark.parametrize('salt', range(6))  # decides which leaf revision wins
def test_two_claims_without_a_response_do_not_block_the_message(salt: int) -> None:
    """The claimant of the winning leaf waited for the other one, which never learned of its own leaf."""
    with begun(Cluster, credit=2, salt=salt) as run:
        run.claim_at_once(first=0, at=0)
        run.world.couchdb.synchronise()


def test_two_claims_of_one_consumer_without_a_response_do_not_block_the_message() -> None:
    """Another consumer had parked the message between them. Its claimant waited for itself."""
    with begun(LimitedCluster, credit=2) as run:
        for first, at in ((2, 1), (0, 2), (2, 0), (2, 0), (0, 0)):
            run.claim_at_once(first=first, at=at)


@pytest.mark.parametrize('machine', [Single, Cluster])
@pytest.mark.parametrize('wrong', PUBLISHED)
def test_item_published_while_the_server_clock_was_wrong_is_delivered(machine: type[Protocol], wrong: float) -> None:
    """Items that were published while the clock was ahead were not delivered after it was set back."""
    with begun(machine, wrong=wrong):
        pass  # the context manager checks that all items are delivered


@pytest.mark.parametrize('wrong', [one for one in WRONG if one])
def test_leases_survive_a_change_of_the_server_clock(wrong: float) -> None:
    """A sweep ended the leases of all other consumers when the server's clock was set forward."""
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
def test_leases_survive_a_server_that_hangs(first: int) -> None:
    """The first consumer to run again ended the leases of the others, which had not been able to renew them."""
    with begun(Single, credit=2) as run:
        run.hang(first=first, at=0)


def test_leaf_of_a_removal_that_was_stored_twice_does_not_stay() -> None:
    """Its claimant acknowledged the other leaf, and everybody waited for the claimant to decide about this one."""
    with begun(RemovingCluster, ahead=2, keeps=True) as run:
        assert isinstance(run, RemovingCluster)
        for who, *losses in ((0, False), (2, True, False)):
            run.pause(who=who, at=0)
            for lost in losses:
                run.remove(at=0, lost=lost)


def test_claim_that_is_stored_again_is_held() -> None:
    """Its first try got no response, and what decided about that one released the message of the living holder."""
    with begun(Cluster, ahead=1) as run:
        run.claim_at_once(first=2, at=1)
        run.claim_at_once(first=1, at=1)
        run.hang(first=2, at=2)
