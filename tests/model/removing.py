"""The state machine with an operator who removes one of the items."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .machine import NODE, Cluster, Protocol, Single
from .world import Operator


class Removing(Protocol):
    """An operator removes the item `a`, and tries again if the connection broke."""

    operator: Operator | None = None

    @rule(at=NODE, lost=st.sampled_from([False, False, True]))
    @precondition(lambda self: 'a' not in self.world.removed or (self.operator and self.operator.asks))
    def remove(self, at: int, lost: bool) -> None:
        """An operator reads the item, or writes what was read before, or loses the connection instead."""
        if self.operator is None or self.operator.ended:
            self.world.unwanted.add('a')
            self.operator = Operator(self.world, 'a')
        elif lost:
            self.operator.cut()
        else:
            self.operator.go(at)
        while self.operator.asks and not self.operator.write:
            self.operator.go(at)

    def end_faults(self) -> None:
        while self.operator is not None and self.operator.asks:
            self.operator.go()
        super().end_faults()


class RemovingSingle(Removing, Single):
    """One node."""


class RemovingCluster(Removing, Cluster):
    """Three nodes."""
