"""The timed loops: send and receive messages with kombu, the same way for every broker."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kombu import Connection, Consumer, Producer, Queue
from kombu.message import Message

from . import raw
from .systems import Place

__all__ = ['Sender', 'Taker', 'body_of', 'fill', 'sender', 'taker']

#: After this number of messages `fill` waits for the broker: indexing all at once could exceed the request timeout.
_SETTLED = 5000

#: Called with the decoded body of each message.
OnBody = Callable[[Any], None]


class Sender(Protocol):
    """Sends messages to a place. `batches` says whether it can send many in one request."""

    batches: bool

    def send(self, body: Any) -> None:
        """Send one message."""

    def send_all(self, bodies: Iterable[Any]) -> None:
        """Send many messages, in batches if `batches` is true."""

    def settle(self) -> None:
        """Make the broker update the index that it reads queues from."""

    def close(self) -> None:
        """Close the connection."""


class Taker(Protocol):
    """Receives messages from a place and acknowledges each. It connects on creation and consumes after `start`."""

    def start(self) -> None:
        """Start to consume."""

    def take(self, seconds: float) -> None:
        """Wait up to `seconds` and call back for each message that arrives."""

    def close(self) -> None:
        """Write pending acknowledgements and close the connection."""


def sender(place: Place) -> Sender:
    """Return a connected sender."""
    return raw.Sender(place.broker, place.queue) if place.raw else _Sender(place)


def taker(place: Place, prefetch: int, on_body: OnBody) -> Taker:
    """Return a connected taker."""
    return raw.Taker(place.broker, place.queue, prefetch, on_body) if place.raw else _Taker(place, prefetch, on_body)


def body_of(size: int) -> dict[str, str]:
    """Return a message body of about `size` bytes of JSON. It is hard to compress, and the same on each call."""
    around = len(json.dumps({'text': ''}))
    return {'text': ''.join(random.Random(size).choices('0123456789abcdefghijklmnopqrstuvwxyz', k=size - around))}


def fill(place: Place, size: int, count: int) -> None:
    """Send `count` messages of about `size` bytes to a place and wait until the broker has indexed them."""
    sending, body = sender(place), body_of(size)
    try:
        for start in range(0, count, _SETTLED):
            sending.send_all(body for _ in range(min(_SETTLED, count - start)))
            sending.settle()
    finally:
        sending.close()


class _Sender:
    def __init__(self, place: Place) -> None:
        self.queue = place.queue
        self.connection = Connection(place.broker, transport_options=place.options)
        self.channel = self.connection.channel()
        self.declared = Queue(place.queue)(self.channel)
        self.declared.declare()
        self.producer = Producer(self.channel, serializer='json')
        # kombu before 5.7 has no batches at all.
        self.batches = bool(getattr(self.producer, 'supports_batch_publish', False))

    def send(self, body: Any) -> None:
        self.producer.publish(body, routing_key=self.queue)

    def send_all(self, bodies: Iterable[Any]) -> None:
        if not self.batches:
            for body in bodies:
                self.send(body)
            return
        with self.producer.batch():
            for body in bodies:
                self.send(body)

    def settle(self) -> None:
        # The transport of this project counts the messages, and so updates the index, when the count is first read.
        assert self.declared.queue_declare().message_count >= 0

    def close(self) -> None:
        self.connection.release()


class _Taker:
    def __init__(self, place: Place, prefetch: int, on_body: OnBody) -> None:
        self.connection = Connection(place.broker, transport_options=place.options)
        self.channel = self.connection.channel()
        self.channel.basic_qos(0, prefetch, False)
        queue = Queue(place.queue)
        queue(self.channel).declare()
        self.consumer = Consumer(
            self.channel, [queue], on_message=self._on_message, accept=['json'], auto_declare=False
        )
        self._on_body = on_body

    def _on_message(self, message: Message) -> None:
        body = message.payload
        message.ack()
        self._on_body(body)

    def start(self) -> None:
        self.consumer.consume()

    def take(self, seconds: float) -> None:
        try:
            self.connection.drain_events(timeout=seconds)
        except TimeoutError:
            pass

    def close(self) -> None:
        self.connection.release()


def wait_until(condition: Callable[[], bool], step: Callable[[], None], patience: float = 300.0) -> None:
    """Repeat a step until a condition is true; *raises* `TimeoutError` after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f'the condition is not true after {patience:g} s')
        step()
