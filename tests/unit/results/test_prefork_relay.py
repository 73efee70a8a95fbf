"""The relay through which pool children store results (`results.prefork_relay`), with real processes and no server."""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest

from celery_couchdb.results import prefork_relay as module
from celery_couchdb.results.prefork_relay import Relay
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.couchdb.group_commit import GroupCommit
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.errors import CouchDBError, DocumentTooLarge
from tests.conftest import PATIENCE, wait_for

pytestmark = pytest.mark.skipif(not hasattr(os, 'fork'), reason='this system has no fork()')


class Commit:
    """Records the written documents and the writing process."""

    def __init__(self) -> None:
        self.written: list[list[str]] = []
        self.error: CouchDBError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def write(self, docs: Sequence[Document]) -> list[WriteResult]:
        assert self.gate.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.written.append([doc['_id'] for doc in docs])
        return [WriteResult(doc['_id'], WriteStatus.STORED, str(os.getpid())) for doc in docs]


@pytest.fixture
def commit() -> Commit:
    return Commit()


@pytest.fixture
def relay(commit: Commit) -> Iterator[Relay]:
    relay = Relay(cast(GroupCommit, commit), timeout=PATIENCE)
    yield relay
    relay.reset()
    if relay._child_end is not None:
        relay._child_end.close()


def start(relay: Relay, check: Callable[[], bool]) -> int:
    """Fork a child that exits with status 0 if `check()` returns true in it."""
    child = os.fork()
    if not child:
        status = 2
        try:
            relay.reset()
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return child


def ended(child: int) -> int:
    def status() -> tuple[int, int] | None:
        pid, found = os.waitpid(child, os.WNOHANG)
        return (pid, found) if pid else None

    ended = wait_for(status, 'the child to end')
    assert ended is not None
    return os.waitstatus_to_exitcode(ended[1])


def docs(*ids: str) -> list[Document]:
    return [{'_id': doc_id, 'n': 1} for doc_id in ids]


def by(relay: Relay, *ids: str) -> int:
    """Write documents and return the id of the process that wrote them."""
    [pid] = {int(answer.rev) for answer in relay.write(docs(*ids))}
    return pid


def test_child_writes_through_its_parent(relay: Relay, commit: Commit) -> None:
    parent = os.getpid()
    relay.open()
    child = start(relay, lambda: [by(relay, 'a'), by(relay, 'b', 'c')] == [parent, parent])
    assert ended(child) == 0
    assert commit.written == [['a'], ['b', 'c']]


def test_several_concurrent_children(relay: Relay, commit: Commit) -> None:
    parent = os.getpid()
    relay.open()
    children = [start(relay, lambda n=n: all(by(relay, f'{n}-{m}') == parent for m in range(20))) for n in range(5)]  # type: ignore[misc]
    assert [ended(child) for child in children] == [0] * 5
    assert sorted(doc_id for [doc_id] in commit.written) == sorted(f'{n}-{m}' for n in range(5) for m in range(20))


def test_dates_are_written_as_without_a_relay(relay: Relay, commit: Commit) -> None:
    relay.open()
    doc = {'_id': 'a', 'date': datetime(2026, 1, 1, tzinfo=timezone.utc)}
    assert ended(start(relay, lambda: bool(relay.write([doc])))) == 0
    assert commit.written == [['a']]


def test_child_without_a_relay_writes_itself(relay: Relay) -> None:
    assert ended(start(relay, lambda: by(relay, 'a') == os.getpid())) == 0


def test_parent_writes_without_a_socket(relay: Relay, commit: Commit) -> None:
    relay.open()
    relay.open()
    assert by(relay, 'a') == os.getpid()


