"""The relay through which pool children hand over results (`results.prefork_relay`): real processes and no server."""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_couchdb.results.outbox import MAX_BYTES, Outbox
from tests.conftest import PATIENCE, wait_for

from .recording import Recorder, handed, outbox_of

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


def hand(outbox: Outbox, *ids: str, confirm: bool = False) -> bool:
    """Hand over results; tell whether all of them were taken."""
    taken = [outbox.hand_over(handed(doc_id), confirm=confirm) for doc_id in ids]
    return all(taken)


def test_child_hands_over_to_its_parent(outbox: Outbox, recorder: Recorder) -> None:
    outbox.open(serve_children=True)
    child = start(lambda: hand(outbox, 'a', 'b', 'c'))
    assert ended(child) == 0
    outbox.pipeline.wait()
    assert recorder.written == ['a', 'b', 'c']


def test_everything_that_an_ended_child_has_sent_is_before_the_next_mark(outbox: Outbox, recorder: Recorder) -> None:
    """So an acknowledgement that follows cannot be stored before these results."""
    outbox.open(serve_children=True)
    recorder.gate.clear()
    names = [f'{n}' for n in range(50)]
    # The child's end stands for the message by which a child tells that its task has ended.
    assert ended(start(lambda: hand(outbox, *names))) == 0
    mark = outbox.pipeline.mark()
    assert mark == 50
    assert not outbox.pipeline.is_stored(mark)
    recorder.gate.set()
    wait_for(lambda: outbox.pipeline.is_stored(mark), 'the results to be stored')
    assert recorder.written == names


def test_several_concurrent_children(outbox: Outbox, recorder: Recorder) -> None:
    outbox.open(serve_children=True)
    names = [[f'{n}-{m}' for m in range(20)] for n in range(5)]
    children = [start(lambda own=own: hand(outbox, *own)) for own in names]  # type: ignore[misc]
    assert [ended(child) for child in children] == [0] * 5
    outbox.pipeline.wait()
    assert sorted(recorder.written) == sorted(name for own in names for name in own)


def test_confirmed_result_is_stored_when_the_child_goes_on(outbox: Outbox, recorder: Recorder) -> None:
    outbox.open(serve_children=True)
    recorder.gate.clear()
    seen, see = os.pipe()

    def check() -> bool:
        found = hand(outbox, 'a', confirm=True)
        os.write(see, b'.')
        return found

    child = start(check)
    wait_for(lambda: recorder.tried, 'the write to begin')
    assert not select.select([seen], [], [], 0)[0]
    recorder.gate.set()
    assert ended(child) == 0
    assert recorder.written == ['a']
    os.close(seen)
    os.close(see)


def test_child_stores_a_confirmed_result_itself_if_its_parent_cannot(outbox: Outbox, recorder: Recorder) -> None:
    outbox.open(serve_children=True)
    recorder.outages = 1
    assert ended(start(lambda: not hand(outbox, 'lost response', confirm=True))) == 0
    recorder.refused.add('refused')
    assert ended(start(lambda: not hand(outbox, 'refused', confirm=True))) == 0


def test_child_reads_its_own_result_only_when_it_is_stored(outbox: Outbox, recorder: Recorder) -> None:
    outbox.open(serve_children=True)
    recorder.gate.clear()
    seen, see = os.pipe()

    def check() -> bool:
        hand(outbox, 'a')
        outbox.settle(['another'])
        os.write(see, b'1')
        outbox.settle(['a'])
        os.write(see, b'2')
        return True

    child = start(check)
    wait_for(lambda: recorder.tried, 'the write to begin')
    assert os.read(seen, 2) == b'1'
    recorder.gate.set()
    assert ended(child) == 0
    assert os.read(seen, 2) == b'2'
    os.close(seen)
    os.close(see)


def test_child_without_a_parent_that_serves_it_stores_results_itself(outbox: Outbox) -> None:
    outbox.open(serve_children=False)
    assert ended(start(lambda: not outbox.is_open and not hand(outbox, 'a'))) == 0


def test_large_result_is_not_handed_over(outbox: Outbox) -> None:
    outbox.open(serve_children=True)
    large = handed('a', value='x' * MAX_BYTES)
    assert ended(start(lambda: not outbox.hand_over(large, confirm=False))) == 0
    assert not outbox.hand_over(large, confirm=False)


