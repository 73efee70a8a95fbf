"""The pipeline of results in one process (`results.pipeline`, `results.backlog`), without a server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import pytest

from celery_couchdb.results import backlog
from celery_couchdb.results.batch_writer import Refusal
from celery_couchdb.results.handed import Handed
from celery_couchdb.results.outbox import Outbox
from celery_couchdb.results.pipeline import Pipeline
from kombu_couchdb.consumer import write_order
from kombu_couchdb.consumer.pending_writes import PendingWrite
from kombu_couchdb.consumer.write_order import WriteOrder
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.documents.ids import JOB
from kombu_couchdb.errors import AccessDenied, NotCouchDB
from tests.conftest import wait_for

from .recording import Recorder, handed


@pytest.fixture
def outbox(outbox: Outbox) -> Outbox:
    """An open outbox of a process without children."""
    outbox.open(serve_children=False)
    return outbox


@pytest.fixture
def pipeline(outbox: Outbox) -> Pipeline:
    return outbox.pipeline


def hold(pipeline: Pipeline, recorder: Recorder) -> None:
    """Begin a write that ends when the gate is opened; what is handed over meanwhile waits."""
    recorder.gate.clear()
    pipeline.hand(handed('held'))
    wait_for(lambda: recorder.tried, 'the write to begin')


def test_results_that_gather_share_a_request(pipeline: Pipeline, recorder: Recorder) -> None:
    hold(pipeline, recorder)
    for number in range(20):
        pipeline.hand(handed(str(number)))
    recorder.gate.set()
    pipeline.wait()
    assert recorder.tried == [['held'], [str(number) for number in range(20)]]


def test_states_of_one_task_are_one_write(pipeline: Pipeline, recorder: Recorder) -> None:
    hold(pipeline, recorder)
    for status in ('STARTED', 'SUCCESS'):
        pipeline.hand(handed('a', status, delivery=[0, 0, 2]))
    recorder.gate.set()
    pipeline.wait()
    assert (recorder.written, recorder.states) == (['held', 'a'], ['SUCCESS', 'SUCCESS'])
    assert pipeline.is_stored(3)


@pytest.mark.parametrize(
    ('first', 'second', 'kept'),
    [
        (('SUCCESS', [0, 0, 2]), ('FAILURE', [0, 0, 4]), 'SUCCESS'),
        (('FAILURE', [0, 0, 2]), ('STARTED', [0, 0, 2]), 'FAILURE'),
        (('FAILURE', [0, 0, 2]), ('SUCCESS', [0, 0, 4]), 'SUCCESS'),
    ],
)
def test_final_result_stays(
    pipeline: Pipeline, recorder: Recorder, first: tuple[str, list[int]], second: tuple[str, list[int]], kept: str
) -> None:
    hold(pipeline, recorder)
    for status, delivery in (first, second):
        pipeline.hand(handed('a', status, delivery=delivery))
    recorder.gate.set()
    pipeline.wait()
    assert recorder.states == ['SUCCESS', kept]
    assert pipeline.is_stored(3)


def test_replaced_part_of_a_chord_is_stored_with_the_newer_result(pipeline: Pipeline, recorder: Recorder) -> None:
    hold(pipeline, recorder)
    stored: list[Handed] = []

    def on_stored(results: Sequence[Handed], done: Callable[[Sequence[Handed]], None]) -> None:
        stored.extend(results)
        done(results)

    pipeline.on_stored = on_stored
    pipeline.hand(handed('a', 'FAILURE', delivery=[0, 0, 2], part='part'))
    pipeline.hand(handed('a', 'SUCCESS', delivery=[0, 0, 4]))
    recorder.gate.set()
    pipeline.wait()
    assert [(each.id, each.part_id, each.group_id) for each in stored[1:]] == [('a', 'part', 'group')]


def test_result_is_not_done_before_its_chord_is_counted(pipeline: Pipeline) -> None:
    waiting: list[Callable[[], None]] = []
    pipeline.on_stored = lambda results, done: waiting.append(lambda: done(results))
    pipeline.hand(handed('a', part='part'))
    wait_for(lambda: waiting, 'the result to be stored')
    mark = pipeline.mark()
    assert mark == 1
    assert not pipeline.is_stored(mark)
    pipeline.settle(['a'], 0.0)  # it can be read
    assert pipeline._backlog.unstored() == []
    waiting[0]()
    assert pipeline.is_stored(mark)


def test_outage(pipeline: Pipeline, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    recorder.outages = 3
    pipeline.hand(handed('a'))
    pipeline.hand(handed('b'))
    pipeline.wait()
    assert recorder.written == ['a', 'b']
    assert [record.message for record in caplog.records] == [
        'results are not stored: no response; they wait until CouchDB responds'
    ]


def test_result_that_somebody_waits_for_is_left_to_him_during_an_outage(outbox: Outbox, recorder: Recorder) -> None:
    recorder.outages = 1
    assert not outbox.hand_over(handed('a'), confirm=True)
    assert outbox.hand_over(handed('b'), confirm=True)
    assert recorder.written == ['b']


def test_refused_result(outbox: Outbox, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    recorder.refused.add('a')
    outbox.hand_over(handed('a', task='shop.add'), confirm=False)
    outbox.pipeline.wait()
    assert [record.message for record in caplog.records] == ['the result of shop.add[a] (SUCCESS) is lost: refused']
    caplog.clear()
    assert not outbox.hand_over(handed('a'), confirm=True)  # its task stores it, and gets the error
    assert not caplog.records


def test_page_of_a_proxy_is_an_outage(pipeline: Pipeline, recorder: Recorder) -> None:
    recorder.error = NotCouchDB('a page of a proxy')
    recorder.outages = 1
    pipeline.hand(handed('a'))
    mark = pipeline.mark()
    assert mark == 1
    pipeline.wait()
    assert (recorder.written, recorder.tried) == (['a'], [['a'], ['a']])


def test_wrong_password_loses_results_as_it_does_without_a_pipeline(
    pipeline: Pipeline, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.error = AccessDenied('wrong password')
    recorder.outages = 1
    pipeline.hand(handed('a'))
    pipeline.wait()
    assert caplog.messages == ['the result of None[a] (SUCCESS) is lost: wrong password']


def test_unexpected_error_loses_only_the_result_that_causes_it(
    pipeline: Pipeline, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = recorder.write

    def fails(batch: Sequence[Handed], *, uncertain: bool = False) -> list[Refusal]:
        if any(each.id == 'bad' for each in batch):
            raise KeyError('unexpected')
        return write(batch, uncertain=uncertain)

    hold(pipeline, recorder)
    monkeypatch.setattr(recorder, 'write', fails)
    for name in ('a', 'bad', 'b'):
        pipeline.hand(handed(name))
    recorder.gate.set()
    pipeline.wait()
    assert recorder.written == ['held', 'a', 'b']


@pytest.mark.parametrize('hook', ['on_stored', 'on_refused'])
def test_error_in_a_hook_does_not_end_the_thread(pipeline: Pipeline, recorder: Recorder, hook: str) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    setattr(pipeline, hook, fails)
    recorder.refused.add('a')
    pipeline.hand(handed('a'))
    pipeline.hand(handed('b'))
    pipeline.wait()
    assert recorder.written == ['b']


def test_result_in_the_place_of_a_refused_one(pipeline: Pipeline, recorder: Recorder) -> None:
    recorder.refused.add('a')
    pipeline.on_refused = lambda result, error: handed('instead', 'FAILURE')
    pipeline.hand(handed('a'))
    pipeline.wait()
    pipeline.wait()
    assert recorder.written == ['instead']


def test_unexpected_error_does_not_end_the_thread(
    pipeline: Pipeline, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        monkeypatch.undo()
        raise KeyError('unexpected')

    monkeypatch.setattr(recorder, 'write', fails)
    pipeline.hand(handed('a'))
    pipeline.wait()
    pipeline.hand(handed('b'))
    pipeline.wait()
    assert recorder.written == ['b']
    assert "the result of None[a] (SUCCESS) is lost: an unexpected error: KeyError('unexpected')" in caplog.messages


def test_full_backlog_lets_tasks_wait(pipeline: Pipeline, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, '_MAX_RESULTS', 3)
    hold(pipeline, recorder)
    pipeline.hand(handed('1'))
    pipeline.hand(handed('2'))
    assert pipeline.mark() is None
    thread = threading.Thread(target=lambda: pipeline.hand(handed('3')))
    thread.start()
    assert pipeline._backlog.unstored() == ['held', '1', '2']
    recorder.gate.set()
    thread.join()
    pipeline.wait()
    assert recorder.written == ['held', '1', '2', '3']


def test_worker_that_must_stop_at_once_does_not_wait_for_room(
    pipeline: Pipeline, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, '_MAX_RESULTS', 1)
    monkeypatch.setattr('celery_couchdb.results.pipeline._COLD_SECONDS', 0.1)
    hold(pipeline, recorder)
    pipeline.is_cold = lambda: True
    pipeline.hand(handed('1'))
    recorder.gate.set()


def test_stored_parts_leave_room_for_what_completes_their_chord(
    pipeline: Pipeline, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, '_MAX_RESULTS', 2)

    def complete(results: Sequence[Handed], done: Callable[[Sequence[Handed]], None]) -> None:
        if results[0].part_id:
            pipeline.hand(handed('failure of the body'))
            pipeline.hand(handed('failure of the next step'))
        done(results)

    pipeline.on_stored = complete
    hold(pipeline, recorder)
    pipeline.hand(handed('a', part='part'))
    recorder.gate.set()
    pipeline.wait()
    pipeline.wait()
    assert recorder.written == ['held', 'a', 'failure of the body', 'failure of the next step']


def test_settle_waits_for_the_asked_results_only(pipeline: Pipeline, recorder: Recorder) -> None:
    hold(pipeline, recorder)
    pipeline.settle(['another'], 60.0)
    settled = threading.Thread(target=lambda: pipeline.settle(['held', 'another'], 60.0))
    settled.start()
    assert settled.is_alive()
    recorder.gate.set()
    settled.join()
    assert recorder.written == ['held']


def test_worker_that_must_stop_at_once_names_what_it_could_not_store(
    pipeline: Pipeline, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr('celery_couchdb.results.pipeline._COLD_SECONDS', 0.2)
    recorder.outages = 1_000_000
    pipeline.hand(handed('a'))
    pipeline.hand(handed('b'))
    pipeline.is_cold = lambda: True
    pipeline.close()
    assert '2 results could not be stored before the worker ended: a, b' in caplog.messages


def test_closed_pipeline_takes_nothing(outbox: Outbox) -> None:
    outbox.close()
    assert not outbox.is_open
    assert not outbox.hand_over(handed('a'), confirm=False)


# -- acknowledgements


class Decisions:
    """The decisions of a consumer."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.order = WriteOrder(lambda urgent: self.woken.set())

    def writable(self, *ids: str) -> list[str]:
        """Pass on acknowledgements, and releases if their ids say so."""
        decisions: list[PendingWrite] = [
            ({'_id': each, '_deleted': not each.startswith('release')}, ignore) for each in ids
        ]
        return [str(doc['_id']) for doc, _ in self.order.writable(decisions)]


