"""Objects shared by threads and reset in forked children (`kombu_couchdb.couchdb.fork_safety`)."""

from __future__ import annotations

import os
import threading

import pytest

from kombu_couchdb.couchdb.fork_safety import Shared
from tests.conftest import PATIENCE


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')
def test_a_child_can_use_it_while_a_thread_of_its_parent_holds_the_lock() -> None:
    shared: Shared[str, str] = Shared({})
    making, made = threading.Event(), threading.Event()

    def make() -> str:
        making.set()
        made.wait()
        return 'of the parent'

    thread = threading.Thread(target=shared.of, args=('slow', make))
    thread.start()
    making.wait()
    child = os.fork()
    if not child:
        threading.Timer(PATIENCE, os._exit, [1]).start()  # a deadlock
        try:
            os._exit(0 if shared.of('a', lambda: 'of the child') == 'of the child' else 1)
        finally:
            os._exit(1)
    made.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
