"""What threads share, and that a child of a fork starts over with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

import pytest

from kombu_couchdb.couchdb.fork_safety import Shared, reset_in_child
from tests.conftest import PATIENCE

needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')


class Thing:
    """Counts how often it was reset."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


def in_child(check: Callable[[], bool]) -> bool:
    """Return what `check()` says in a forked child; an exception there, or a wait without end, is False."""
    pid = os.fork()
    if pid == 0:
        timer = threading.Timer(PATIENCE, os._exit, [1])
        timer.daemon = True
        timer.start()
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@needs_fork
def test_reset_once_in_the_child_and_not_in_the_parent() -> None:
    thing = Thing()
    reset_in_child(thing)
    reset_in_child(thing)
    assert in_child(lambda: thing.resets == 1)
    assert thing.resets == 0


def test_one_object_for_a_key() -> None:
    shared: Shared[str, Thing] = Shared({})
    assert shared.of('a', Thing) is shared.of('a', Thing)
    assert shared.of('a', Thing) is not shared.of('b', Thing)


def test_what_nobody_uses_is_made_anew_if_it_is_kept_weakly() -> None:
    shared: Shared[str, Thing] = Shared(WeakValueDictionary())
    thing = shared.of('a', Thing)
    thing.resets = 7
    assert shared.of('a', Thing).resets == 7
    del thing
    assert shared.of('a', Thing).resets == 0


@needs_fork
def test_a_child_can_use_it_though_another_thread_of_its_parent_was_at_it() -> None:
    shared: Shared[str, Thing] = Shared({})
    making, made = threading.Event(), threading.Event()

    def make() -> Thing:
        making.set()
        made.wait()
        return Thing()

    thread = threading.Thread(target=shared.of, args=('slow', make))
    thread.start()
    making.wait()
    try:
        assert in_child(lambda: shared.of('a', Thing).resets == 0)
    finally:
        made.set()
        thread.join()
