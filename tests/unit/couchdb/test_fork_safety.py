"""Objects of one process: shared by its threads, closed by itself only, reset in forked children (`fork_safety`)."""

from __future__ import annotations

import os
import threading

import pytest

from kombu_couchdb.couchdb.fork_safety import Shared
from tests.conftest import PATIENCE
from tests.support import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')

#: A program that forks. Parent and child end as every program does: finalizers and exit handlers run in both.
PROGRAM = """
import os, sys
from kombu_couchdb.couchdb.fork_safety import at_exit, finalize

class Owner:
    pass

def close(what):
    print(what, 'closed by the', 'child' if child == 0 else 'parent', flush=True)

dropped, kept, revoked = Owner(), Owner(), Owner()
finalize(dropped, close, 'dropped')
finalize(kept, close, 'kept')
finalize(revoked, close, 'revoked').detach()
at_exit(lambda: close('program'))
at_exit(lambda: close('revoked'))()
child = os.fork()
del dropped
if child:
    os.waitpid(child, 0)
"""


def test_only_the_process_that_owns_something_closes_it() -> None:
    closed = run_python(PROGRAM).stdout.splitlines()
    assert sorted(closed) == [f'{what} closed by the parent' for what in ('dropped', 'kept', 'program')]


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
