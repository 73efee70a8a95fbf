"""The protocol of claims and leases in random interleavings of events."""

from __future__ import annotations

import pytest

from .exploring import explore
from .limited import LimitedCluster, LimitedSingle
from .machine import Cluster, Protocol, Single
from .publishing import PublishingCluster, PublishingJob, PublishingSingle
from .removing import RemovingCluster, RemovingSingle


@pytest.mark.slow
@pytest.mark.parametrize(
    ('machine', 'examples'),
    [
        (Single, 90),
        (Cluster, 50),
        (LimitedSingle, 15),
        (LimitedCluster, 15),
        (RemovingSingle, 20),
        (RemovingCluster, 15),
        (PublishingSingle, 40),
        (PublishingCluster, 25),
        (PublishingJob, 25),
    ],
)
def test_promises_hold_in_any_order_of_events(machine: type[Protocol], examples: int) -> None:
    explore(machine, examples)
