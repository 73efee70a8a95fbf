"""The return value of a queue's declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from amqp.protocol import queue_declare_ok_t

from ..errors import IndexNotReady

__all__ = ['Declared']


class Declared(queue_declare_ok_t):  # type: ignore[misc]
    """`(queue, message_count, consumer_count)`; the messages are counted when `message_count` is first read.

    Publishers declare their queues and do not read it, and counting takes up to two requests. If the result is unpacked
    while CouchDB builds the index, the number is 0.
    """

    def __new__(cls, queue: str, count: Callable[[], int]) -> Declared:
        """Return the result for `queue`; `count()` returns the number of ready messages."""
        declared: Declared = super().__new__(cls, queue, 0, 0)
        declared._count = count
        return declared

    @cached_property
    def message_count(self) -> int:
        """The number of ready messages; *raises* `CouchDBError`."""
        return int(self._count())

    def __iter__(self) -> Iterator[Any]:
        # kombu unpacks the result for each reply queue, and does not use the number. It must not have to connect again.
        try:
            count = self.message_count
        except IndexNotReady:
            count = 0
        return iter((self.queue, count, 0))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.message_count if index in (1, -2) else super().__getitem__(index)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, Declared) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        counted = self.__dict__.get('message_count', '…')
        return f'{type(self).__name__}(queue={self.queue!r}, message_count={counted}, consumer_count=0)'
