"""What a channel has delivered and has not seen settled."""

from __future__ import annotations

from typing import Any

from kombu.transport import virtual

__all__ = ['Message', 'QoS']


class QoS:
    """What a channel has delivered and not seen acknowledged: ids only. The revisions stay with the I/O thread."""

    restore_at_shutdown = True

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: What is wrong with each, if anything is.
        self._tags: dict[str, str | None] = {}

    @property
    def prefetch_count(self) -> int:
        """How many messages may be unacknowledged; 0 is no limit."""
        return int(self.channel.credit.limit)

    def can_consume(self) -> bool:
        """Tell whether the channel may have another message."""
        return not self.prefetch_count or len(self._tags) < self.prefetch_count

    def append(self, message: Any, delivery_tag: str) -> None:
        """Note a message that was delivered."""
        self._tags[delivery_tag] = None

    def ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message, or with `multiple` all that were delivered up to it."""
        for tag in self._up_to(delivery_tag) if multiple else [delivery_tag]:
            if flaw := self._tags.pop(tag, None):
                self.channel.holdings.bury(tag, flaw)
            else:
                self.channel.holdings.ack(tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Refuse a message: with `requeue` it is delivered again, else kept as a dead letter."""
        flaw = self._tags.pop(delivery_tag, None)
        if requeue:
            self.channel.holdings.release(delivery_tag)
        else:
            self.channel.holdings.bury(delivery_tag, flaw or 'rejected')

    def spoilt(self, delivery_tag: str, flaw: str) -> None:
        """Note why a message cannot be used: it becomes a dead letter also if it is acknowledged, as Celery does then."""
        if delivery_tag in self._tags:
            self._tags[delivery_tag] = flaw

    def restore_unacked(self) -> None:
        """Let everything unacknowledged be delivered again."""
        for tag in self._all():
            self.channel.holdings.release(tag)

    def restore_unacked_once(self) -> None:
        """The channel is closed: give everything back."""
        for tag in self._all():
            self.channel.holdings.give_back(tag)

    def _all(self) -> list[str]:
        tags, self._tags = list(self._tags), {}
        return tags

    def _up_to(self, delivery_tag: str) -> list[str]:
        tags = list(self._tags)
        return tags[:tags.index(delivery_tag) + 1] if delivery_tag in self._tags else []


class Message(virtual.Message):
    """A message that is kept, with the reason, if it cannot be decoded: it may be forged, or its content not accepted."""

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as exc:
            self.channel.qos.spoilt(self.delivery_tag, f'spoilt: the body cannot be decoded ({str(exc)[:300]})')
            raise
