"""`Producer.batch()` of kombu 5.7: many messages, one `_bulk_docs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kombu import exceptions

from ..couchdb.client import Document
from ..documents.types import Published
from ..errors import CouchDBError
from ..queues.fanout import Broadcaster

__all__ = ['PublishBatch']

#: kombu 5.7's own error for a batch that failed; older versions never make a batch.
BatchPublishError: type[Exception] = getattr(exceptions, 'BatchPublishError', exceptions.OperationalError)


class PublishBatch:
    """Gathers documents until `max_size`, or until it is flushed. A batch that failed is of no more use."""

    def __init__(
        self, channel: Any, publish: Callable[[Sequence[Published]], None], broadcaster: Broadcaster, max_size: int
    ) -> None:
        self.channel, self._publish, self._broadcaster, self._max_size = channel, publish, broadcaster, max_size
        self._docs: list[Published] = []
        self._broadcasts: list[tuple[str, str, Document]] = []
        self._ended: str | None = None
        self._failure: BaseException | None = None

    def publish(self, message: Document, **kwargs: Any) -> None:
        """Add one message; *raises* `BatchPublishError` if that made a flush, and it failed."""
        self._check()
        self.channel.basic_publish(message, _publish_batch=self, **kwargs)
        if len(self._docs) + len(self._broadcasts) >= self._max_size:
            self.flush()

    def add(self, docs: Sequence[Published]) -> None:
        """Add the documents of a message."""
        self._docs += docs

    def add_broadcast(self, exchange: str, routing_key: str, message: Document) -> None:
        """Add a message for a fanout exchange."""
        self._broadcasts.append((exchange, routing_key, message))

    def flush(self) -> None:
        """Store all that was gathered; *raises* `BatchPublishError`: some of it may be stored, and some not."""
        self._check()
        docs, self._docs = self._docs, []
        broadcasts, self._broadcasts = self._broadcasts, []
        try:
            if docs:
                self._publish(docs)
            for broadcast in broadcasts:
                self._broadcaster.send(*broadcast)
        except CouchDBError as exc:
            self._failure = exc
            raise BatchPublishError(
                f'a batch of {len(docs) + len(broadcasts)} messages failed; which of them were stored '
                f'is uncertain: {exc}'
            ) from exc
        except BaseException as exc:
            self._failure = exc
            raise

    def discard(self) -> None:
        """Forget what was not stored yet."""
        self._ended = self._ended or 'aborted'
        self._docs, self._broadcasts = [], []

    def close(self) -> None:
        """End the batch."""
        self._ended = 'closed'

    def _check(self) -> None:
        if self._ended:
            raise RuntimeError(f'the publish batch is {self._ended}')
        if self._failure is not None:
            raise BatchPublishError('the publish batch failed before and cannot be used again') from self._failure
