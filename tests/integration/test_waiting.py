"""Waiting for results: one subscriber thread per process wakes all callers, and exists only while there are some."""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import TimeoutError
from celery.result import AsyncResult

from celery_couchdb.backend import CouchDBBackend
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, RequestRefused, ServerUnavailable
from tests.conftest import PATIENCE, PATIENT, wait_for
from tests.support import Request, store_all

from .conftest import watched

READER = 'celery-couchdb-results'


def app_of(url: str, **conf: Any) -> Celery:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    options = {**PATIENT, **conf.pop('result_backend_transport_options', {})}
    app.conf.update(conf, result_backend_transport_options=options)
    return app


def threads_named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def threads_end() -> None:
    wait_for(lambda: not threads_named(READER), 'the subscribers to end')
    # The frame of another thread may refer to results for a moment: they are collected later.
    wait_for(lambda: gc.collect() >= 0 and not threads_named('celery-couchdb-callbacks'), 'the callback threads to end')


@pytest.fixture(scope='module', autouse=True)
def no_thread_of_other_tests() -> None:
    threads_end()


@pytest.fixture(autouse=True)
def no_threads_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the threads of the backend end when no caller waits."""
    monkeypatch.setattr('celery_couchdb.waiting.subscriber._IDLE_SECONDS', 0.1)
    monkeypatch.setattr('celery_couchdb.waiting.callbacks._IDLE_SECONDS', 0.1)
    monkeypatch.setattr('celery_couchdb.waiting.callbacks._CHECK_SECONDS', 0.1)
    yield
    threads_end()


@pytest.fixture
def app(url: str, client: Client) -> Celery:
    """The app that waits; the database exists."""
    return app_of(url)


@pytest.fixture
def worker(url: str) -> CouchDBBackend:
    """A backend that stores results. Its different options make it share nothing with that of `app`."""
    return app_of(url, result_backend_transport_options={'sweep_interval': 1.0}).backend


class Waiting(threading.Thread):
    """A call in a thread of its own. `value()` waits for the call and returns its value."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call, self._outcome = call, list[Any]()
        self.start()

    def run(self) -> None:
        try:
            self._outcome.append(self._call())
        except Exception as exc:
            self._outcome.append(exc)

    def value(self) -> Any:
        self.join(PATIENCE)
        assert self._outcome, 'the call has not returned'
        return self._outcome[0]


def get(app: Celery, *task_ids: str, **options: Any) -> list[Waiting]:
    """Wait for each result in a thread of its own."""
    return [Waiting(partial(app.AsyncResult(name).get, timeout=PATIENCE, **options)) for name in task_ids]


def is_listening(sent: list[Request], *task_ids: str) -> bool:
    """Return whether a longpoll for all these results has been sent."""
    wanted = {f'celery-task-meta-{task_id}' for task_id in task_ids}
    asked, read = set[str](), set[str]()
    for request in list(sent):
        body, name = request.body or {}, (request.path or '').removeprefix('/')
        if request.path == '/_bulk_get':
            read |= {doc['id'] for doc in body['docs']}
        elif request.method == 'GET' and name in wanted:
            read |= {name} & asked  # the waiting thread reads first, and then the subscriber, if only one is new
            asked.add(name)
        elif request.path == '/_changes' and wanted <= (set(body['doc_ids']) if 'doc_ids' in body else read):
            return True
    return False


def ids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _ in range(count)]


# -- get


