"""Acknowledgement, rejection and requeueing of the messages that a channel has delivered."""

from __future__ import annotations

import sys
from typing import Any

from amqp.exceptions import AMQPError
from kombu.transport import virtual

from ..consumer.delivery import Delivery
from ..documents.body import unpacked
from ..documents.dead_letter import REJECTED, rejected, undecodable
from ..documents.task_message import content_problem
from ..documents.types import TaskError
from ..errors import CouchDBError
from ..log import get_logger

logger = get_logger(__name__)


class QoS:
    """The unacknowledged messages of a channel, by delivery tag; `Unacked` has their documents."""

    restore_at_shutdown = True

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: By delivery tag: why the message cannot be used or is rejected, the error of its task, or None.
        self._tags: dict[str, str | TaskError | None] = {}

    @property
    def prefetch_count(self) -> int:
        """The maximum number of unacknowledged messages; 0 is no limit."""
        return int(self.channel.credit.limit)

    def can_consume(self) -> bool:
        """Tell whether the channel may receive another message."""
        return not self.prefetch_count or len(self._tags) < self.prefetch_count

    def append(self, message: Any, delivery: Delivery) -> None:
        """Record a message that was delivered."""
        self._tags[delivery.tag] = None
        message.needs_ack, message.delivery = True, delivery

    def still_holds(self, delivery_tag: str) -> bool:
        """Tell whether the consumer holds a message. If not, another consumer gets it."""
        holds = self.channel.connection is not None and self.channel.unacked.still_holds(delivery_tag)
        if not holds:
            self._tags.pop(delivery_tag, None)
        return holds

    def set_waiting(self, delivery_tag: str, waiting: bool) -> bool:
        """Note whether the work on a message has yet to begin; return False if the message is not held any more."""
        return self.channel.connection is not None and self.channel.unacked.set_waiting(delivery_tag, waiting)

    def release_waiting(self) -> int:
        """Release the messages on which the work has yet to begin, see `Message.set_waiting`; return their number.

        Their deliveries do not count as attempts.
        """
        released = self.channel.unacked.release_waiting(list(self._tags))
        for tag in released:
            self._tags.pop(tag, None)
        return len(released)

    def ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message; with `multiple`, also all messages that were delivered before it."""
        for tag in self._up_to(delivery_tag) if multiple else [delivery_tag]:
            if flaw := self._tags.pop(tag, None):
                self._make_dead_letter(tag, flaw)
            else:
                self.channel.unacked.ack(tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message: with `requeue` it is delivered again, otherwise it becomes a dead letter."""
        flaw = self._tags.pop(delivery_tag, None)
        if requeue:
            self.channel.unacked.release(delivery_tag)
        else:
            self._make_dead_letter(delivery_tag, flaw or REJECTED)

    def _make_dead_letter(self, tag: str, flaw: str | TaskError) -> None:
        if isinstance(flaw, str):
            # Celery may have logged that it discards the message.
            logger.error('message %s was made a dead letter: %s', tag.rpartition(':')[0], flaw)
            self.channel.unacked.dead_letter(tag, flaw)
        else:
            self.channel.unacked.fail(tag, flaw)

    def note_malformed(self, delivery_tag: str, flaw: str) -> None:
        """Record why a message cannot be used.

        It then becomes a dead letter even if it is acknowledged; Celery acknowledges such messages.
        """
        if delivery_tag in self._tags:
            self._tags[delivery_tag] = flaw

    def note_rejection(self, delivery_tag: str, reason: str) -> None:
        """Record why a message is about to be rejected, unless another reason is recorded already."""
        if delivery_tag in self._tags:
            self._tags[delivery_tag] = self._tags[delivery_tag] or reason

    def note_failure(self, delivery_tag: str, error: TaskError) -> None:
        """Record that the task of a message has failed: the message then becomes a dead letter with this error."""
        if self._tags.get(delivery_tag, '') is None:
            self._tags[delivery_tag] = error

    def restore_unacked(self) -> None:
        """Release all unacknowledged messages: they are delivered again."""
        for tag in self._all():
            self.channel.unacked.release(tag)

    def restore_unacked_once(self) -> None:
        """Release all unacknowledged messages of a channel that closes.

        If an error ends the program, their deliveries count as attempts, because one of them may have caused it.
        """
        exc = sys.exc_info()[1]
        crashed = isinstance(exc, Exception) and not isinstance(exc, (AMQPError, CouchDBError, OSError))
        for tag in self._all():
            self.channel.unacked.release_at_close(tag, crashed=crashed)

    def _all(self) -> list[str]:
        tags, self._tags = list(self._tags), {}
        return tags

    def _up_to(self, delivery_tag: str) -> list[str]:
        tags = list(self._tags)
        return tags[: tags.index(delivery_tag) + 1] if delivery_tag in self._tags else []


