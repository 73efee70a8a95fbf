"""The protocol of claims and leases in random interleavings of events."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from .limited import LimitedCluster, LimitedSingle
from .machine import Cluster, Single
from .removing import RemovingCluster, RemovingSingle

pytestmark = pytest.mark.slow

#: `MODEL_EXAMPLES=20` explores twenty times as many examples, and different ones in each run.
MORE = int(os.environ.get('MODEL_EXAMPLES', '0'))

PROFILE = settings(
    max_examples=100 * max(1, MORE),
    stateful_step_count=60,
    deadline=None,
    database=None,
    derandomize=not MORE,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)

TestSingle = Single.TestCase
TestSingle.settings = PROFILE
TestCluster = Cluster.TestCase
TestCluster.settings = PROFILE
TestLimitedSingle = LimitedSingle.TestCase
TestLimitedSingle.settings = PROFILE
TestLimitedCluster = LimitedCluster.TestCase
TestLimitedCluster.settings = PROFILE
TestRemovingSingle = RemovingSingle.TestCase
TestRemovingSingle.settings = PROFILE
TestRemovingCluster = RemovingCluster.TestCase
TestRemovingCluster.settings = PROFILE
