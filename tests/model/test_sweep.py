"""A sweep, interrupted after each of its requests by the one who is swept, and by one who takes what is given back."""

from __future__ import annotations

import pytest

from .machine import Cluster, Protocol, Single
from .test_findings import begun
from .world import LEASE


@pytest.mark.parametrize('steps', range(16))
@pytest.mark.parametrize('machine', [Single, Cluster])
def test_holder_that_wakes_up_while_it_is_swept(machine: type[Protocol], steps: int) -> None:
    holder, sweeper, other = 0, 1, 2
    with begun(machine, credit=2) as run:
        for who in (holder, sweeper, other):
            run.go(who=who, until='idle', at=0)
        run.take(which=0)
        assert run.world.processes[holder].held
        run.tick(seconds=LEASE + 5.0)
        for _ in range(steps):
            run.go(who=sweeper, until='next', at=0)
            run.at_every_moment()
        for who in (holder, other, sweeper, holder, other):
            run.go(who=who, until='idle', at=0)
            run.at_every_moment()