class Message(virtual.Message):
    """A message that becomes a dead letter if it cannot be decoded or its content type is not accepted.

    *Raises* `ValueError` if its body has an encoding that may not be decoded, if it cannot be decompressed, or would be
    too large then: kombu has no limit.
    """

    #: Whether the message has to be acknowledged: broadcasts, and messages of consumers with `no_ack`, have not.
    needs_ack = False
    #: How the message was delivered; None if it need not be acknowledged.
    delivery: Delivery | None = None

    def __init__(self, payload: dict[str, Any], channel: Any = None, **kwargs: Any) -> None:
        if reason := content_problem(payload):  # of a broadcast: nothing has checked this yet
            raise ValueError(reason)
        headers = payload.get('headers') or {}
        if not (payload.get('body') and headers.get('compression')):
            super().__init__(payload, channel, **kwargs)
            return
        properties = payload['properties']
        body = unpacked(channel.decode_body(payload['body'], properties.get('body_encoding')), headers['compression'])
        rest = {name: value for name, value in headers.items() if name != 'compression'}
        plain = {**payload, 'body': body, 'headers': rest, 'properties': {**properties, 'body_encoding': 'base64'}}
        super().__init__(plain, channel, **kwargs)
        self._raw, self.headers, self.properties = payload, headers, properties

    def is_held(self) -> bool:
        """Tell whether a worker may begin to work on the message. Any thread may call this.

        It may not if the consumer lost its claim, because it was paused or cut off, or if the channel was closed.
        """
        return not self.needs_ack or self.channel.qos.still_holds(self.delivery_tag)

    def set_waiting(self, waiting: bool) -> bool:
        """Note whether a worker has the message and has yet to begin to work on it; return False if it is not held.

        As long as it waits, `QoS.release_waiting` releases it.
        """
        return not self.needs_ack or self.channel.qos.set_waiting(self.delivery_tag, waiting)

    def reject(self, requeue: bool = False) -> None:
        """Reject the message: with `requeue` it is delivered again, otherwise it becomes a dead letter.

        The reason is the exception that is being handled, if there is one: Celery rejects a task that it does not know
        while it handles the `KeyError` of the task's name.
        """
        exc = sys.exc_info()[1]
        if exc is not None and not requeue:
            self.channel.qos.note_rejection(self.delivery_tag, self.reason_for(exc))
        super().reject(requeue)

    def fail(self, error: TaskError, *, acknowledged: bool) -> None:
        """Note that the task of the message has failed for good: the message becomes a dead letter with this error.

        A message that is not acknowledged yet becomes one when it is acknowledged or rejected, in the same write. Of
        one that was acknowledged early, a copy is written when the acknowledgement is stored. Nothing is written with
        the transport option `keep_failed` 0, and if the connection was closed meanwhile: that is logged.
        """
        connection = self.channel.connection
        if self.delivery is None or (connection is not None and not connection.options.keep_failed):
            return
        if not acknowledged:
            self.channel.qos.note_failure(self.delivery_tag, error)
        elif connection is not None:
            connection.keep_failure(self.delivery, error)
        else:
            logger.error(
                'task %s failed with %s after its connection was closed: its message is not kept',
                self.headers.get('id'),
                error['type'],
            )

    def reason_for(self, exc: BaseException) -> str:
        """Return the reason of a dead letter that an error causes: one line."""
        task = self.headers.get('task')
        if isinstance(exc, KeyError) and task is not None and exc.args == (task,):
            return rejected(f'the worker that received it does not know the task {task}')
        if isinstance(exc, KeyError) and task is None and exc.args == ('task',):
            return rejected('the message names no task')
        return rejected(exc)

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as exc:
            self.channel.qos.note_malformed(self.delivery_tag, undecodable(exc))
            raise
