"""Sweeps that are interrupted after each request, by the swept consumer and by one that claims released messages."""

from __future__ import annotations

import pytest

from .machine import Cluster, Protocol, Single
from .test_findings import begun
from .world import LEASE


@pytest.mark.parametrize('steps', range(16))
@pytest.mark.parametrize('machine', [Single, Cluster])
def test_consumer_that_resumes_during_its_sweep_shares_no_message(machine: type[Protocol], steps: int) -> None:
    holder, sweeper, other = 0, 1, 2
    with begun(machine, credit=2) as run:
        for who in (holder, sweeper, other):
            run.go(who=who, until='idle', at=0)
        run.receive(which=0)
        assert run.world.processes[holder].held
        for _ in range(3):  # the sweeper watches; the others send no heartbeats
            run.tick(seconds=LEASE / 3)
            run.go(who=sweeper, until='idle', at=0)
        run.tick(seconds=LEASE / 6)
        for _ in range(steps):
            run.go(who=sweeper, until='next', at=0)
            run.at_every_moment()
        for who in (holder, other, sweeper, holder, other):
            run.go(who=who, until='idle', at=0)
            run.at_every_moment()


def test_sweep_ends_the_lease_of_a_silent_consumer() -> None:
    """The sweeps of the test above do so at some step."""
    with begun(Single, credit=2) as run:
        for who in (0, 1):
            run.go(who=who, until='idle', at=0)
        before = run.world.processes[0].consumer.id
        for _ in range(4):
            run.tick(seconds=LEASE / 3)
            run.go(who=1, until='idle', at=0)
        assert before not in [row['id'] for row in run.world.couchdb.read('/_all_docs', {}, None, 0)['rows']]
