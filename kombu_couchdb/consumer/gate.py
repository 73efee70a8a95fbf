"""The gate: what the I/O thread asks before it claims messages that may have to wait; see the room `limits`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Any, Protocol

from ..couchdb.client import Document
from ..couchdb.write_result import WriteResult
from ..fleet.attention import Peers
from ..leases.lease import Lease
from ..queues.store import LeaseStats, Store
from ..queues.topology import Topology
from ..rooms import room

#: A document to be written, and the function that takes the result of the write.
Write = tuple[Mapping[str, Any], Callable[[WriteResult], None]]


class Gate(Protocol):
    """The gate of one consumer; for its I/O thread alone. In each cycle its methods are called in the order here.

    Each method *raises* the errors of `Client` if it makes requests.
    """

    @property
    def holds_slots(self) -> bool:
        """Whether this consumer holds something that ends with its lease."""

    def due(self, credit: Mapping[str, int]) -> float:
        """Return the monotonic time of the next cycle that the gate needs, with this credit by queue; or infinity."""

    def begin(self, in_use: set[str]) -> None:
        """Begin a cycle. `in_use` has the ids of the messages that are held, or whose tasks may still be running."""

    def saw(self, key: str) -> None:
        """Note that messages are parked under a key, perhaps by another consumer."""

    def ready(self, credit: Mapping[str, int]) -> list[Document]:
        """Return parked messages of the queues with credit that can be claimed now; they still have to be admitted."""

    def admit(
        self, taken: dict[str, list[Document]], writes: list[Write], *, needs_slot: bool = True
    ) -> dict[str, list[Document]]:
        """Return those of the messages that may be claimed, by queue; add to `writes` what parks the others."""

    def free(self, writes: list[Write]) -> None:
        """Add to `writes` what returns permits that no message uses, and what wakes messages for them."""

    def settle(self, in_use: set[str]) -> list[Document]:
        """End a cycle, after its writes; return the messages that were woken, to be claimed again."""

    def sweep(self, leases: LeaseStats, own: str, expired: Collection[str]) -> None:
        """Return the permits of consumers that are gone, and look for messages that nobody has woken."""

    def finish(self, writes: list[Write]) -> bool:
        """Add to `writes` what returns all permits but those of tasks that may run on; tell whether there are such."""

    def wake_last(self) -> list[Write]:
        """Return the writes that wake messages for the permits that were returned last."""


class OpenGate:
    """A gate that admits every message at once, also those with a concurrency key or a rate.

    It wakes no message that a process with the room `limits` has parked.
    """

    holds_slots = False

    def due(self, credit: Mapping[str, int]) -> float:
        """Return infinity."""
        return inf

    def begin(self, in_use: set[str]) -> None:
        """Do nothing."""

    def saw(self, key: str) -> None:
        """Do nothing."""

    def ready(self, credit: Mapping[str, int]) -> list[Document]:
        """Return none."""
        return []

    def admit(
        self, taken: dict[str, list[Document]], writes: list[Write], *, needs_slot: bool = True
    ) -> dict[str, list[Document]]:
        """Return all messages."""
        return taken

    def free(self, writes: list[Write]) -> None:
        """Do nothing."""

    def settle(self, in_use: set[str]) -> list[Document]:
        """Return none."""
        return []

    def sweep(self, leases: LeaseStats, own: str, expired: Collection[str]) -> None:
        """Do nothing."""

    def finish(self, writes: list[Write]) -> bool:
        """Return False."""
        return False

    def wake_last(self) -> list[Write]:
        """Return none."""
        return []


def gate(store: Store, lease: Lease, topology: Topology, peers: Peers) -> Gate:
    """Return the gate of a consumer: that of the room `limits`, or an open one."""
    limits = room('limits')
    return limits.LimitsGate(store, lease, topology, peers) if limits else OpenGate()
