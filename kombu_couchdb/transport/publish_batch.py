"""Publish batches: `Producer.batch()` of kombu 5.7 stores many messages in one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kombu import exceptions

from ..couchdb.client import Document
from ..documents.types import Published
from ..errors import CouchDBError

#: The error of kombu 5.7 for a batch that failed. Older versions do not create batches.
BatchPublishError: type[Exception] = getattr(exceptions, 'BatchPublishError', exceptions.OperationalError)


class PublishBatch:
    """Collects messages, and stores them when it contains `max_size` of them, or when it is flushed.

    A batch cannot be used again after a flush that failed.
    """

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel, self._max_size = channel, max_size
        self._docs: list[Published] = []
        self._broadcasts: list[tuple[str, str, Document]] = []
        self._ended: str | None = None
        self._failure: BaseException | None = None

    def publish(self, message: Document, **kwargs: Any) -> None:
        """Add one message, and flush a full batch; *raises* `BatchPublishError` if the flush fails."""
        self._check()
        self.channel.basic_publish(message, _publish_batch=self, **kwargs)
        if len(self._docs) + len(self._broadcasts) >= self._max_size:
            self.flush()

    def add(self, docs: Sequence[Published], characters: int) -> None:
        """Add the documents of a message; the number of characters of its body is not used."""
        self._docs += docs

    def add_broadcast(self, exchange: str, routing_key: str, message: Document) -> None:
        """Add a message for a fanout exchange."""
        self._broadcasts.append((exchange, routing_key, message))

    def flush(self) -> None:
        """Store the collected messages; *raises* `BatchPublishError` if some of them may not be stored."""
        self._check()
        docs, broadcasts = self._docs, self._broadcasts
        self._docs, self._broadcasts = [], []
        try:
            if docs:
                self.channel.store_docs(docs)
            for broadcast in broadcasts:
                self.channel.connection.broadcaster.send(*broadcast)
        except BaseException as exc:
            self._failure = exc
            if not isinstance(exc, CouchDBError):
                raise
            raise BatchPublishError(
                f'a batch of {len(docs) + len(broadcasts)} messages failed; which of them were stored '
                f'is uncertain: {exc}'
            ) from exc

    def discard(self) -> None:
        """Drop the messages that are not stored yet."""
        self._ended = self._ended or 'aborted'
        self._docs, self._broadcasts = [], []

    def close(self) -> None:
        """Close the batch: it takes no more messages."""
        self._ended = 'closed'

    def _check(self) -> None:
        if self._ended:
            raise RuntimeError(f'the publish batch is {self._ended}')
        if self._failure is not None:
            raise BatchPublishError('the publish batch failed before and cannot be used again') from self._failure