def ignore(result: WriteResult) -> None:
    """Take the result of a write."""


def test_decision_waits_for_the_results_before_it(pipeline: Pipeline, recorder: Recorder) -> None:
    decisions = Decisions()
    assert decisions.writable('before') == ['before']
    hold(pipeline, recorder)
    assert decisions.writable('ack 1', 'ack 2') == []
    pipeline.hand(handed('later'))
    assert decisions.writable() == []
    assert not decisions.woken.is_set()
    recorder.gate.set()
    wait_for(decisions.woken.is_set, 'the consumer to be woken')
    wait_for(lambda: decisions.writable() == ['ack 1', 'ack 2'], 'the decisions to be writable')


def test_acknowledgement_of_a_unique_job_with_a_successor_waits(pipeline: Pipeline, recorder: Recorder) -> None:
    """It puts the next message in the place of the acknowledged one, and looks like a release."""
    decisions = Decisions()
    hold(pipeline, recorder)
    assert decisions.writable(f'release {JOB}') == [f'release {JOB}']
    job: PendingWrite = ({'_id': f'{JOB}report', 'type': 'WorkItem', 'claimed': None}, ignore)
    assert decisions.order.writable([job]) == []
    recorder.gate.set()
    wait_for(lambda: decisions.order.writable([]) == [job], 'the acknowledgement to be writable')


def test_release_does_not_wait(pipeline: Pipeline, recorder: Recorder) -> None:
    """The message is delivered again in any case."""
    decisions = Decisions()
    hold(pipeline, recorder)
    assert decisions.writable('ack', 'release') == ['release']


def test_decision_waits_while_there_is_no_room_for_the_results(
    pipeline: Pipeline, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, '_MAX_RESULTS', 1)
    decisions = Decisions()
    hold(pipeline, recorder)
    assert decisions.writable('ack') == []
    recorder.gate.set()
    wait_for(decisions.woken.is_set, 'the consumer to be woken')
    assert decisions.writable() == ['ack']


def test_decisions_wait_for_nothing_after_the_pipeline_is_closed(pipeline: Pipeline, recorder: Recorder) -> None:
    decisions = Decisions()
    hold(pipeline, recorder)
    assert decisions.writable('ack') == []
    recorder.outages = 10_000_000
    recorder.gate.set()
    write_order.unregister(pipeline)
    assert decisions.woken.is_set()
    assert decisions.writable() == ['ack']
