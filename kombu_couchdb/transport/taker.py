"""A taker stores the messages that are published in its context, so that their publisher does not wait for CouchDB."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..couchdb.address import Address
from ..documents.types import WorkItem

__all__ = ['Taker', 'taken_by', 'taker']

#: Called with the address of a database and new items for it; returns the items that the publisher must store itself.
Taker = Callable[[Address, Sequence[WorkItem]], Sequence[WorkItem]]

_taker: ContextVar[Taker | None] = ContextVar('kombu_couchdb_taker', default=None)


def taker() -> Taker | None:
    """Return the taker of the messages that are published now, or None."""
    return _taker.get()


@contextmanager
def taken_by(take: Taker | None) -> Iterator[None]:
    """Let `take` have the messages that this context publishes. With None, the publisher stores them."""
    token = _taker.set(take)
    try:
        yield
    finally:
        _taker.reset(token)
