"""Idempotent publishing: a process that repeats the work of a killed process publishes no message twice.

Within `idempotent(key)` the id of a message is made of the key and of the id of its task, instead of the time. All
processes that publish the message write the same first revision. CouchDB ignores a revision that it has already stored,
even if the document was deleted since, and however late the request arrives: see `Client.create_once`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, NamedTuple

from .ids import ONCE

__all__ = ['copy_id', 'fixed_id', 'idempotent', 'is_fixed', 'is_repeated']


class _Context(NamedTuple):
    key: str
    repeated: bool


_context: ContextVar[_Context | None] = ContextVar('kombu_couchdb_idempotent', default=None)


@contextmanager
def idempotent(key: str, *, repeated: bool = False) -> Iterator[None]:
    """Publish messages in this context under fixed ids; a message whose id was used before is not published again.

    `repeated` says that another process has begun the same work. The result backend then looks for what that process
    has stored (`is_repeated`).
    """
    token = _context.set(_Context(key, repeated))
    try:
        yield
    finally:
        _context.reset(token)


def fixed_id(message: Mapping[str, Any]) -> str | None:
    """Return the id of a message in this context; None outside of `idempotent`, or if it has no task id."""
    context = _context.get()
    # Celery's message protocol 1 has no headers.
    task_id = (message.get('headers') or {}).get('id') or (message.get('properties') or {}).get('correlation_id')
    if context is None or not isinstance(task_id, str):
        return None
    return ONCE + sha256(f'{context.key}\0{task_id}'.encode()).hexdigest()[:32]


def copy_id(tag: str, queue: str) -> str:
    """Return the id of the copy of a message for one queue of an exchange.

    It depends only on the delivery tag and the queue. So a publisher that repeats a request without a response stores
    each copy once, even if queues were bound or unbound in the meantime.
    """
    return f'{tag}-{sha256(queue.encode()).hexdigest()[:12]}'


def is_fixed() -> bool:
    """Tell whether messages have fixed ids in this context."""
    return _context.get() is not None


def is_repeated() -> bool:
    """Tell whether another process has begun the work of this context."""
    context = _context.get()
    return context is not None and context.repeated