def test_relay_leaves_no_files(outbox: Outbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A killed process could not delete its files."""
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    outbox.open(serve_children=True)
    assert ended(start(lambda: hand(outbox, 'a') and not [*tmp_path.iterdir()])) == 0
    assert not [*tmp_path.iterdir()]


def test_other_processes_cannot_reach_the_parent(outbox: Outbox) -> None:
    """The sockets have no name: a path would need access rights, and an abstract name has none."""
    outbox.open(serve_children=True)
    ends = outbox._relay._parent_end, outbox._relay._child_end
    assert all(end is not None and (end.getsockname(), end.getpeername()) == ('', '') for end in ends)


def test_child_stores_results_itself_if_the_parent_has_too_many_open_files(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = socket.recv_fds

    def too_many(end: socket.socket, *args: Any) -> Any:
        call, numbers, flags, address = receive(end, *args)
        monkeypatch.undo()
        for number in numbers:
            os.close(number)  # as the system does
        return call, [], flags, address

    monkeypatch.setattr(socket, 'recv_fds', too_many)
    outbox.open(serve_children=True)
    assert ended(start(lambda: (hand(outbox, 'a'), hand(outbox, 'b')) == (False, True))) == 0


def test_child_stores_results_itself_if_the_parent_does_not_respond(recorder: Recorder) -> None:
    outbox = outbox_of(recorder, timeout=0.2)
    outbox.open(serve_children=True)
    recorder.gate.clear()
    assert ended(start(lambda: not hand(outbox, 'a', confirm=True))) == 0
    recorder.gate.set()
    outbox.close()


def test_child_stores_results_itself_after_its_parent_ended(recorder: Recorder) -> None:
    outbox = outbox_of(recorder)
    results, report = os.pipe()
    parent = os.fork()
    if not parent:
        outbox.open(serve_children=True)
        killed = os.getpid()

        def orphaned(before: bool) -> bool:
            if before:
                hand(outbox, 'before')
            wait_for(lambda: os.getppid() != killed, 'the parent to end')
            return os.write(report, b'-' if hand(outbox, 'a', confirm=True) else b'+') > 0

        for number in range(4):
            start(lambda number=number: orphaned(number % 2 == 0))  # type: ignore[misc]
        outbox.pipeline.wait()
        os.kill(killed, signal.SIGKILL)
    assert ended(parent) == -signal.SIGKILL
    os.close(report)
    with os.fdopen(results, 'rb') as answers:
        assert answers.read() == b'++++'  # the pipe ends when the last child ends


def test_siblings_do_not_keep_the_connection_of_a_killed_parent_open(recorder: Recorder) -> None:
    """Children that are forked later inherit the open sockets of the parent."""
    outbox = outbox_of(recorder, timeout=60.0)
    results, report = os.pipe()
    connected, connect = os.pipe()
    going, go = os.pipe()
    held, hold = os.pipe()
    parent = os.fork()
    if not parent:
        outbox.open(serve_children=True)

        def waits() -> bool:
            hand(outbox, 'a', confirm=True)
            os.write(connect, b'.')
            os.read(going, 1)
            return os.write(report, b'-' if hand(outbox, 'b', confirm=True) else b'+') > 0

        start(waits)
        os.read(connected, 1)
        recorder.gate.clear()
        start(lambda: os.read(held, 1) == b'.')
        os.write(go, b'.')
        os.kill(os.getpid(), signal.SIGKILL)
    assert ended(parent) == -signal.SIGKILL
    try:
        assert select.select([results], [], [], PATIENCE / 3)[0], 'the child still waits'
        assert os.read(results, 1) == b'+'
    finally:
        os.write(hold, b'.')
        for end in (results, report, connected, connect, going, go, held, hold):
            os.close(end)


def test_interrupted_task_leaves_no_response_for_the_next(outbox: Outbox, recorder: Recorder) -> None:
    """A soft time limit may interrupt a task anywhere, also between a message and its response."""
    outbox.open(serve_children=True)
    recorder.refused.add('b')

    def check() -> bool:
        class Interrupted(Exception):
            pass

        def interrupted(*args: Any) -> bytes:
            raise Interrupted

        hand(outbox, 'first')
        connection = outbox._relay._connection
        assert connection is not None

        interrupting = SimpleNamespace(sendall=connection.sendall, recv=interrupted)
        outbox._relay._connection = interrupting  # type: ignore[assignment]
        try:
            hand(outbox, 'a', confirm=True)
        except Interrupted:
            return not hand(outbox, 'b', confirm=True)  # the response to `a` would say that it is stored
        return False

    assert ended(start(check)) == 0
    assert sorted(recorder.written) == ['a', 'first']


def test_unfinished_message_of_a_killed_child_is_ignored(outbox: Outbox, recorder: Recorder) -> None:
    outbox.open(serve_children=True)

    def check() -> bool:
        hand(outbox, 'a')
        assert outbox._relay._connection is not None
        outbox._relay._connection.sendall(b'\0\0\0\0\0\0\0\1\0only the begin')
        return True

    assert ended(start(check)) == 0
    assert ended(start(lambda: hand(outbox, 'b'))) == 0
    outbox.pipeline.wait()
    assert sorted(recorder.written) == ['a', 'b']
