"""The relay through which pool children hand over results (`results.prefork_relay`): real processes and no server."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

import pytest

from celery_couchdb.results.result_queue import MAX_BYTES, ResultQueue
from tests.conftest import PATIENCE, wait_for

from .conftest import Recorder, item

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')


def start(check: Callable[[], bool]) -> int:
    """Fork a child that exits with status 0 if `check()` returns true in it."""
    child = os.fork()
    if not child:
        status = 2
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return child


def ended(child: int) -> int:
    def status() -> tuple[int, int] | None:
        pid, found = os.waitpid(child, os.WNOHANG)
        return (pid, found) if pid else None

    found = wait_for(status, 'the child to end')
    assert found is not None
    return os.waitstatus_to_exitcode(found[1])


def hand(queue: ResultQueue, *ids: str) -> bool:
    """Hand over results; tell whether all of them were taken."""
    taken = [queue.hand_over(item(doc_id)) for doc_id in ids]
    return all(taken)


def test_everything_that_an_ended_child_has_sent_is_before_the_next_mark(
    queue: ResultQueue, recorder: Recorder
) -> None:
    """So an acknowledgement that follows cannot be stored before these results."""
    queue.open(serve_children=True)
    recorder.gate.clear()
    names = [f'{n}' for n in range(50)]
    # The child's end stands for the message by which a child tells that its task has ended.
    assert ended(start(lambda: hand(queue, *names))) == 0
    mark = queue.mark()
    assert mark == 50
    assert not queue.is_stored(mark)
    recorder.gate.set()
    wait_for(lambda: queue.is_stored(mark), 'the results to be stored')
    assert recorder.written == names


def test_large_result_is_not_handed_over(queue: ResultQueue) -> None:
    queue.open(serve_children=True)
    large = item('a', value='x' * MAX_BYTES)
    assert ended(start(lambda: not queue.hand_over(large))) == 0
    assert not queue.hand_over(large)


def test_child_stores_results_itself_if_the_parent_does_not_receive_them(recorder: Recorder) -> None:
    """As a parent process that is stopped."""
    queue = recorder.queue(timeout=0.2)
    recorder.gate.clear()
    queue.open(serve_children=True)
    queue.hand_over(item('held'))
    wait_for(lambda: recorder.tried, 'the write to begin')
    assert ended(start(lambda: not all(hand(queue, str(number)) for number in range(5000)))) == 0
    recorder.gate.set()
    queue.close()


def test_siblings_do_not_keep_the_connection_of_a_killed_parent_open(recorder: Recorder) -> None:
    """Children that are forked later inherit the open sockets of the parent."""
    queue = recorder.queue(timeout=60.0)
    results, report = os.pipe()
    connected, connect = os.pipe()
    held, hold = os.pipe()
    parent = os.fork()
    if not parent:
        queue.open(serve_children=True)
        killed = os.getpid()

        def waits() -> bool:
            hand(queue, 'a')
            queue.settle(['a'])
            os.write(connect, b'.')
            wait_for(lambda: os.getppid() != killed, 'the parent to end')
            # A parent with several threads may still hold its sockets for a moment when its children have another one.
            wait_for(lambda: not hand(queue, 'b'), 'the connection to end')
            return os.write(report, b'+') > 0

        start(waits)
        os.read(connected, 1)
        recorder.gate.clear()
        start(lambda: os.read(held, 1) == b'.')
        os.kill(killed, signal.SIGKILL)
    assert ended(parent) == -signal.SIGKILL
    try:
        assert select.select([results], [], [], PATIENCE / 3)[0], 'the child still waits'
    finally:
        os.write(hold, b'.')
        for end in (results, report, connected, connect, held, hold):
            os.close(end)


def test_states_of_killed_children_arrive_completely_or_not_at_all(queue: ResultQueue, recorder: Recorder) -> None:
    queue.open(serve_children=True)
    child = start(lambda: all(queue.hand_over(item(str(number), value='x' * 50_000)) for number in range(100_000)))
    wait_for(lambda: len(recorder.written) > 10, 'the first results')
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    assert ended(start(lambda: hand(queue, 'b'))) == 0
    queue.wait()
    assert recorder.written == [*map(str, range(len(recorder.written) - 1)), 'b']
