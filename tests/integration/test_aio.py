"""Coroutines that send tasks and wait for results: like `get`, without a thread for each and without blocking."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import traceback
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest
from celery import Celery, chain, states
from celery import group as group_of
from celery.app.task import Context
from celery.exceptions import TaskRevokedError, TimeoutError
from celery.result import allow_join_result, denied_join_result
from celery.signals import before_task_publish
from kombu.exceptions import OperationalError

from celery_couchdb import aio
from celery_couchdb.backend import CouchDBBackend
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.server import Server as CouchServer
from kombu_couchdb.errors import AccessDenied, ConfigurationError, ServerUnavailable
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENCE, PATIENT, wait_for
from tests.support import end, items, store_all

from .conftest import watched

T = TypeVar('T')

SENDER = 'celery-couchdb-aio'


@pytest.fixture
def worker(app: Celery) -> CouchDBBackend:
    """A backend that stores results. Its different options make it share nothing with that of `app`."""
    other = Celery('worker', set_as_current=False, broker='memory://', backend=app.conf.result_backend)
    other.conf.result_backend_transport_options = {**PATIENT, 'sweep_interval': 1.0}
    other.backend.client.create()
    return other.backend


@pytest.fixture(autouse=True)
def nothing_left(app: Celery) -> Iterator[None]:
    """Check that nothing is watched after a test, and that the event loop of no test has sent a request."""
    yield
    assert not watched(app)


@pytest.fixture(autouse=True)
def no_request_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no request is sent, and so no connection is opened, in the thread of an event loop."""
    found: list[str] = []
    send = CouchServer.send

    def checked(self: CouchServer, *args: Any) -> Any:
        if asyncio._get_running_loop() is not None:
            found.append(''.join(traceback.format_stack()))
        return send(self, *args)

    monkeypatch.setattr(CouchServer, 'send', checked)
    yield
    assert not found, found[0]


def ids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _ in range(count)]


