"""Outbox: where a worker's tasks hand over their results, in each process of the worker.

In a child of a prefork pool the relay sends them to the parent process; in other processes, and for other pools, the
pipeline of the same process takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_couchdb.couchdb.fork_safety import reset_in_child

from .batch_writer import BatchWriter
from .handed import Handed
from .pipeline import Pipeline
from .prefork_relay import Kind, Relay
from .store import Recent, Store, no_wait

__all__ = ['Outbox']

#: A larger result is not handed over: its task waits until it is stored. In bytes.
MAX_BYTES = 100_000

#: How much longer than the client's timeouts a task waits for the process that stores its result, in seconds.
_GRACE_SECONDS = 1.0

#: The results that a child has handed over last: before it reads one of them, it waits until they are stored.
_REMEMBERED = 1000


class Outbox:
    """Takes the results for one store. In a process without a worker, it takes none."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._timeout = sum(store.client.timeouts) + _GRACE_SECONDS
        self._relay = Relay(self._timeout)
        self.writer = BatchWriter(store)
        self.pipeline = Pipeline(self.writer, self._relay)
        self._handed: Recent[None] = Recent(_REMEMBERED)
        reset_in_child(self)

    def reset(self) -> None:
        """Start over in a forked child; `pipeline` resets itself."""
        self._relay.reset()
        self._handed.clear()

    def open(self, *, serve_children: bool) -> None:
        """Take results from now on; with `serve_children`, also those of children that are forked from now on."""
        self._store.before_access = self.settle
        self.pipeline.open(serve_children=serve_children)

    def close(self) -> None:
        """Store what was handed over, see `Pipeline.close`, and take no more results."""
        self.pipeline.close()
        self._store.before_access = no_wait

    @property
    def is_open(self) -> bool:
        """Whether this process can hand over results."""
        return self.pipeline.is_open or self._relay.is_child

    def hand_over(self, result: Handed, *, confirm: bool) -> bool:
        """Store a result soon, or with `confirm` now; return False if the caller must store it."""
        if result.size > MAX_BYTES:
            return False
        if self._relay.is_child:
            if not self._relay.send(Kind.CONFIRM if confirm else Kind.HAND, result.to_bytes()):
                return False
            if not (confirm or result.is_message):
                self._handed[result.id] = None
            return True
        if not self.pipeline.is_open:
            return False
        if confirm:
            return self.pipeline.hand_and_wait(result, self._timeout)
        self.pipeline.hand(result)
        return True

    def settle(self, ids: Sequence[str]) -> None:
        """Wait until the results with these document ids are stored that this process has handed over."""
        if any(doc_id in self._handed for doc_id in ids):
            self._relay.send(Kind.FLUSH)
            self._handed.clear()
        self.pipeline.settle(ids, self._timeout)
