"""Publishing once: for a caller who may be killed before he has noted that he published, and whose successor will not know.

Within `once(key)` the id of a message is made of the key and of the task in it, instead of the time. CouchDB remembers the
id of a message after it was done and deleted, and so a successor can tell that it was there. A publisher that was paused between
looking and writing creates nothing a second time either: see `Bulk.create_once`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

from .ids import ONCE

__all__ = ['copy_id', 'fixed_id', 'is_fixed', 'is_repeated', 'once']

_context: ContextVar[tuple[str, bool] | None] = ContextVar('kombu_couchdb_once', default=None)


@contextmanager
def once(key: str, *, again: bool = False) -> Iterator[None]:
    """Publish what is published in this context under fixed ids, and only what was never published under them.

    `again` says that somebody is known to have begun before.
    """
    token = _context.set((key, again))
    try:
        yield
    finally:
        _context.reset(token)


def fixed_id(message: Mapping[str, Any]) -> str | None:
    """Return the id that a message has in this context; None outside of `once`, and for a message that names no task."""
    context = _context.get()
    task_id = (message.get('headers') or {}).get('id')
    if context is None or not isinstance(task_id, str):
        return None
    return ONCE + sha256(f'{context[0]}\0{task_id}'.encode()).hexdigest()[:32]


def copy_id(tag: str, queue: str) -> str:
    """Return the id of the copy of a message that one queue of an exchange has.

    It depends on nothing else: who publishes again, since an answer was lost, stores each copy once, even if queues were bound
    or unbound meanwhile.
    """
    return f'{tag}-{sha256(queue.encode()).hexdigest()[:12]}'


def is_fixed() -> bool:
    """Tell whether messages have fixed ids here."""
    return _context.get() is not None


def is_repeated() -> bool:
    """Tell whether somebody is known to have begun before to do what is done in this context."""
    context = _context.get()
    return context is not None and context[1]