async def until(condition: Callable[[], T], what: str = '') -> T:
    """Wait for a condition like `wait_for`, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(None, wait_for, condition, what)


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, call, *args)


@asynccontextmanager
async def waiting(app: Celery, *results: Any, **options: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Wait for results, each in a task of its own, and begin the block when all of them are watched."""
    tasks = [asyncio.ensure_future(aio.get(result, **{'timeout': PATIENCE, **options})) for result in results]
    await until(lambda: {result.id for result in results} <= watched(app), 'the wait')
    yield tasks
    await asyncio.wait(tasks, timeout=PATIENCE)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a loop whose errors, such as those of forgotten tasks, fail the test."""

    async def checked() -> T:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        value = await main
        assert not errors
        assert len(asyncio.all_tasks()) == 1
        return value

    return asyncio.run(checked())


# -- get


def test_get_returns_when_the_result_is_stored(app: Celery, worker: CouchDBBackend) -> None:
    async def main() -> None:
        [task_id] = ids(1)
        told: list[str] = []
        result = app.AsyncResult(task_id)
        async with waiting(app, result, on_message=lambda meta: told.append(meta['status'])) as [task]:
            await in_thread(worker.mark_as_started, task_id)
            await until(lambda: told == ['STARTED'], 'the first state')
            await in_thread(worker.mark_as_done, task_id, {'sum': 3})
        assert task.result() == {'sum': 3}
        assert told == ['STARTED', 'SUCCESS']
        assert result.state == states.SUCCESS  # known: no request in the loop

    run(main())


@pytest.mark.parametrize('timeout', [None, 0, 0.5, PATIENCE])
def test_ready_result(app: Celery, worker: CouchDBBackend, timeout: float | None) -> None:
    [task_id] = ids(1)
    worker.mark_as_done(task_id, 5)
    result = app.AsyncResult(task_id)
    assert run(aio.get(result, timeout)) == 5
    assert run(aio.get(result, timeout)) == 5


@pytest.mark.parametrize('timeout', [0, 0.1, 1.1])
def test_timeout(app: Celery, worker: CouchDBBackend, timeout: float) -> None:
    [task_id] = ids(1)
    with pytest.raises(TimeoutError):
        run(aio.get(app.AsyncResult(task_id), timeout))
    with pytest.raises(TimeoutError):
        run(aio.get(app.GroupResult('g', [app.AsyncResult(name) for name in ids(3)]), timeout))
    assert timeout or not app.backend.subscriber._running  # it was not woken


def test_a_thousand_coroutines_share_one_subscriber(app: Celery, worker: CouchDBBackend) -> None:
    names = ids(1000)

    async def main() -> list[Any]:
        before = threading.active_count()
        tasks = [asyncio.ensure_future(aio.get(app.AsyncResult(name), PATIENCE)) for name in names]
        await asyncio.sleep(0)
        assert watched(app) == set(names)
        assert threading.active_count() <= before + 1
        for start in range(0, 1000, 100):
            await in_thread(store_all, worker.client, {name: name for name in names[start : start + 100]})
        return await asyncio.gather(*tasks)

    assert run(main()) == names


def test_coroutines_that_wait_for_the_same_result(app: Celery, worker: CouchDBBackend) -> None:
    async def main() -> None:
        [task_id] = ids(1)
        result = app.AsyncResult(task_id)
        async with waiting(app, result, result, app.AsyncResult(task_id)) as tasks:
            await in_thread(worker.mark_as_done, task_id, 1)
        assert [task.result() for task in tasks] == [1, 1, 1]

    run(main())


def test_cancelling_leaves_nothing_behind(app: Celery, worker: CouchDBBackend) -> None:
    first, second = ids(2)

    async def main() -> None:
        async with waiting(app, app.AsyncResult(first), app.AsyncResult(second)) as [cancelled, task]:
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert watched(app) == {second}
            await in_thread(worker.mark_as_done, second, 2)
        assert task.result() == 2
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(aio.get(app.AsyncResult(first)), 0.05)
        assert not aio._process.running_loop().mailboxes

    run(main())


# -- outcomes, which are those of `get`


def outcome(call: Callable[[], Any]) -> Any:
    try:
        found = call()
    except Exception as exc:
        return 'raised', type(exc), str(exc), bool(exc.__traceback__)
    return [(type(value), str(value)) for value in found] if isinstance(found, list) else (type(found), str(found))


def chained(app: Celery, *task_ids: str) -> Any:
    """Return the result of the last task in a chain."""
    result = None
    for task_id in task_ids:
        result = app.AsyncResult(task_id, parent=result)
    return result


def never_sent(app: Celery, parent: str, *names: str, around: bool = False) -> Any:
    """Return the results of a group that is sent after the task `parent`, or of a group around that one."""
    group = app.GroupResult(str(uuid.uuid4()), [app.AsyncResult(name) for name in names])
    group.parent = app.AsyncResult(parent, parent=app.AsyncResult(ids(1)[0]))
    return app.GroupResult(str(uuid.uuid4()), [group]) if around else group


@pytest.mark.parametrize('propagate', [True, False])
@pytest.mark.parametrize('late', [True, False], ids=['late', 'early'])
def test_outcomes_are_those_of_get(app: Celery, worker: CouchDBBackend, propagate: bool, late: bool) -> None:
    good, fine, bad, revoked, *others = ids(40)
    given = iter(others)

    def of(task_id: str) -> Any:
        return app.AsyncResult(task_id)

    def after_chord(header: str) -> Any:
        result = of(bad)
        result.parent = app.GroupResult('header', [of(good), of(header)])
        return result

    made: list[Callable[[], Any]] = [
        lambda: of(good),
        lambda: of(bad),
        lambda: of(revoked),
        lambda: chained(app, good, bad),
        lambda: chained(app, bad, bad),
        lambda: after_chord(revoked),
        lambda: app.ResultSet([of(good)]),
        lambda: app.GroupResult('g', [of(good), of(bad), of(fine)]),
        lambda: app.GroupResult('g', [of(good), app.GroupResult('h', [of(fine), of(good)])]),
        lambda: never_sent(app, bad, *others[:2]),
        lambda: never_sent(app, revoked, *others[:2], around=True),
        lambda: never_sent(app, bad, others[0], good),
        lambda: app.ResultSet([]),
    ]
    if propagate:  # without, `get` may wait for ever, or raise the error of a nested result before Celery 5.7
        made.append(lambda: app.GroupResult('g', [of(good), app.GroupResult('h', [of(good), of(bad)])]))
        made.append(lambda: chained(app, revoked, next(given), next(given)))
        group = never_sent(app, bad, others[0])  # results know their group as long as it is referenced
        made.append(lambda: group.results[0])

    def store() -> None:
        worker.mark_as_done(good, [1])
        worker.mark_as_done(fine, None)
        worker.mark_as_revoked(revoked, 'enough')
        worker.mark_as_failure(bad, LookupError('no'), traceback='Traceback: no')

    async def main() -> list[Any]:
        def kept(make: Callable[[], Any]) -> Any:
            result = make()
            keep.append(result)
            return result

        keep: list[Any] = []
        waits = [asyncio.ensure_future(aio.get(kept(make), PATIENCE, propagate)) for make in made]
        if late:
            await asyncio.sleep(0)
            assert {good, fine, bad, revoked} <= watched(app)
            await in_thread(store)
        await asyncio.wait(waits, timeout=PATIENCE)
        return [outcome(wait.result) for wait in waits]

    if not late:
        store()
    found = run(main())
    for make, value in zip(made, found, strict=True):
        result = make()
        assert value == outcome(lambda result=result: result.get(PATIENCE, propagate))  # type: ignore[misc]
    assert found[2][1 if propagate else 0] is TaskRevokedError


def test_get_with_parents_that_are_not_followed(app: Celery, worker: CouchDBBackend) -> None:
    bad, good = ids(2)
    worker.mark_as_failure(bad, LookupError('no'))
    worker.mark_as_done(good, 1)
    assert run(aio.get(chained(app, bad, good), PATIENCE, follow_parents=False)) == 1


def test_ignored_result(app: Celery) -> None:
    result = app.AsyncResult(*ids(1))
    result.ignored = True
    assert run(aio.get(result)) is None


def test_get_inside_a_task(app: Celery, worker: CouchDBBackend) -> None:
    [task_id] = ids(1)
    worker.mark_as_done(task_id, 1)
    with denied_join_result():
        with pytest.raises(RuntimeError, match=r'Never call result\.get'):
            run(aio.get(app.AsyncResult(task_id)))
        assert run(aio.get(app.AsyncResult(task_id), PATIENCE, disable_sync_subtasks=False)) == 1
        with allow_join_result():
            assert run(aio.get(app.AsyncResult(task_id), PATIENCE)) == 1


def test_eager_results(app: Celery, report: Any) -> None:
    app.conf.task_always_eager = True

    @app.task(name='fail', shared=False)
    def fail() -> None:
        raise LookupError('no')

    async def main() -> None:
        assert await aio.get(await aio.delay(report, 5)) == 5
        assert await aio.get(await aio.group(report.s(n) for n in range(3))) == [0, 1, 2]
        with pytest.raises(LookupError):
            await aio.get(await aio.delay(fail))
        with pytest.warns(RuntimeWarning, match='task_always_eager'), pytest.raises(TimeoutError):
            await aio.get(app.AsyncResult(*ids(1)), 0)

    run(main())


@pytest.mark.parametrize('backend', ['cache+memory://', None])
def test_another_backend(backend: str | None) -> None:
    other = Celery('other', set_as_current=False, broker='memory://', backend=backend)
    for result in (other.AsyncResult('x'), other.ResultSet([other.AsyncResult('x')])):
        with pytest.raises(ConfigurationError, match=r'set result_backend to couchdb://'):
            run(aio.get(result))


def test_error_that_stays_is_raised(app: Celery, worker: CouchDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise AccessDenied('no')

    monkeypatch.setattr(app.backend.subscriber._longpoll, 'wait', refuse)
    monkeypatch.setattr(app.backend.subscriber.store, 'read_many', refuse)

    async def main() -> list[Any]:
        return await asyncio.gather(
            *(aio.get(app.AsyncResult(name), PATIENCE) for name in ids(5)), return_exceptions=True
        )

    assert {type(error) for error in run(main())} == {AccessDenied}


# -- as_completed


def test_as_completed(app: Celery, worker: CouchDBBackend) -> None:
    first, second, third = ids(3)
    group = app.GroupResult('g', [app.AsyncResult(first), app.AsyncResult(second)])

    async def main() -> list[Any]:
        found = []
        await in_thread(worker.mark_as_done, second, 2)
        results = [app.AsyncResult(third), group, app.AsyncResult(first), app.AsyncResult(second)]
        async for result, value in aio.as_completed(results, PATIENCE):
            found.append((result.id, value))
            if result.id == second:
                await in_thread(worker.mark_as_done, first, 1)
            elif len(found) == 3:
                await in_thread(worker.mark_as_done, third, 3)
        return found

    found = run(main())
    assert [found[0], found[3]] == [(second, 2), (third, 3)]
    assert sorted(found[1:3], key=str) == sorted([(first, 1), ('g', [1, 2])], key=str)


def test_errors_in_as_completed(app: Celery, worker: CouchDBBackend) -> None:
    good, bad, missing = ids(3)
    worker.mark_as_done(good, 1)
    worker.mark_as_failure(bad, LookupError('no'))

    async def collected(*names: str, **options: Any) -> dict[str, Any]:
        results = app.ResultSet([app.AsyncResult(name) for name in names])
        return {result.id: value async for result, value in aio.as_completed(results, **options)}

    found = run(collected(good, bad, propagate=False))
    assert (found[good], type(found[bad])) == (1, LookupError)
    with pytest.raises(LookupError):
        run(collected(missing, bad))
    with pytest.raises(TimeoutError):
        run(collected(good, missing, missing, timeout=1.0))


def test_iteration_that_is_abandoned_leaves_nothing_behind(app: Celery, worker: CouchDBBackend) -> None:
    good, *missing = ids(20)
    worker.mark_as_done(good, 1)

    async def main() -> None:
        async for _ in aio.as_completed([app.AsyncResult(name) for name in (good, *missing)]):
            break
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
        assert not watched(app)

    run(main())


# -- loops and processes


@pytest.mark.parametrize('name', ['asyncio', 'uvloop'])
def test_loops_in_several_threads(app: Celery, worker: CouchDBBackend, name: str) -> None:
    new_event_loop = pytest.importorskip(name).new_event_loop
    names = ids(40)
    found: list[Any] = []

    async def main(own: list[str]) -> None:
        found.extend(await asyncio.gather(*(aio.get(app.AsyncResult(name), PATIENCE) for name in own)))
        with pytest.raises(TimeoutError):
            await aio.get(app.AsyncResult(*ids(1)), 0.02)

    def work(own: list[str]) -> None:
        with closing(new_event_loop()) as loop:
            loop.run_until_complete(main(own))

    threads = [threading.Thread(target=work, args=(names[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: watched(app) == set(names), 'all waits')
    store_all(worker.client, {name: name for name in names})
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize('name', ['asyncio', 'uvloop'])
@pytest.mark.parametrize('noticed', ['by a delivery', 'by the next wait'])
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_loop_that_was_closed(app: Celery, worker: CouchDBBackend, name: str, noticed: str) -> None:
    first, second, third = ids(3)

    async def begin() -> None:
        for task_id in (first, second):
            abandoned.append(asyncio.ensure_future(aio.get(app.AsyncResult(task_id))))
        await asyncio.sleep(0.01)

    abandoned: list[Any] = []
    loop = pytest.importorskip(name).new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    assert watched(app) == {first, second}
    if noticed == 'by a delivery':
        worker.mark_as_done(first, 1)
        wait_for(lambda: not watched(app), 'the end of the waits')
    worker.mark_as_done(third, 3)
    assert run(aio.get(app.AsyncResult(third), PATIENCE)) == 3
    assert not watched(app)
    assert loop not in aio._process._loops
    for task in abandoned:
        task._log_destroy_pending = False


def _get_in_child(app: Celery, report: Any, task_id: str, answers: Any) -> None:
    async def main() -> Any:
        await aio.delay(report, 7)
        return await aio.get(app.AsyncResult(task_id), PATIENCE)

    answers.put(asyncio.run(main()))


def test_forked_child_starts_anew(app: Celery, worker: CouchDBBackend, report: Any) -> None:
    parents, childs = ids(2)
    context = multiprocessing.get_context('fork')
    answers = context.Queue()

    async def main() -> Any:
        await aio.delay(report, 1)  # the threads exist
        async with waiting(app, app.AsyncResult(parents)) as [task]:
            child = context.Process(target=_get_in_child, args=(app, report, childs, answers))
            await in_thread(child.start)
            await in_thread(worker.mark_as_done, childs, 'for the child')
            assert await in_thread(lambda: answers.get(timeout=PATIENCE)) == 'for the child'
            await in_thread(worker.mark_as_done, parents, 'for the parent')
        await in_thread(child.join, PATIENCE)
        return task.result()

    assert run(main()) == 'for the parent'


# -- outages


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.host, server.port) as proxy:
        yield proxy
        proxy.go_on()


@pytest.fixture
def far(app: Celery, worker: CouchDBBackend, server: Server, proxy: Proxy) -> Iterator[Celery]:
    """An app whose connections lead through the proxy, with the time limits that are the default."""
    urls = {'broker': str(app.conf.broker_url), 'backend': str(app.conf.result_backend)}
    through = {name: url.replace(f':{server.port}/', f':{proxy.port}/') for name, url in urls.items()}
    far = Celery('far', set_as_current=False, **through)
    far.conf.result_backend_transport_options = {'request_timeout': 2.0}
    yield far
    end(far)


@pytest.mark.parametrize('trouble', ['refuse', 'hang'])
def test_wait_survives_an_outage(far: Celery, worker: CouchDBBackend, proxy: Proxy, trouble: str) -> None:
    names = ids(30)

    async def main() -> None:
        async with waiting(far, *map(far.AsyncResult, names)) as tasks:
            getattr(proxy, trouble)()
            await in_thread(store_all, worker.client, {name: name for name in names})
            with pytest.raises(TimeoutError):
                await aio.get(far.AsyncResult(*ids(1)), 1.5)
            with pytest.raises((TimeoutError, ServerUnavailable)):
                await aio.get(far.AsyncResult(*ids(1)), 0)
            assert not any(task.done() for task in tasks)
            proxy.restore() if trouble == 'refuse' else proxy.go_on()
        assert [task.result() for task in tasks] == names

    run(main())
    assert not watched(far)


def test_sending_during_an_outage(far: Celery, proxy: Proxy) -> None:
    @far.task(name='report', shared=False)
    def report(number: int) -> None:
        """Do nothing."""

    async def main() -> list[Any]:
        proxy.refuse()
        outcomes = await asyncio.gather(*(aio.delay(report, n) for n in range(20)), return_exceptions=True)
        proxy.restore()
        await aio.delay(report, 20)
        return outcomes

    assert {type(error) for error in run(main())} == {OperationalError}


# -- sending


def test_sending(app: Celery, client: Client, report: Any) -> None:
    @app.task(name='add', shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    async def main() -> None:
        one = await aio.delay(add, 1, y=2)
        other = await aio.apply_async(add, (3, 4), countdown=60, task_id='other')
        many = await asyncio.gather(*(aio.delay(report, n) for n in range(50)))
        group = await aio.group(add.s(n, n) for n in range(3))
        urgent = await aio.group(add.s(1, 1), add.s(2, 2), priority=9)
        await aio.apply_async(chain(add.s(1, 2), add.s(3)))
        await aio.delay(group_of(add.s(1), add.s(2)), 3)
        assert (other.id, len(group), len(urgent)) == ('other', 3, 2)
        assert len({one.id, *(result.id for result in many)}) == 51

    run(main())
    sent = [item['message']['headers']['task'] for item in items(client)]
    assert (sent.count('add'), sent.count('report')) == (10, 50)
    assert sum(thread.name.startswith(SENDER) for thread in threading.enumerate()) <= 8


def test_errors_of_sending(app: Celery, report: Any) -> None:
    async def main() -> None:
        with pytest.raises(TypeError):
            await aio.delay(report)
        with pytest.raises(Exception, match='JSON'):
            await aio.delay(report, object())

    run(main())


request_id: ContextVar[str] = ContextVar('request_id')


def test_task_is_sent_with_the_callers_context(app: Celery, client: Client, report: Any) -> None:
    """The context variables, the current app and the current task are those of the coroutine."""
    seen: list[Any] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        seen.append(request_id.get())

    async def main() -> None:
        request_id.set('r-1')
        await aio.delay(report, 1)

    app.set_current()
    before_task_publish.connect(note)
    context = Context(id='parent', root_id='root', called_directly=False, children=[])
    from celery._state import pop_current_task, push_current_task

    push_current_task(report)
    report.request_stack.push(context)
    try:
        run(main())
    finally:
        report.request_stack.pop()
        pop_current_task()
        before_task_publish.disconnect(note)
    [item] = items(client)
    headers = item['message']['headers']
    assert (headers['parent_id'], headers['root_id']) == ('parent', 'root')
    assert [child.id for child in context.children] == [headers['id']]
    assert seen == ['r-1']


# -- the warning of `get`


def test_get_warns_inside_a_loop(app: Celery, worker: CouchDBBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ids(2)
    store_all(worker.client, {first: 1, second: 2})
    monkeypatch.setattr(asyncio, '_get_running_loop', lambda: None)  # for `no_request_in_a_loop`

    async def main() -> None:
        monkeypatch.undo()
        for task_id in (first, second):
            assert app.AsyncResult(task_id).get(timeout=PATIENCE)
        assert app.ResultSet([app.AsyncResult(first)]).get(timeout=PATIENCE) == [1]
        with suppress(TimeoutError):
            await in_thread(lambda: app.AsyncResult(*ids(1)).get(timeout=0))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('default')
        asyncio.run(main())
    assert [warning.filename for warning in found] == [__file__] * 2
    assert all('celery_couchdb.aio.get' in str(warning.message) for warning in found)
