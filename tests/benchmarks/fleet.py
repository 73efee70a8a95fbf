"""A fleet: many consumers of one queue, in threads of a few processes, each with a connection of its own."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from typing import Any

from kombu import Connection, Consumer, Queue
from kombu.message import Message
from kombu.pidbox import Mailbox

from . import loops
from .peers import PATIENCE, answer, context, running
from .systems import Place

__all__ = ['Fleet', 'fleet']

#: The number of consumers in a process.
_TOGETHER = 10
#: How often a consumer checks whether the measure has ended, in seconds.
_LOOK = 1.0
#: How long to wait for the next reply to a command, in seconds.
_REPLY = 5.0
#: The time between two messages that are sent one at a time, in seconds.
_GAP = (0.1, 0.3)


class Fleet:
    """Sends messages to the consumers, and learns when they receive them."""

    def __init__(self, place: Place, size: int, answers: Any, processes: Sequence[SpawnProcess]) -> None:
        self.size = size
        self._place, self._answers, self._processes = place, answers, processes
        self._sender = loops.sender(place)
        self._sent = self._ready = 0
        #: The numbers of all messages received, and the times of those since the last call of `received`.
        self._seen: set[int] = set()
        self._times: list[float] = []

    def settle(self, seconds: float) -> None:
        """Wait until every consumer consumes, and `seconds` more."""
        while self._ready < self.size:
            self._next()
        time.sleep(seconds)

    def send(self, count: int, hold: float) -> None:
        """Send messages together; their consumers acknowledge each `hold` seconds after they received it."""
        self._sender.send_all(self._body(hold) for _ in range(count))

    def received(self, count: int) -> list[float]:
        """Wait for the receipts of `count` messages; return their times in order.

        *Raises* `RuntimeError` if nothing is received for five minutes, or a process failed.
        """
        while len(self._times) < count:
            self._next()
        times, self._times = sorted(self._times), []
        return times

    def delays(self, count: int) -> list[float]:
        """Send messages one at a time; return the seconds from before each is sent until its receipt."""
        delays = []
        for _ in range(count):
            time.sleep(random.uniform(*_GAP))
            began = time.time()
            self._sender.send(self._body(0.0))
            [received] = self.received(1)
            delays.append(received - began)
        return delays

    def ping(self) -> float:
        """Send a command to all consumers, as `celery inspect ping` does; return the seconds until all have replied.

        This includes the time to connect. *Raises* `RuntimeError` if replies are missing.
        """
        replied: list[float] = []
        with Connection(self._place.broker, transport_options=self._place.options) as connection:
            began = time.time()
            _mailbox(connection).multi_call(
                'ping', timeout=_REPLY, limit=self.size, callback=lambda body: replied.append(time.time() - began)
            )
        if len(replied) < self.size:
            raise RuntimeError(f'{len(replied)} of {self.size} consumers replied')
        return max(replied)

    def close(self) -> None:
        """Close the connection."""
        self._sender.close()

    def _body(self, hold: float) -> dict[str, float]:
        self._sent += 1
        return {'number': self._sent, 'hold': hold}

    def _next(self) -> None:
        number, received = answer(self._answers, self._processes)
        if number is None:
            self._ready += 1
        elif number not in self._seen:  # a message that is delivered again is not counted
            self._seen.add(number)
            self._times.append(received)


@contextmanager
def fleet(place: Place, size: int, prefetch: int) -> Iterator[Fleet]:
    """Run consumers until the block ends. They are connected, and begin to consume, when the block begins."""
    processes = math.ceil(size / _TOGETHER)
    gate, ended, answers = context.Barrier(processes + 1), context.Event(), context.Queue()
    shares = [range(first, size, processes) for first in range(processes)]
    calls = [(_consume_all, (place, share, prefetch, gate, ended, answers)) for share in shares]
    with running(gate, calls) as started:
        gate.wait(PATIENCE)
        found = Fleet(place, size, answers, started)
        try:
            yield found
        finally:
            ended.set()
            found.close()


def _consume_all(place: Place, numbers: Collection[int], prefetch: int, gate: Any, ended: Any, answers: Any) -> None:
    members = [_Member(place, number, prefetch, answers) for number in numbers]
    gate.wait(PATIENCE)
    with ThreadPoolExecutor(len(members)) as pool:
        for ended_member in [pool.submit(member.run, ended) for member in members]:
            ended_member.result()


class _Member:
    """A consumer with a mailbox for remote control, as a Celery worker has."""

    def __init__(self, place: Place, number: int, prefetch: int, answers: Any) -> None:
        self._answers = answers
        self._held: list[tuple[float, Message]] = []
        self._connection = Connection(place.broker, transport_options=place.options)
        channel = self._connection.channel()
        channel.basic_qos(0, prefetch, False)
        queue_ = Queue(place.queue)(channel)
        queue_.declare()
        self._consumer = Consumer(channel, [queue_], on_message=self._on_message, accept=['json'], auto_declare=False)
        self._node = _mailbox(self._connection).Node(
            f'member-{number}', handlers={'ping': _pong}, channel=self._connection.channel()
        )

    def run(self, ended: Any) -> None:
        self._node.listen(callback=self._node.handle_message)
        self._consumer.consume()
        self._answers.put((None, time.time()))
        while not ended.is_set():
            pause = min([_LOOK, *(due - time.time() for due, _ in self._held)])
            try:
                self._connection.drain_events(timeout=max(0.001, pause))
            except TimeoutError:
                pass
            now = time.time()
            for due, message in self._held:
                if due <= now:
                    message.ack()
            self._held = [(due, message) for due, message in self._held if due > now]
        self._connection.release()

    def _on_message(self, message: Message) -> None:
        now, body = time.time(), message.payload
        if body['hold']:
            self._held.append((now + body['hold'], message))
        else:
            message.ack()
        self._answers.put((body['number'], now))


def _mailbox(connection: Connection) -> Any:
    return Mailbox('fleet', type='fanout', accept=['json'])(connection)


def _pong(state: Any) -> dict[str, str]:
    return {'ok': 'pong'}