def test_get_returns_when_the_result_is_stored(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    [task_id] = ids(1)
    [waiting] = get(app, task_id)
    wait_for(lambda: is_listening(sent, task_id), 'the longpoll')
    worker.mark_as_done(task_id, {'sum': 3})
    assert waiting.value() == {'sum': 3}
    asked = [(request.method, request.path) for request in sent]
    assert asked[:2] == [('GET', f'/celery-task-meta-{task_id}'), ('POST', '/_changes')]
    # While the worker stores the result, the longpoll may end and be repeated.
    assert [path for method, path in asked if method == 'GET' and path] == [f'/celery-task-meta-{task_id}']


def test_ready_result_costs_one_request_and_no_thread(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    [task_id] = ids(1)
    worker.mark_as_done(task_id, 1)
    sent.clear()
    assert app.AsyncResult(task_id).get(timeout=0) == 1
    assert len(sent) == 1
    assert threads_named(READER) == 0


def test_on_message_gets_each_state_and_get_returns_the_last(
    app: Celery, worker: CouchDBBackend, sent: list[Request]
) -> None:
    [task_id] = ids(1)
    told: list[Any] = []
    [waiting] = get(app, task_id, on_message=lambda meta: told.append(meta['status']))
    wait_for(lambda: is_listening(sent, task_id), 'the longpoll')
    worker.mark_as_started(task_id)
    wait_for(lambda: told == ['STARTED'], 'the first state')
    worker.store_result(task_id, {'done': 50}, 'PROGRESS')
    wait_for(lambda: told == ['STARTED', 'PROGRESS'], 'the second state')
    worker.mark_as_done(task_id, 'end')
    assert waiting.value() == 'end'
    assert told == ['STARTED', 'PROGRESS', 'SUCCESS']


def test_timeout_frees_all_resources(app: Celery) -> None:
    result = app.AsyncResult(*ids(1))
    with pytest.raises(TimeoutError):
        result.get(timeout=0.05)
    gone = weakref.ref(result)
    del result
    wait_for(lambda: gc.collect() is not None and gone() is None, 'the result to be garbage collected')


def test_on_interval_is_called(app: Celery, worker: CouchDBBackend) -> None:
    [task_id] = ids(1)
    calls: list[int] = []
    results = app.ResultSet([app.AsyncResult(task_id)])
    waiting = Waiting(lambda: results.get(timeout=PATIENCE, interval=0.01, on_interval=lambda: calls.append(1)))
    wait_for(lambda: len(calls) >= 3, 'the calls of on_interval')
    worker.mark_as_done(task_id, 1)
    assert waiting.value() == [1]


def test_many_threads_share_one_subscriber(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    names = ids(20)
    waiting = get(app, *names, names[0])
    wait_for(lambda: is_listening(sent, *names), 'a longpoll for all results')
    assert threads_named(READER) == 1
    store_all(worker.client, {name: name for name in names})
    assert [thread.value() for thread in waiting] == [*names, names[0]]


def test_new_waits_do_not_delay_other_results(
    app: Celery, worker: CouchDBBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They interrupt each longpoll before it ends."""
    [task_id] = ids(1)
    is_stored = threading.Event()
    monkeypatch.setattr(app.backend.subscriber._longpoll, 'wait', lambda *_, **__: is_stored.wait(PATIENCE) and None)
    [waiting] = get(app, task_id)
    wait_for(lambda: task_id in watched(app), 'the wait')
    worker.mark_as_done(task_id, 'through')
    is_stored.set()
    assert waiting.value() == 'through'


def test_malformed_results_affect_only_their_own_callers(
    app: Celery, worker: CouchDBBackend, client: Client, sent: list[Request]
) -> None:
    *malformed, foreign, good = names = ids(5)
    waits = get(app, *names)
    wait_for(lambda: is_listening(sent, *names), 'a longpoll for all results')
    docs: list[dict[str, Any]] = [{'value': 'no JSON'}, {'value': {'status': 'SUCCESS'}}, {'base64': 'AAAA'}]
    for name, doc in zip(malformed, docs, strict=True):
        client.put({'_id': f'celery-task-meta-{name}', 'type': 'Result', 'status': 'SUCCESS', **doc})
    of_celerys_backend = {'status': 'SUCCESS', 'result': 5, 'traceback': None, 'children': [], 'task_id': foreign}
    client.put({'_id': f'celery-task-meta-{foreign}', 'value': json.dumps(of_celerys_backend)})
    worker.mark_as_done(good, 'fine')
    assert [wait.value() for wait in waits[3:]] == [5, 'fine']
    assert all(isinstance(wait.value(), Exception) for wait in waits[:3])


def _get_in_child(app: Celery, task_id: str, answers: Any) -> None:
    answers.put(app.AsyncResult(task_id).get(timeout=PATIENCE))


def test_forked_child_uses_its_own_subscriber(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    parents, childs = ids(2)
    [waiting] = get(app, parents)
    wait_for(lambda: is_listening(sent, parents), 'the longpoll of the parent')
    context = multiprocessing.get_context('fork')
    answers = context.Queue()
    child = context.Process(target=_get_in_child, args=(app, childs, answers))
    child.start()
    worker.mark_as_done(childs, 'for the child')
    worker.mark_as_done(parents, 'for the parent')
    assert answers.get(timeout=PATIENCE) == 'for the child'
    assert waiting.value() == 'for the parent'
    child.join(PATIENCE)


@pytest.mark.parametrize('count', [1, 20])
def test_error_that_stays_is_raised(app: Celery, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    subscriber = app.backend.subscriber

    def refuse(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name == READER:
            raise AccessDenied('no')
        return read_many(*args, **options)

    read_many = subscriber.store.read_many
    monkeypatch.setattr(subscriber._longpoll, 'wait', refuse)
    monkeypatch.setattr(subscriber.store, 'read_many', refuse)
    waiting = get(app, *ids(count))
    assert {type(thread.value()) for thread in waiting} == {AccessDenied}


def test_response_for_results_that_nothing_waits_for_cannot_be_read(
    app: Celery, worker: CouchDBBackend, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sent_tasks(app, 2)

    def refuse(*args: Any, **options: Any) -> Any:
        raise RequestRefused('odd')

    monkeypatch.setattr(app.backend.subscriber._longpoll, 'wait', refuse)
    [waiting] = get(app, first.id)
    wait_for(partial(is_asked_for, sent, first.id), 'the request')
    worker.mark_as_done(first.id, 1)
    worker.mark_as_done(second.id, 2)
    assert [waiting.value(), second.get(timeout=PATIENCE)] == [1, 2]


def test_abandoned_iteration_frees_all_resources(app: Celery, worker: CouchDBBackend) -> None:
    first, second = ids(2)
    worker.mark_as_done(first, 1)
    iteration = app.backend.await_results([first, second], timeout=PATIENCE)
    assert next(iteration)[0] == first
    del iteration
    gc.collect()
    assert not watched(app)


# -- groups


def test_number_of_awaited_results_grows_and_shrinks(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    many, few = ids(120), ids(3)
    [one] = get(app, few[0])
    wait_for(lambda: is_listening(sent, few[0]), 'the first longpoll')
    group = Waiting(partial(app.GroupResult('g', [app.AsyncResult(name) for name in many]).get, timeout=PATIENCE))
    wait_for(
        lambda: any(request.path == '/_changes' and not request.body for request in sent),
        'the longpoll for all results',
    )
    [two] = get(app, few[1])
    store_all(worker.client, {name: name for name in many})
    assert group.value() == many
    [three] = get(app, few[2])
    store_all(worker.client, {name: name for name in few})
    assert [wait.value() for wait in (one, two, three)] == few


def test_ready_group_of_a_thousand_takes_few_requests(app: Celery, client: Client, sent: list[Request]) -> None:
    names = ids(1000)
    store_all(client, {name: name for name in names})
    sent.clear()
    inner = app.GroupResult('inner', [app.AsyncResult(name) for name in names[1:]])
    outer = app.GroupResult('outer', [app.AsyncResult(names[0]), inner])
    assert outer.get(timeout=PATIENCE) == [names[0], names[1:]]
    assert len(sent) <= 5  # one request per process asks whether the server is a cluster


def test_result_of_a_chain_takes_two_requests(app: Celery, client: Client, sent: list[Request]) -> None:
    """Celery asks for the state of each step, the first one first, and then for the last result."""
    names = ids(10)
    store_all(client, {name: name for name in names})
    result: Any = None
    for name in names:
        result = app.AsyncResult(name, parent=result)
    sent.clear()
    assert result.get(timeout=PATIENCE) == names[-1]
    assert len(sent) <= 3  # one request per process asks whether the server is a cluster


def test_join_iteration_and_failure_of_a_result_set(app: Celery, worker: CouchDBBackend) -> None:
    names = ids(2)
    results = app.ResultSet([app.AsyncResult(name) for name in names])
    worker.mark_as_done(names[0], 1)
    worker.mark_as_failure(names[1], LookupError('no'))
    with pytest.raises(LookupError):
        results.get(timeout=PATIENCE)
    assert [type(value) for value in results.join(timeout=PATIENCE, propagate=False)] == [int, LookupError]
    assert sorted(name for name, _meta in results.iter_native(timeout=PATIENCE)) == sorted(names)


# -- groups that are never sent


def never_sent(app: Celery, parent: str, *names: str, around: bool = False) -> Any:
    """Return the results of a group that is sent after the task `parent`, or of a group around that one."""
    group = app.GroupResult(str(uuid.uuid4()), [app.AsyncResult(name) for name in names])
    group.parent = app.AsyncResult(parent, parent=app.AsyncResult(ids(1)[0]))
    return app.GroupResult(str(uuid.uuid4()), [group]) if around else group


@pytest.mark.parametrize(
    ('method', 'before', 'around'),
    [('get', False, False), ('get', True, True), ('join', False, True), ('join_native', True, False)],
)
def test_group_raises_the_error_of_the_task_before_it(
    app: Celery, worker: CouchDBBackend, sent: list[Request], method: str, before: bool, around: bool
) -> None:
    parent, *names = ids(3)
    if before:
        worker.mark_as_failure(parent, LookupError('no'))
    group = never_sent(app, parent, *names, around=around)
    waiting = Waiting(lambda: getattr(group, method)(timeout=PATIENCE))
    if not before:
        wait_for(lambda: is_listening(sent, parent), 'the longpoll')
        worker.mark_as_failure(parent, LookupError('no'))
    outcome = waiting.value()
    assert isinstance(outcome, LookupError)
    wait_for(lambda: not watched(app), 'the end of all waits')


def test_group_that_is_never_sent_with_propagate_false(
    app: Celery, worker: CouchDBBackend, sent: list[Request]
) -> None:
    parent, *names, beside = ids(4)
    worker.mark_as_failure(parent, LookupError('no'))
    values = never_sent(app, parent, *names).join(timeout=PATIENCE, propagate=False)
    assert [type(value) for value in values] == [LookupError, LookupError]
    group = app.GroupResult(str(uuid.uuid4()), [never_sent(app, parent, *names), app.AsyncResult(beside)])
    waiting = Waiting(lambda: group.get(timeout=PATIENCE, propagate=False))
    wait_for(lambda: is_listening(sent, beside), 'the longpoll')
    worker.mark_as_done(beside, 1)
    error, value = waiting.value()
    assert (type(error), value) == (LookupError, 1)


def test_ready_results_are_returned_before_the_error(app: Celery, worker: CouchDBBackend) -> None:
    """A worker was killed while it sent a group, and the redelivered task before the group failed."""
    parent, sent, missing = ids(3)
    worker.mark_as_done(sent, 1)
    worker.mark_as_failure(parent, LookupError('no'))
    found = list(never_sent(app, parent, missing, sent).iter_native(timeout=PATIENCE))
    assert [(task_id, type(meta['result'])) for task_id, meta in found] == [(sent, int), (missing, LookupError)]
    worker.mark_as_done(missing, 2)
    assert never_sent(app, parent, missing, sent).get(timeout=PATIENCE) == [2, 1]


def test_group_times_out_while_the_task_before_it_runs(app: Celery, worker: CouchDBBackend) -> None:
    parent, *names = ids(3)
    worker.mark_as_started(parent)
    for method in ('get', 'join'):
        with pytest.raises(TimeoutError):
            getattr(never_sent(app, parent, *names), method)(timeout=0.2)
    worker.mark_as_failure(parent, LookupError('no'))
    for method in ('get', 'join'):
        with pytest.raises(LookupError):
            getattr(never_sent(app, parent, *names), method)(timeout=0)


# -- then


def test_callback_of_a_group(app: Celery, worker: CouchDBBackend) -> None:
    names = ids(3)
    called: list[Any] = []
    group = app.GroupResult('g', [app.AsyncResult(name) for name in names])
    group.then(lambda result: called.append(result.get()))
    for name in names:
        worker.mark_as_done(name, name)
    wait_for(lambda: called == [names], 'the callback')


def test_callback_may_wait_for_another_result(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    first, second = ids(2)
    called: list[Any] = []
    app.AsyncResult(first).then(lambda _: called.append(app.AsyncResult(second).get(timeout=PATIENCE)))
    worker.mark_as_done(first, 1)
    wait_for(lambda: is_listening(sent, second), 'the longpoll of the callback')
    worker.mark_as_done(second, 2)
    wait_for(lambda: called == [2], 'the callback')


def test_callbacks_that_fail_and_odd_ids_do_not_stop_other_callbacks(
    app: Celery, worker: CouchDBBackend, sent: list[Request], caplog: pytest.LogCaptureFixture
) -> None:
    fails, good = ids(2)
    called: list[Any] = []
    for bad in ('', 'x\ud800'):
        app.AsyncResult(bad).then(called.append)
    app.AsyncResult(fails).then(lambda _: 1 / 0)
    app.AsyncResult(good).then(lambda result: called.append(result.get()))
    gc.collect()  # nothing refers to the results
    wait_for(lambda: is_listening(sent, fails, good), 'the longpoll')
    for name in (fails, good):
        worker.mark_as_done(name, 5)
    wait_for(lambda: called == [5], 'the callback')
    wait_for(lambda: 'callback of task' in caplog.text, 'the log line about the callback')


@pytest.mark.parametrize('how', ['polled', 'awaited'])
def test_callback_is_called_once_if_its_result_is_known_otherwise(
    app: Celery, worker: CouchDBBackend, how: str
) -> None:
    for name in ids(4):
        called: list[int] = []
        result = app.AsyncResult(name)

        def slow(_: Any, called: list[int] = called) -> None:
            time.sleep(0.01)
            called.append(1)

        result.then(slow)
        waiting = get(app, name) if how == 'awaited' else []
        worker.mark_as_done(name, 1)
        if not waiting:
            wait_for(result.ready, 'the result')
        assert [wait.value() for wait in waiting] == [1] * len(waiting)
        wait_for(partial(len, called), 'the callback')
        time.sleep(0.02)  # a second call would have ended by now
        assert called == [1]


def test_consecutive_state_queries_return_current_states(app: Celery, worker: CouchDBBackend) -> None:
    names = ids(4)
    group = app.GroupResult('g', [app.AsyncResult(name) for name in names])
    wait_for(lambda: len(app.backend.callbacks._held) == 4, 'the group to be registered')
    for count, name in enumerate(names):
        assert group.completed_count() == count
        worker.mark_as_done(name, 1)
    assert group.completed_count() == 4


def test_states_of_many_results_take_few_requests(
    app: Celery, worker: CouchDBBackend, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Results that were read ahead are valid for a moment only, which a busy machine may need for each query.
    monkeypatch.setattr('celery_couchdb.waiting.read_ahead.time', SimpleNamespace(monotonic=lambda: 0.0))
    published = sent_tasks(app, 200)
    group = app.GroupResult('g', [app.AsyncResult(name) for name in ids(200)])
    wait_for(lambda: len(app.backend.callbacks._held) >= 200, 'the group to be registered')
    worker.mark_as_done(published[-1].id, 1)
    worker.mark_as_done(group.results[-1].id, 1)
    sent.clear()
    assert group.completed_count() == 1
    assert [result.ready() for result in published].count(True) == 1
    assert len(sent) < 30


# -- results that are watched before the program asks for them


def sent_tasks(app: Celery, count: int) -> list[AsyncResult]:
    """Return the results of tasks that this process has sent, in this order."""
    names = ids(count)
    for name in names:
        app.backend.on_task_call(None, name)
    return [app.AsyncResult(name) for name in names]


def watched_tasks(app: Celery, sent: list[Request], count: int) -> tuple[list[AsyncResult], Waiting]:
    """Return results that are watched because a thread waits for the first of them, and that wait."""
    results = sent_tasks(app, count)
    [waiting] = get(app, results[0].id)
    wait_for(lambda: is_listening(sent, *(result.id for result in results)), 'the longpoll')
    return results, waiting


def is_known(app: Celery, result: AsyncResult) -> bool:
    key = app.backend.get_key_for_task(result.id)
    return key in app.backend.subscriber.cache


def test_one_look_serves_the_results_that_are_asked_for_next(
    app: Celery, worker: CouchDBBackend, sent: list[Request]
) -> None:
    results, waiting = watched_tasks(app, sent, 5)
    for number, result in reversed(list(enumerate(results))):
        worker.mark_as_done(result.id, number)
    assert waiting.value() == 0
    assert all(is_known(app, result) for result in results[1:])
    sent.clear()
    assert [result.get(timeout=PATIENCE) for result in results[1:]] == [1, 2, 3, 4]
    assert not [request for request in sent if request.path != '/_changes']


def test_state_that_was_received_before_is_delivered(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    """The next result fails, and a thread asks for it while the subscriber watches it already."""
    results, waiting = watched_tasks(app, sent, 3)
    worker.mark_as_failure(results[1].id, ValueError('no'))
    key = app.backend.get_key_for_task(results[1].id)
    wait_for(lambda: app.backend.subscriber._watched.ahead.get(key), 'the failure')
    seen = list[str]()
    second = Waiting(lambda: results[1].get(timeout=PATIENCE, on_message=lambda meta: seen.append(meta['status'])))
    assert isinstance(second.value(), ValueError)
    assert seen == ['FAILURE']
    worker.mark_as_done(results[0].id, 1)
    assert waiting.value() == 1


def test_forgotten_result_is_not_kept(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    results, waiting = watched_tasks(app, sent, 3)
    for result in reversed(results):
        worker.mark_as_done(result.id, 1)
    assert waiting.value() == 1
    wait_for(lambda: is_known(app, results[1]), 'the next result')
    results[1].forget()
    assert app.AsyncResult(results[1].id).state == states.PENDING
    app.backend.on_task_call(None, results[2].id)  # the same id is sent again
    assert not is_known(app, results[2])


def test_nothing_is_requested_when_nothing_waits(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    results = sent_tasks(app, 5)
    with pytest.raises(TimeoutError):
        results[0].get(timeout=0.2)
    wait_for(lambda: not app.backend.subscriber._watched.ahead, 'the end of the watch')
    sent.clear()
    for result in results:
        worker.mark_as_done(result.id, 1)
    assert {request.method for request in sent} == {'POST'}


def test_many_results_in_turn_take_few_requests(app: Celery, worker: CouchDBBackend, sent: list[Request]) -> None:
    results = sent_tasks(app, 300)
    first = Waiting(lambda: [result.get(timeout=PATIENCE) for result in results])
    wait_for(lambda: is_listening(sent, results[0].id), 'the longpoll')
    for start in range(0, 300, 50):
        store_all(worker.client, {result.id: start for result in results[start : start + 50]})
    assert first.value() == [number // 50 * 50 for number in range(300)]
    assert len(sent) < 100


# -- a feed that cannot be read


@pytest.fixture
def unreadable(app: Celery) -> None:
    """A response of the feed could not be read."""
    app.backend.subscriber._stop_following()


def is_asked_for(sent: list[Request], name: str) -> bool:
    """Return whether the subscriber has asked for a result, after the first read."""
    path = f'/celery-task-meta-{name}'
    return sum(request.path == path and request.method == 'GET' for request in list(sent)) >= 2


def test_many_results_are_asked_for_together(
    app: Celery, worker: CouchDBBackend, sent: list[Request], unreadable: None
) -> None:
    names = ids(20)
    sent.clear()
    waiting = get(app, *names)
    wait_for(lambda: watched(app) >= {*names}, 'all waits')
    store_all(worker.client, {name: name for name in names})
    assert [thread.value() for thread in waiting] == names
    assert any(request.path == '/_bulk_get' and len(request.body['docs']) >= 10 for request in sent)
    assert not [request for request in sent if request.path == '/_changes']


def test_callbacks_are_called_if_the_feed_cannot_be_read(app: Celery, worker: CouchDBBackend, unreadable: None) -> None:
    [name] = ids(1)
    called: list[Any] = []
    app.AsyncResult(name).then(lambda result: called.append(result.get()))
    wait_for(lambda: name in watched(app), 'the wait')
    worker.mark_as_done(name, 3)
    wait_for(lambda: called == [3], 'the callback')


def test_timeout_while_results_are_asked_for(app: Celery, unreadable: None) -> None:
    with pytest.raises(TimeoutError):
        app.AsyncResult(*ids(1)).get(timeout=0.3)


def test_outage_while_results_are_asked_for(
    app: Celery, worker: CouchDBBackend, monkeypatch: pytest.MonkeyPatch, unreadable: None
) -> None:
    [name] = ids(1)
    store, failures = app.backend.subscriber.store, list[int]()
    read = store.read_many

    def fail_twice(wanted: Any, **options: Any) -> Any:
        if len(failures) < 2:
            failures.append(1)
            raise ServerUnavailable('no response')
        return read(wanted, **options)

    [waiting] = get(app, name)
    wait_for(lambda: name in watched(app), 'the wait')
    monkeypatch.setattr(store, 'read_many', fail_twice)
    worker.mark_as_done(name, 1)
    assert waiting.value() == 1
