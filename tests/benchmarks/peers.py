"""Consumers and publishers in separate processes."""

from __future__ import annotations

import multiprocessing
import queue
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from typing import Any

from . import loops, without  # noqa: F401 - `without` changes this process
from .systems import Place
from .worker import app_of

__all__ = ['PATIENCE', 'answer', 'consume', 'context', 'listening', 'loading', 'running', 'storing', 'waiting']

#: Spawned, not forked: the children must not inherit connections and threads of this process.
context = multiprocessing.get_context('spawn')

#: How long a process may take to start or to send its result, in seconds.
PATIENCE = 300.0
#: How often a waiting process checks whether the other processes have finished the work, in seconds.
_LOOK = 0.1
#: How long Celery waits for events in one call, in seconds. Transports that poll sleep at most this long.
_DRAIN = 2.0
#: The first results that a program waits for are not counted: its connections are still being opened.
_FIRST = 2
#: When a result is stored, in seconds: by then the program waits for it.
_SOON = (0.05, 0.1)


def consume(places: Sequence[Place], prefetch: int, take: int, *, whole: bool) -> float:
    """Run one consumer for each place until together they have received `take` messages; return the time in seconds.

    With `whole`, `take` is the number of all messages: the time ends when the consumer of the last message has closed
    its connection, which writes its acknowledgements. Otherwise the time ends with the last message, because closing
    also releases the prefetched messages.
    """
    taken, gate, ended = context.Value('q', 0), context.Barrier(len(places) + 1), context.Event()
    answers = context.Queue()
    calls = [(_consume, (place, prefetch, take, whole, taken, gate, ended, answers)) for place in places]
    with running(gate, calls) as processes:
        gate.wait(PATIENCE)
        started = time.time()
        end: float = answer(answers, processes)
        ended.set()
    return end - started


def _consume(
    place: Place, prefetch: int, take: int, whole: bool, taken: Any, gate: Any, ended: Any, answers: Any
) -> None:
    end = 0.0

    def on_body(body: Any) -> None:
        nonlocal end
        with taken.get_lock():
            taken.value += 1
            if taken.value == take:
                end = time.time()

    taker = loops.taker(place, prefetch, on_body)
    gate.wait(PATIENCE)
    taker.start()
    loops.wait_until(lambda: taken.value >= take, lambda: taker.take(_LOOK), PATIENCE)
    if end and whole:
        taker.close()
        answers.put(time.time())
        return
    if end:
        answers.put(end)
    ended.wait(PATIENCE)
    taker.close()


@contextmanager
def listening(place: Place, prefetch: int, probes: int, work: float) -> Iterator[Callable[[], list[float]]]:
    """Run a consumer that measures the delays of `probes` bodies with a time `sent`, and works on other bodies.

    It works `work` seconds on each of the other bodies.

    Yield a function that waits until all probes have arrived and returns their delays in seconds.
    """
    gate, answers = context.Barrier(2), context.Queue()
    with running(gate, [(_listen, (place, prefetch, probes, work, gate, answers))]) as processes:
        gate.wait(PATIENCE)
        yield lambda: list(answer(answers, processes))


def _listen(place: Place, prefetch: int, probes: int, work: float, gate: Any, answers: Any) -> None:
    delays: list[float] = []

    def on_body(body: Any) -> None:
        if 'sent' in body:
            delays.append(time.time() - body['sent'])
        else:
            time.sleep(work)

    taker = loops.taker(place, prefetch, on_body)
    taker.start()
    gate.wait(PATIENCE)
    loops.wait_until(lambda: len(delays) >= probes, lambda: taker.take(_DRAIN), PATIENCE)
    answers.put(delays)
    taker.close()


@contextmanager
def storing(place: Place) -> Iterator[tuple[Callable[[str], None], Callable[[], list[tuple[float, float]]]]]:
    """Run a process that stores results.

    Yield a function that makes it store a result in a moment, and one that ends it and returns for each result the
    times before and after it was stored (`time.time()`).
    """
    gate, ids, answers = context.Barrier(2), context.Queue(), context.Queue()
    with running(gate, [(_store, (place, gate, ids, answers))]) as processes:
        gate.wait(PATIENCE)

        def times() -> list[tuple[float, float]]:
            ids.put(None)
            return list(answer(answers, processes))

        yield ids.put, times


def _store(place: Place, gate: Any, ids: Any, answers: Any) -> None:
    app, times = app_of(place), []
    gate.wait(PATIENCE)
    while (task_id := ids.get(timeout=PATIENCE)) is not None:
        time.sleep(random.uniform(*_SOON))
        before = time.time()
        app.backend.store_result(task_id, 1, 'SUCCESS')
        times.append((before, time.time()))
    answers.put(times)
    app.close()


@contextmanager
def waiting(
    place: Place, processes: int, tasks: int, seconds: float
) -> Iterator[Callable[[], tuple[list[float], float]]]:
    """Run programs that send `tasks` tasks of `seconds` each, and wait for each result before they send the next.

    Yield a function that starts them, waits until they have ended, and returns how long they waited for each result
    and how long all that took, in seconds.
    """
    gate, answers = context.Barrier(processes + 1), context.Queue()
    calls = [(_wait, (place, tasks, seconds, gate, answers))] * processes
    with running(gate, calls) as programs:
        gate.wait(PATIENCE)

        def result() -> tuple[list[float], float]:
            gate.wait(PATIENCE)
            started = time.monotonic()
            waits = [wait for _ in programs for wait in answer(answers, programs)]
            return waits, time.monotonic() - started

        yield result


def _wait(place: Place, tasks: int, seconds: float, gate: Any, answers: Any) -> None:
    app, waits = app_of(place), []
    nap = app.signature('nap', (seconds,))
    for number in range(tasks + _FIRST):
        if number == _FIRST:
            gate.wait(PATIENCE)  # all are ready
            gate.wait(PATIENCE)
        started = time.monotonic()
        nap.apply_async().get(timeout=PATIENCE)
        waits.append(time.monotonic() - started)
    answers.put(waits[_FIRST:])
    app.close()


@contextmanager
def loading(place: Place, size: int, rate: float) -> Iterator[None]:
    """Run a publisher that sends `rate` messages per second."""
    gate, ended = context.Barrier(2), context.Event()
    with running(gate, [(_load, (place, size, rate, gate, ended))]):
        gate.wait(PATIENCE)
        try:
            yield
        finally:
            ended.set()


def _load(place: Place, size: int, rate: float, gate: Any, ended: Any) -> None:
    sending, body = loops.sender(place), loops.body_of(size)
    sending.send(body)
    gate.wait(PATIENCE)
    due = time.monotonic()
    while not ended.wait(max(0.0, due - time.monotonic())):
        sending.send(body)
        due += 1 / rate
    sending.close()


@contextmanager
def running(gate: Any, calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[SpawnProcess]]:
    """Run a process for each function with its arguments. One that fails breaks the barrier `gate`."""
    processes = [context.Process(target=_run, args=(gate, *call), daemon=True) for call in calls]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _run(gate: Any, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and the parent ends this process
    try:
        target(*arguments)
    except BaseException:
        gate.abort()  # the others must not wait for this process
        raise


def answer(answers: Any, processes: Sequence[SpawnProcess]) -> Any:
    """Return the next item of a queue; *raises* `RuntimeError` after five minutes, or if a process has failed."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not any(process.exitcode for process in processes):
        try:
            return answers.get(timeout=1.0)
        except queue.Empty:
            pass  # no process has finished yet
    raise RuntimeError('a process of the benchmark ended without a result, or took too long')
