"""Scenarios of results: each is a function that returns what a user of `AsyncResult` and `GroupResult` sees."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any

from celery import chain, chord, group
from celery.result import AsyncResult, EagerResult, GroupResult, ResultSet, result_from_tuple

from tests.patience import PATIENCE

from .values import shown

__all__ = ['RESULTS', 'attempt', 'wait_until']

RESULTS: dict[str, Callable[[Any], Any]] = {}


def scenario(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add a scenario; its name is that of the function."""
    RESULTS[function.__name__.replace('_', ' ').strip()] = function
    return function


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return what a call returns or raises."""
    try:
        return shown(call(*args, **kwargs))
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt) and not exc.args:
            raise
        return f'raises {shown(exc)}'


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return the first true value of the condition."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, f'waited {PATIENCE:g} s'
        time.sleep(0.02)
    return value


def done(result: Any) -> Any:
    """Wait for the result, and return it."""
    result.get(timeout=PATIENCE, propagate=False)
    return result


def state(result: AsyncResult) -> list[Any]:
    """Return all that a result says about its state."""
    return [
        result.state,
        result.status == result.state,
        shown(result.result),
        shown(result.info),
        [result.ready(), result.successful(), result.failed()],
        type(result.traceback).__name__,
    ]


@scenario
def state_of_an_unknown_task(t: Any) -> Any:
    return state(t.app.AsyncResult(str(uuid.uuid4())))


@scenario
def state_of_a_success(t: Any) -> Any:
    result = done(t.add.delay(1, 1))
    return [state(result), state(t.app.AsyncResult(result.id)), str(result) == result.id, result.as_tuple()]


@scenario
def state_of_a_failure(t: Any) -> Any:
    result = done(t.fail.delay())
    again = t.app.AsyncResult(result.id)
    lines = again.traceback.splitlines()
    return [state(result), state(again), lines[0], lines[-1], attempt(again.get), attempt(again.maybe_throw)]


@scenario
def state_of_an_expired_task(t: Any) -> Any:
    result = done(t.add.apply_async((1, 1), expires=-1))
    return [state(result), attempt(result.get), attempt(result.get, propagate=False)]


@scenario
def state_of_a_revoked_task(t: Any) -> Any:
    task_id = str(uuid.uuid4())
    t.app.control.revoke(task_id, reply=True, limit=1, timeout=PATIENCE)
    result = done(t.add.apply_async((1, 1), task_id=task_id, link_error=[t.old.s(), t.new.s()]))
    return lambda: [state(result), attempt(result.get), t.notes()]


@scenario
def chord_with_a_revoked_member(t: Any) -> Any:
    task_id = str(uuid.uuid4())
    t.app.control.revoke(task_id, reply=True, limit=1, timeout=PATIENCE)
    result = chord([t.add.s(1, 1), t.add.s(2, 2).set(task_id=task_id)], t.total.s())()
    got = attempt(result.get, timeout=PATIENCE)
    return lambda: [got, [part.state for part in result.parent.results]]


@scenario
def revoke_of_a_running_task(t: Any) -> Any:
    result = t.waits.delay()
    wait_until(lambda: result.state == 'STARTED')
    result.revoke(terminate=True, signal='SIGKILL')
    return [attempt(result.get, timeout=PATIENCE), state(result)]


@scenario
def revoke_of_a_running_member(t: Any) -> Any:
    body = chord([t.waits.s(), t.add.s(1, 1)], t.total.s())()
    running = body.parent.results[0]
    wait_until(lambda: running.state == 'STARTED')
    running.revoke(terminate=True, signal='SIGKILL')
    return [attempt(body.get, timeout=PATIENCE), running.state]


@scenario
def time_limit(t: Any) -> Any:
    result = t.waits.apply_async(time_limit=1, link_error=[t.old.s(), t.new.s()])
    got = attempt(result.get, timeout=PATIENCE)
    return lambda: [got, state(result), t.notes()]


@scenario
def soft_time_limit_in_a_chord(t: Any) -> Any:
    body = chord([t.waits.s().set(soft_time_limit=1), t.add.s(1, 1)], t.total.s())()
    got = attempt(body.get, timeout=PATIENCE)
    return lambda: [got, [part.state for part in body.parent.results]]


@scenario
def lost_process(t: Any) -> Any:
    result = done(t.throw.apply_async(('SystemExit',), link_error=[t.old.s()]))
    return lambda: [state(result)[0], type(result.result).__name__, t.notes()]


@scenario
def track_started(t: Any) -> Any:
    result = t.waits.delay(7)
    wait_until(lambda: result.state == 'STARTED')
    seen = [result.state, sorted(result.info), type(result.info['pid']).__name__, result.ready(), result.children]
    t.say('go on')
    return [*seen, result.get(timeout=PATIENCE), result.state, shown(result.info)]


@scenario
def update_state(t: Any) -> Any:
    result, seen, names = t.progress.delay('PROGRESS', 'HALF', 'SUCCESSFUL'), [], ['PROGRESS', 'HALF', 'SUCCESSFUL']
    while names:
        wait_until(lambda: result.state == names[0])
        seen.append(state(result))
        t.say(f'seen {names.pop(0)}')
    return [*seen, result.get(timeout=PATIENCE)]


@scenario
def own_final_states(t: Any) -> Any:
    backend, task_id = t.app.backend, str(uuid.uuid4())
    backend.store_result(task_id, {'custom': [1]}, 'CUSTOM')
    first = state(t.app.AsyncResult(task_id))
    backend.store_result(task_id, 2, 'SUCCESS')
    backend.store_result(task_id, 3, 'CUSTOM')
    return [first, state(t.app.AsyncResult(task_id))]


@scenario
def state_of_a_retry(t: Any) -> Any:
    failed, planned = t.again.delay(1, times=9), t.again.delay(1, times=9, countdown=3600)
    wait_until(lambda: planned.state == 'RETRY')
    return [attempt(failed.get, timeout=PATIENCE), state(failed), failed.retries, state(planned)]


def fields(result: AsyncResult) -> list[Any]:
    """Return what `result_extended` adds."""
    return [result.name, shown(result.args), shown(result.kwargs), result.retries, result.queue]


@scenario
def extended_fields(t: Any) -> Any:
    fresh = t.app.AsyncResult(done(t.same.delay(1, 'ü', key=[None])).id)
    about = [fresh.worker.partition('@')[0], type(fresh.date_done).__name__, sorted(fresh._get_task_meta())]
    return [fields(fresh), *about]


@scenario
def extended_fields_of_other_states(t: Any) -> Any:
    seen = []
    for result in (t.fail.delay(1, text='x'), t.add.apply_async((1, 2), expires=-1), t.again.delay(2, times=2)):
        done(result)
        fresh = t.app.AsyncResult(result.id)
        seen.append([fresh.state, *fields(fresh)])
    return seen


@scenario
def extended_fields_of_a_chain(t: Any) -> Any:
    result = done(chain(t.add.s(1, 1), t.same.s(key=2)).delay())
    return [fields(result), fields(result.parent)]


@scenario
def get_without_an_error(t: Any) -> Any:
    result = t.fail.delay()
    return [shown(result.get(timeout=PATIENCE, propagate=False)), attempt(result.wait, timeout=PATIENCE)]


@scenario
def get_times_out(t: Any) -> Any:
    unknown = t.app.AsyncResult(str(uuid.uuid4()))
    both = t.app.GroupResult('g', [unknown, t.add.delay(1, 1)])
    return [attempt(wait, timeout=0.2) for wait in (unknown.get, both.get, both.join, both.join_native)]


@scenario
def get_calls_back(t: Any) -> Any:
    seen: list[Any] = []
    result = t.add.delay(1, 1)
    result.get(timeout=PATIENCE, callback=lambda *given: seen.append(given))
    together = group(t.add.s(1, n) for n in range(3)).delay()
    returned = together.get(timeout=PATIENCE, callback=lambda *given: seen.append(given))
    return [shown(sorted(seen[1:], key=lambda given: given[1])), seen[0] == (result.id, 2), returned]


@scenario
def get_of_a_failing_parent(t: Any) -> Any:
    result = chain(t.fail.s(), t.add.s(1)).delay()
    calls: list[dict[str, bool]] = [{}, {'disable_sync_subtasks': False}, {'propagate': False}]
    return [attempt(result.get, timeout=PATIENCE, **given) for given in calls]


@scenario
def forget(t: Any) -> Any:
    result = done(t.add.delay(1, 1))
    result.forget()
    fresh = t.app.AsyncResult(result.id)
    fresh.forget()
    chained = done(chain(t.add.s(1, 1), t.add.s(1)).delay())
    done(chained.parent)  # Celery before 5.7 sends the second task before it stores the first result
    chained.forget()
    return [state(result), state(fresh), [r.state for r in (chained, t.app.AsyncResult(chained.parent.id))]]


@scenario
def forget_and_send_again(t: Any) -> Any:
    task_id = str(uuid.uuid4())
    seen = []
    for number in (1, 2):
        result = t.add.apply_async((number, number), task_id=task_id)
        seen.append(result.get(timeout=PATIENCE))
        result.forget()
    return seen


def _forgotten(t: Any, value: str) -> Any:
    body = chord([t.same.s(value), t.waits.s(1)], t.same.s())()
    first, second = body.parent.results
    done(first)
    wait_until(lambda: second.state == 'STARTED')
    first.forget()
    t.say('go on')
    return attempt(body.get, timeout=PATIENCE)


@scenario
def forget_of_a_member(t: Any) -> Any:
    return _forgotten(t, 'small')


@scenario
def forget_of_a_member_with_a_large_result(t: Any) -> Any:
    return _forgotten(t, 'large' * 2000)


@scenario
def forget_of_a_group(t: Any) -> Any:
    result = done(group(t.add.s(1, n) for n in range(3)).delay())
    result.save()
    result.forget()
    return [t.app.AsyncResult(part.id).state for part in result.results]


@scenario
def then_calls_back(t: Any) -> Any:
    seen: list[Any] = []
    single, failing = t.add.delay(1, 1), t.fail.delay()
    single.then(lambda result: seen.append(result.result))
    failing.then(lambda result: seen.append('ok'), on_error=lambda result: seen.append(shown(result.result)))
    together = group(t.add.s(1, n) for n in range(3)).delay()
    together.then(lambda result: seen.append(result.get()))
    done(single), done(failing), done(together)
    return lambda: sorted(map(str, seen))


@scenario
def children_and_parents(t: Any) -> Any:
    result = done(chain(t.add.s(1, 1), t.add.s(1), t.add.s(1)).delay())
    first = result.parent.parent
    return [
        [first.parent is None, [child.id for child in first.children] == [result.parent.id], result.children],
        [each.get() for each in (result, result.parent, first)],
        first.get_leaf(),
    ]


@scenario
def collect(t: Any) -> Any:
    first = done(chain(t.add.s(1, 1), t.add.s(1), t.add.s(1)).delay()).parent.parent
    with_group = done((t.add.s(1, 1) | group(t.add.s(1), t.add.s(2))).delay()).parent
    both = [first, with_group]
    return [[shown(value) for _, value in root.collect(timeout=PATIENCE)] for root in both]


@scenario
def iterdeps(t: Any) -> Any:
    first = done(chain(t.add.s(1, 1), t.add.s(1), t.add.s(1)).delay()).parent.parent
    waiting = t.app.AsyncResult(str(uuid.uuid4()))
    return [
        [[parent and parent.result, node.result] for parent, node in first.iterdeps()],
        attempt(lambda: list(waiting.iterdeps())),
        attempt(lambda: [node.state for _, node in waiting.iterdeps(intermediate=True)]),
        [node.result for node in first.graph.topsort()],
    ]


@scenario
def as_list_and_as_tuple(t: Any) -> Any:
    result = done(chain(t.add.s(1, 1), t.add.s(1), t.add.s(1)).delay())
    again = result_from_tuple(result.as_tuple(), app=t.app)
    together = group(t.add.s(1, 1), chain(t.add.s(1, 1), t.add.s(1))).delay()
    return [result.as_list(), result.as_tuple(), again == result, again.get(), again.parent == result.parent,
            together.as_tuple(), result_from_tuple(together.as_tuple(), app=t.app).get(timeout=PATIENCE)]  # fmt: skip


@scenario
def results_can_be_pickled(t: Any) -> Any:
    result, together = done(t.add.delay(1, 1)), group(t.add.s(1, n) for n in range(2)).delay()
    back = pickle.loads(pickle.dumps(result)), pickle.loads(pickle.dumps(together))
    return [back[0] == result, back[0].id == result.id, back[1].id == together.id, len(back[1])]


@scenario
def results_are_compared(t: Any) -> Any:
    one, two = t.app.AsyncResult('a'), t.app.AsyncResult('b')
    groups = [t.app.GroupResult('g', [one, two]), t.app.GroupResult('g', [one, two]), t.app.GroupResult('h', [one])]
    return [one == 'a', one == t.app.AsyncResult('a'), one == two, hash(one) == hash('a'), groups[0] == groups[1],
            groups[0] == groups[2], repr(one), repr(groups[0]), bool(groups[0])]  # fmt: skip


def _waiting_group(t: Any) -> GroupResult:
    """Send a success, a failure and a task that waits; return when the first two have ended."""
    together = group(t.add.s(1, 1), t.fail.s(), t.waits.s(3)).delay()
    wait_until(lambda: together.completed_count() == 1 and together.results[1].state == 'FAILURE')
    wait_until(lambda: together.results[2].state == 'STARTED')
    return together


def _counts(together: Any) -> list[Any]:
    return [
        [together.ready(), together.successful(), together.failed(), together.waiting(), together.completed_count()],
        [part.state for part in together.results],
    ]


@scenario
def counts_of_a_group(t: Any) -> Any:
    together = _waiting_group(t)
    before = _counts(together)
    t.say('go on')
    done(together)
    return [before, _counts(together), attempt(together.maybe_throw), attempt(together.maybe_reraise), len(together)]


@scenario
def join(t: Any) -> Any:
    good, bad = group(t.add.s(1, n) for n in range(4)).delay(), group(t.add.s(1, 1), t.fail.s()).delay()
    ways = ('get', 'join', 'join_native')
    return [
        [attempt(getattr(each, way), timeout=PATIENCE) for each in (good, bad) for way in ways],
        [attempt(getattr(bad, way), timeout=PATIENCE, propagate=False) for way in ways],
    ]


@scenario
def iterate(t: Any) -> Any:
    together = group(t.add.s(1, n) for n in range(4)).delay()
    seen = [sorted(meta['result'] for _, meta in together.iter_native(timeout=PATIENCE)) for _ in range(2)]
    return [*seen, [part.id for part in together] == [part.id for part in together.results], together[3].result]


@scenario
def save_restore_delete(t: Any) -> Any:
    together = group(t.add.s(1, 1), group(t.add.s(2, 2), t.add.s(3, 3))).delay()
    together.save()
    restored = t.app.GroupResult.restore(together.id)
    seen = [type(restored).__name__, restored == together, restored.get(timeout=PATIENCE), len(restored)]
    together.save()
    restored.delete()
    return [
        *seen,
        t.app.GroupResult.restore(together.id),
        t.app.GroupResult.restore('unknown'),
        restored.results[0].state,
    ]


@scenario
def restore_of_a_chord_header(t: Any) -> Any:
    result = done(chord([t.add.s(1, 1), t.add.s(2, 2)], t.total.s())())
    result.parent.save()
    restored = t.app.GroupResult.restore(result.parent.id)
    return [restored == result.parent, restored.get(timeout=PATIENCE), restored.parent]


@scenario
def result_set(t: Any) -> Any:
    results = ResultSet([], app=t.app)
    seen = [attempt(results.get, timeout=PATIENCE), results.ready(), results.successful(), len(results)]
    one, two = t.add.delay(1, 1), t.add.delay(2, 2)
    results.add(one), results.add(one), results.add(two), results.update([two])
    seen += [len(results), results.get(timeout=PATIENCE), results.completed_count()]
    results.remove(one.id)
    seen += [len(results), attempt(results.remove, one.id)]
    results.discard(one), results.clear()
    return [*seen, len(results)]


@scenario
def join_of_an_empty_group(t: Any) -> Any:
    empty = t.app.GroupResult('empty', [])
    return [empty.get(timeout=PATIENCE), empty.join(timeout=PATIENCE), *_counts(empty)]


@scenario
def one_result_many_times(t: Any) -> Any:
    result = t.add.delay(1, 1)
    first = [result.get(timeout=PATIENCE) for _ in range(3)]
    return [first, [t.app.AsyncResult(result.id).get(timeout=PATIENCE) for _ in range(3)]]


@scenario
def same_id_twice(t: Any) -> Any:
    task_id = str(uuid.uuid4())
    seen = [done(t.add.apply_async((1, 1), task_id=task_id)).result]
    t.add.apply_async((2, 2), task_id=task_id, link=t.note.s())
    wait_until(t.notes)
    return lambda: [*seen, t.app.AsyncResult(task_id).result]


@scenario
def eager_result(t: Any) -> Any:
    result = t.add.apply((1, 1))
    failed = t.fail.apply()
    return [isinstance(result, EagerResult), result.get(), result.state, failed.state, attempt(failed.get)]


@scenario
def group_within_a_task(t: Any) -> Any:
    result = t.sends.delay('group')
    group_id = result.get(timeout=PATIENCE)
    [child] = result.children
    return [child.id == group_id, type(child).__name__, child.get(timeout=PATIENCE)]


@scenario
def large_arguments(t: Any) -> Any:
    return done(t.total.delay([1] * 100_000)).result


@scenario
def arguments_larger_than_a_document(t: Any) -> Any:
    results = [t.about.delay('x' * 9_000_000, fields='retries'), t.fail.delay('x' * 9_000_000)]
    return [[shown(result.get(timeout=PATIENCE, propagate=False)), result.state] for result in results]


@scenario
def chord_of_results_larger_than_a_document(t: Any) -> Any:
    return chord([t.same.s('x' * 3_000_000)] * 3, t.about.s(fields='retries'))().get(timeout=PATIENCE)
