"""The gate: what the I/O thread asks before it claims messages that may have to wait; see the room `limits`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from ..couchdb.client import Document
from ..leases.lease import Lease
from ..leases.peers import Peers
from ..queues.store import LeaseStats, Store
from ..queues.topology import Topology
from ..rooms import room
from .pending_writes import PendingWrite


class Gate:
    """The gate of one consumer; for its I/O thread alone. This one is open: it admits every message at once.

    It admits those with a concurrency key or a rate, too, and wakes no message that a process with the room `limits`
    has parked. In each cycle the methods are called in the order here. Each *raises* the errors of `Client` if it makes
    requests.
    """

    def due(self, credit: Mapping[str, int]) -> float:
        """Return the monotonic time of the next cycle that the gate needs, with this credit by queue; or infinity."""
        return inf

    def begin(self, in_use: set[str]) -> None:
        """Begin a cycle. `in_use` has the ids of the messages that are held, or whose tasks may still be running."""

    def saw(self, key: str) -> None:
        """Note that messages are parked under a key, perhaps by another consumer."""

    def ready(self, credit: Mapping[str, int]) -> list[Document]:
        """Return parked messages of the queues with credit that can be claimed now; they still have to be admitted."""
        return []

    def admit(
        self, taken: dict[str, list[Document]], writes: list[PendingWrite], *, needs_slot: bool = True
    ) -> dict[str, list[Document]]:
        """Return those of the messages that may be claimed, by queue; add to `writes` what parks the others."""
        return taken

    def wake(self, writes: list[PendingWrite]) -> None:
        """Add to `writes` what wakes parked messages, for permits that were returned in earlier cycles."""

    def free(self, writes: list[PendingWrite]) -> None:
        """Add to `writes` what returns permits that no message uses; makes no request."""

    def holds_slots(self) -> bool:
        """Tell whether messages of this consumer use something that ends with its lease."""
        return False

    def settle(self, in_use: set[str]) -> list[Document]:
        """End a cycle, after its writes; return the messages that were woken, to be claimed again."""
        return []

    def sweep(self, leases: LeaseStats, own: str, expired: Collection[str]) -> None:
        """Return the permits of consumers that are gone, and look for messages that nobody has woken."""


def gate(store: Store, lease: Lease, topology: Topology, peers: Peers) -> Gate:
    """Return the gate of a consumer: that of the room `limits`, or an open one."""
    limits = room('limits')
    made: Gate = limits.LimitsGate(store, lease, topology, peers) if limits else Gate()
    return made
