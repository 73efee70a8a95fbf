"""Objects that threads of one process share, and their reset in a forked child.

A child that was forked has none of its parent's threads: locks stay held for ever, connections are the parent's, and nobody
answers. So who has such things is reset in the child, before it runs anything else.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from typing import Generic, Protocol, TypeVar

__all__ = ['Shared', 'reset_in_child']

K = TypeVar('K', bound=Hashable)
V = TypeVar('V')


class Resettable(Protocol):
    """What can start over after a fork."""

    def reset(self) -> None:
        """Start over: whatever was under way is the parent's."""


_living: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_in_child(thing: Resettable) -> None:
    """Call `thing.reset()` in each child that is forked as long as `thing` lives."""
    _living.add(thing)


class Shared(Generic[K, V]):
    """One object for each key in a process. `objects` is a `WeakValueDictionary`, or a dict if they shall stay."""

    def __init__(self, objects: MutableMapping[K, V]) -> None:
        self._objects = objects
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Start over with a lock that nobody holds; the objects are kept."""
        self._lock = threading.Lock()

    def of(self, key: K, make: Callable[[], V]) -> V:
        """Return the object for a key; its first user makes it."""
        with self._lock:
            found = self._objects.get(key)
            if found is None:
                found = self._objects[key] = make()
            return found


def _after_fork() -> None:
    for thing in list(_living):
        thing.reset()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_after_fork)
