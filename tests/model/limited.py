"""The state machine with items that share a concurrency key: only one of them may be held at a time."""

from __future__ import annotations

from typing import Any, ClassVar

from .machine import Cluster, Single

HEADERS = {'concurrency_key': 'k', 'concurrency_limit': 1}


class LimitedSingle(Single):
    """One node."""

    headers: ClassVar[dict[str, Any]] = HEADERS
    most = 1


class LimitedCluster(Cluster):
    """Three nodes."""

    headers: ClassVar[dict[str, Any]] = HEADERS
    most = 1
