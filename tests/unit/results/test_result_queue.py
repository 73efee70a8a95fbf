"""The result queue in one process (`results.result_queue`), without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from celery_couchdb.results import result_queue
from celery_couchdb.results.queue_item import QueueItem, Refusal
from celery_couchdb.results.result_queue import ResultQueue
from kombu_couchdb.consumer.pending_writes import PendingWrites
from kombu_couchdb.consumer.wakeup import Wakeup
from kombu_couchdb.documents.ids import JOB
from kombu_couchdb.flow import Flow
from tests.conftest import wait_for

from .conftest import Recorder, item


@pytest.fixture
def queue(queue: ResultQueue) -> ResultQueue:
    """An open queue of a process without children."""
    queue.open(serve_children=False)
    return queue


def hold(queue: ResultQueue, recorder: Recorder) -> None:
    """Begin a write that ends when the gate is opened; what is handed over meanwhile waits."""
    recorder.gate.clear()
    queue.hand_over(item('held'))
    wait_for(lambda: recorder.tried, 'the write to begin')


@pytest.mark.parametrize(
    ('first', 'second', 'kept'),
    [
        (('SUCCESS', 2), ('FAILURE', 4), 'SUCCESS'),
        (('FAILURE', 2), ('STARTED', 2), 'FAILURE'),
        (('FAILURE', 2), ('SUCCESS', 4), 'SUCCESS'),
    ],
)
def test_final_result_stays(
    queue: ResultQueue, recorder: Recorder, first: tuple[str, int], second: tuple[str, int], kept: str
) -> None:
    hold(queue, recorder)
    for status, delivery in (first, second):
        queue.hand_over(item('a', status=status, delivery=[0, 0, delivery]))
    recorder.gate.set()
    queue.wait()
    assert [each.head['status'] for each in recorder.stored] == ['SUCCESS', kept]
    assert queue.is_stored(3)


def test_replaced_part_of_a_chord_is_stored_with_the_newer_result(queue: ResultQueue, recorder: Recorder) -> None:
    hold(queue, recorder)
    queue.hand_over(item('a', status='FAILURE', delivery=[0, 0, 2], part='part'))
    queue.hand_over(item('a', delivery=[0, 0, 4]))
    recorder.gate.set()
    queue.wait()
    assert [(each.id, each.part_id, each.group_id) for each in recorder.stored[1:]] == [('a', 'part', 'group')]


def test_result_is_not_done_before_its_chord_is_counted(queue: ResultQueue, recorder: Recorder) -> None:
    waiting: list[Callable[[], None]] = []
    recorder.on_stored = lambda results, done: waiting.append(lambda: done(results))
    queue.hand_over(item('a', part='part'))
    wait_for(lambda: waiting, 'the result to be stored')
    mark = queue.mark()
    assert mark == 1
    assert not queue.is_stored(mark)
    queue.settle(['a'])  # it can be read
    assert queue.unstored() == []
    waiting[0]()
    assert queue.is_stored(mark)


def test_unexpected_error_loses_only_the_result_that_causes_it(
    queue: ResultQueue, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = recorder.write

    def fails(batch: Sequence[QueueItem], *, uncertain: bool = False) -> list[Refusal]:
        if any(each.id == 'bad' for each in batch):
            raise KeyError('unexpected')
        return write(batch, uncertain=uncertain)

    hold(queue, recorder)
    monkeypatch.setattr(recorder, 'write', fails)
    for name in ('a', 'bad', 'b'):
        queue.hand_over(item(name))
    recorder.gate.set()
    queue.wait()
    assert recorder.written == ['held', 'a', 'b']


@pytest.mark.parametrize('hook', ['on_stored', 'on_refused'])
def test_error_in_a_hook_does_not_end_the_thread(queue: ResultQueue, recorder: Recorder, hook: str) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    setattr(recorder, hook, fails)
    recorder.refused.add('a')
    queue.hand_over(item('a'))
    queue.hand_over(item('b'))
    queue.wait()
    assert recorder.written == ['b']


def test_full_queue_lets_tasks_wait(queue: ResultQueue, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_queue, '_MAX_UNSTORED', 3)
    hold(queue, recorder)
    queue.hand_over(item('1'))
    queue.hand_over(item('2'))
    assert queue.mark() is None
    thread = threading.Thread(target=lambda: queue.hand_over(item('3')))
    thread.start()
    assert queue.unstored() == ['held', '1', '2']
    recorder.gate.set()
    thread.join()
    queue.wait()
    assert recorder.written == ['held', '1', '2', '3']


def test_stored_parts_leave_room_for_what_completes_their_chord(
    queue: ResultQueue, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_queue, '_MAX_UNSTORED', 2)

    def complete(results: Sequence[QueueItem], done: Callable[[Sequence[QueueItem]], None]) -> None:
        if results[0].part_id:
            queue.hand_over(item('failure of the body'))
            queue.hand_over(item('failure of the next step'))
        done(results)

    recorder.on_stored = complete
    hold(queue, recorder)
    queue.hand_over(item('a', part='part'))
    recorder.gate.set()
    queue.wait()
    queue.wait()
    assert recorder.written == ['held', 'a', 'failure of the body', 'failure of the next step']


# -- acknowledgements


def test_acknowledgement_of_a_unique_job_with_a_successor_waits(queue: ResultQueue, recorder: Recorder) -> None:
    """It puts the next message in the place of the acknowledged one, and looks like a release."""
    writes = PendingWrites(Wakeup(), Flow())
    hold(queue, recorder)
    released: Any = {'_id': 'a', 'type': 'WorkItem', 'claimed': None}
    job: Any = {'_id': f'{JOB}report', 'type': 'WorkItem', 'claimed': None}
    for doc in (released, job):
        writes.add(doc, lambda doc: doc)
    assert [write.doc for write in writes.take_ready()] == [released]
    recorder.gate.set()
    wait_for(lambda: [write.doc for write in writes.take_ready()] == [job], 'the acknowledgement to be writable')