def test_relay_leaves_no_files(relay: Relay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A killed process could not delete its files."""
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    parent = os.getpid()
    relay.open()
    assert ended(start(relay, lambda: by(relay, 'a') == parent and not [*tmp_path.iterdir()])) == 0
    assert not [*tmp_path.iterdir()]


def test_other_processes_cannot_reach_the_parent(relay: Relay) -> None:
    """The sockets have no name: a path would need access rights, and an abstract name has none."""
    relay.open()
    assert relay._parent_end is not None
    assert relay._child_end is not None
    assert not any((end.getsockname(), end.getpeername()) != ('', '') for end in (relay._parent_end, relay._child_end))


def test_child_writes_itself_if_the_parent_has_too_many_open_files(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = socket.recv_fds

    def too_many(end: socket.socket, *args: Any) -> Any:
        monkeypatch.undo()
        call, numbers, flags, address = receive(end, *args)
        for number in numbers:
            os.close(number)  # as the system does
        return call, [], flags, address

    monkeypatch.setattr(socket, 'recv_fds', too_many)
    parent = os.getpid()
    relay.open()
    assert ended(start(relay, lambda: (by(relay, 'a'), by(relay, 'b')) == (os.getpid(), parent))) == 0


def test_child_retries_a_failed_write_of_its_parent_and_gets_the_error(relay: Relay, commit: Commit) -> None:
    relay.open()
    commit.error = DocumentTooLarge('too large')

    def refused() -> bool:
        try:
            relay.write(docs('a'))
        except DocumentTooLarge:
            return True
        return False

    assert ended(start(relay, refused)) == 0


def test_child_writes_itself_if_the_parent_does_not_respond(commit: Commit) -> None:
    relay = Relay(cast(GroupCommit, commit), timeout=0.2)
    relay.open()
    commit.gate.clear()

    def check() -> bool:
        commit.gate = threading.Event()
        commit.gate.set()  # only in this process
        return by(relay, 'a') == os.getpid()

    assert ended(start(relay, check)) == 0
    commit.gate.set()


def test_child_writes_itself_after_its_parent_ended(relay: Relay, commit: Commit) -> None:
    relay.open()
    assert relay._parent_end is not None
    relay._parent_end.shutdown(socket.SHUT_RDWR)
    relay._parent_end.close()
    assert ended(start(relay, lambda: by(relay, 'a') == os.getpid())) == 0


def test_child_writes_and_ends_after_its_parent_was_killed(commit: Commit) -> None:
    relay = Relay(cast(GroupCommit, commit), timeout=PATIENCE)
    results, report = os.pipe()
    parent = os.fork()
    if not parent:
        relay.open()
        killed = os.getpid()

        def orphaned() -> bool:
            wait_for(lambda: os.getppid() != killed, 'the parent to end')
            return os.write(report, b'+' if by(relay, 'a') == os.getpid() else b'-') > 0

        for _ in range(4):
            start(relay, orphaned)
        os.kill(killed, signal.SIGKILL)
    assert ended(parent) == -signal.SIGKILL
    os.close(report)
    with os.fdopen(results, 'rb') as answers:
        assert answers.read() == b'++++'  # the pipe ends when the last child ends


def test_siblings_do_not_keep_the_connection_of_a_killed_parent_open(commit: Commit) -> None:
    """Children that are forked later inherit the open sockets of the parent."""
    relay = Relay(cast(GroupCommit, commit), timeout=60.0)
    results, report = os.pipe()
    connected, connect = os.pipe()
    going, go = os.pipe()
    held, hold = os.pipe()
    parent = os.fork()
    if not parent:
        relay.open()

        def waits() -> bool:
            by(relay, 'a')
            os.write(connect, b'.')
            os.read(going, 1)
            return os.write(report, b'+' if by(relay, 'b') == os.getpid() else b'-') > 0

        start(relay, waits)
        os.read(connected, 1)
        commit.gate.clear()
        start(relay, lambda: os.read(held, 1) == b'.')
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


def test_interrupted_task_leaves_no_response_for_the_next(relay: Relay, commit: Commit) -> None:
    """A soft time limit may interrupt a task anywhere, also between a request and its response."""
    relay.open()

    def check() -> bool:
        class Interrupted(Exception):
            pass

        def interrupted(*args: Any) -> bytes:
            raise Interrupted

        receive, module._receive = module._receive, interrupted  # type: ignore[assignment]
        try:
            relay.write(docs('a'))
        except Interrupted:
            module._receive = receive
        return [answer.id for answer in relay.write(docs('b'))] == ['b']

    assert ended(start(relay, check)) == 0
    assert sorted(doc_id for [doc_id] in commit.written) == ['a', 'b']
