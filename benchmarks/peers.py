"""Consumers and publishers in processes of their own."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from typing import Any

from . import loops
from .systems import Place

__all__ = ['consume', 'listening', 'loading']

#: Not forked: connections and threads of this process are none of theirs.
_context = multiprocessing.get_context('spawn')

#: How long a process may take to start, or be silent, in seconds.
_PATIENCE = 300.0
#: How often a waiting process looks whether others have made it done, in seconds.
_LOOK = 0.1
#: How long Celery waits for events at a stretch, in seconds: transports that poll sleep no longer than that.
_DRAIN = 2.0


def consume(places: Sequence[Place], prefetch: int, take: int, *, whole: bool) -> float:
    """Let one consumer for each place take `take` messages between them, and return how long they took, in seconds.

    With `whole`, they take all there are: the time ends when who took the last one has closed its connection, and so has
    written its acknowledgements. Else it ends with that message, for closing also gives back what was prefetched.
    """
    taken, gate, ended = _context.Value('q', 0), _context.Barrier(len(places) + 1), _context.Event()
    answers = _context.Queue()
    calls = [(_consume, (place, prefetch, take, whole, taken, gate, ended, answers)) for place in places]
    with _running(gate, calls) as processes:
        gate.wait(_PATIENCE)
        started = time.time()
        end: float = _answer(answers, processes)
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
    gate.wait(_PATIENCE)
    taker.start()
    loops.wait_until(lambda: taken.value >= take, lambda: taker.take(_LOOK), _PATIENCE)
    if end and whole:
        taker.close()
        answers.put(time.time())
        return
    if end:
        answers.put(end)
    ended.wait(_PATIENCE)
    taker.close()


@contextmanager
def listening(place: Place, prefetch: int, probes: int, work: float) -> Iterator[Callable[[], list[float]]]:
    """Run a consumer that notes the delays of `probes` bodies with a time `sent`, and works so many seconds on every other.

    What it yields returns the delays, in seconds, once all have come.
    """
    gate, answers = _context.Barrier(2), _context.Queue()
    with _running(gate, [(_listen, (place, prefetch, probes, work, gate, answers))]) as processes:
        gate.wait(_PATIENCE)
        yield lambda: list(_answer(answers, processes))


def _listen(place: Place, prefetch: int, probes: int, work: float, gate: Any, answers: Any) -> None:
    delays: list[float] = []

    def on_body(body: Any) -> None:
        if 'sent' in body:
            delays.append(time.time() - body['sent'])
        else:
            time.sleep(work)

    taker = loops.taker(place, prefetch, on_body)
    taker.start()
    gate.wait(_PATIENCE)
    loops.wait_until(lambda: len(delays) >= probes, lambda: taker.take(_DRAIN), _PATIENCE)
    answers.put(delays)
    taker.close()


@contextmanager
def loading(place: Place, size: int, rate: float) -> Iterator[None]:
    """Run a publisher that sends `rate` messages a second."""
    gate, ended = _context.Barrier(2), _context.Event()
    with _running(gate, [(_load, (place, size, rate, gate, ended))]):
        gate.wait(_PATIENCE)
        try:
            yield
        finally:
            ended.set()


def _load(place: Place, size: int, rate: float, gate: Any, ended: Any) -> None:
    sending, body = loops.sender(place), loops.body_of(size)
    sending.send(body)
    gate.wait(_PATIENCE)
    due = time.monotonic()
    while not ended.wait(max(0.0, due - time.monotonic())):
        sending.send(body)
        due += 1 / rate
    sending.close()


@contextmanager
def _running(gate: Any, calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[SpawnProcess]]:
    processes = [_context.Process(target=_run, args=(gate, *call), daemon=True) for call in calls]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(_PATIENCE)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _run(gate: Any, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever interrupts the benchmark ends it, and it ends this
    try:
        target(*arguments)
    except BaseException:
        gate.abort()  # nobody need wait for this one
        raise


def _answer(answers: Any, processes: Sequence[SpawnProcess]) -> Any:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and not any(process.exitcode for process in processes):
        try:
            return answers.get(timeout=1.0)
        except queue.Empty:
            pass  # it is still at work
    raise RuntimeError('a process of the benchmark ended without an answer, or took too long')
