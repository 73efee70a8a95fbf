"""Objects that the threads of a process share, and their reset in a forked child.

A forked child has none of its parent's other threads. Locks that they held are never released, connections belong to
the parent, and threads that wait for work do not exist. Objects with such state are reset in the child before other
code runs.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from typing import Generic, Protocol, TypeVar

K = TypeVar('K', bound=Hashable)
V = TypeVar('V')


class Resettable(Protocol):
    """An object that can be reset after a fork."""

    def reset(self) -> None:
        """Replace locks, connections and unfinished work, which belong to the parent."""


_registered: weakref.WeakSet[Resettable] = weakref.WeakSet()


def reset_in_child(resettable: Resettable) -> None:
    """Call `resettable.reset()` in each forked child, until the object is garbage collected."""
    _registered.add(resettable)


class Shared(Generic[K, V]):
    """One object for each key in a process.

    With a `WeakValueDictionary` as `objects`, unused objects are garbage collected; with a dict, all are kept.
    """

    def __init__(self, objects: MutableMapping[K, V]) -> None:
        self._objects = objects
        self.reset()
        reset_in_child(self)

    def reset(self) -> None:
        """Create a new lock in a forked child. The objects are kept."""
        self._lock = threading.Lock()

    def of(self, key: K, make: Callable[[], V]) -> V:
        """Return the object for a key; call `make` if there is none."""
        with self._lock:
            found = self._objects.get(key)
            if found is None:
                found = self._objects[key] = make()
            return found

    def discard(self, key: K) -> None:
        """Do not keep the object for a key."""
        with self._lock:
            self._objects.pop(key, None)


def _after_fork() -> None:
    for resettable in list(_registered):
        resettable.reset()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_after_fork)
