"""Objects that belong to one process: what its threads share, what is closed at its end, and what a forked child does.

A forked child has none of its parent's other threads. Locks that they held are never released, connections belong to
the parent, and threads that wait for work do not exist. Objects with such state are reset in the child before other
code runs.

A child may also close all its descriptors, as `celery worker --beat` does. Their numbers then are those of other files,
so nothing of the parent may be closed later: `finalize` and `at_exit` act in their own process only, and the sockets of
`close_in_child` are closed at the fork, because a socket that is garbage-collected closes its number.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

C = TypeVar('C', bound='Closable')
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


def finalize(owner: object, close: Callable[..., object], *args: Any) -> weakref.finalize[Any, Any]:
    """Call `close(*args)` when `owner` is garbage-collected, or when this process exits; never in a forked child."""
    return weakref.finalize(owner, _only_here(close), *args)


def at_exit(close: Callable[[], object]) -> Callable[[], None]:
    """Call `close()` when this process exits, never in a forked child. Return a function that revokes this."""
    registered = _only_here(close)
    atexit.register(registered)
    return partial(atexit.unregister, registered)


def _only_here(close: Callable[..., object]) -> Callable[..., None]:
    own = os.getpid()

    def close_here(*args: Any) -> None:
        if os.getpid() == own:
            close(*args)

    return close_here


class Closable(Protocol):
    """A socket, also one of gevent or eventlet."""

    def detach(self) -> int:
        """Forget the descriptor, and return its number; -1 if there is none."""


_sockets: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_child(sock: C) -> C:
    """Close the copy of a socket that a forked child inherits, at the fork; return the socket."""
    _sockets.add(sock)
    return sock


def _after_fork() -> None:
    for sock in list(_sockets):
        with suppress(OSError):
            if (number := sock.detach()) >= 0:
                socket.close(number)  # gevent's os.close() closes later, when the number may be another file
    for resettable in list(_registered):
        resettable.reset()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_after_fork)
