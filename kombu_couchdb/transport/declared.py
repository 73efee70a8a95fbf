"""The return value of a queue's declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from amqp.protocol import queue_declare_ok_t

__all__ = ['Declared']


class Declared(queue_declare_ok_t):  # type: ignore[misc]
    """`(queue, message_count, consumer_count)`; the messages are counted once, when somebody looks at the second of them.

    Publishers declare their queues, and do not look: counting takes one request or two.
    """

    def __new__(cls, queue: str, count: Callable[[], int]) -> Declared:
        """Return it; `count()` returns how many messages are ready."""
        declared: Declared = super().__new__(cls, queue, 0, 0)
        declared._count = count
        return declared

    @cached_property
    def message_count(self) -> int:
        """How many messages are ready; *raises* `CouchDBError`."""
        return int(self._count())

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self)[place]
        return self.message_count if place in (1, -2) else super().__getitem__(place)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, Declared) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counted = self.__dict__.get('message_count', '…')
        return f'{type(self).__name__}(queue={self.queue!r}, message_count={counted}, consumer_count=0)'
