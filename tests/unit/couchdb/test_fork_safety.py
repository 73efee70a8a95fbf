"""Objects shared by threads and reset in forked children (`kombu_couchdb.couchdb.fork_safety`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from kombu_couchdb.couchdb.fork_safety import Shared, reset_in_child
from tests.conftest import PATIENCE

needs_fork = pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')


class Thing:
    """Counts its resets."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


def in_child(check: Callable[[], bool]) -> bool:
    """Return the result of `check()` in a forked child; False after an exception or a deadlock there."""
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
def test_objects_are_reset_once_in_the_child_and_not_in_the_parent() -> None:
    thing = Thing()
    reset_in_child(thing)
    reset_in_child(thing)
    assert in_child(lambda: thing.resets == 1)
    assert thing.resets == 0


@needs_fork
def test_a_child_can_use_it_while_a_thread_of_its_parent_holds_the_lock() -> None:
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
