"""Batches of messages: sinks, which have the messages of many calls of `publish` and store them in few requests.

A sink is a function that gets the documents which are published in its context, and returns those that the publisher
must store itself. There are three kinds:

* A `PublishBatch` is what `Producer.batch()` of kombu 5.7 needs. It does not work with the option `retry`, and older
  versions of kombu have no batches.
* A `CollectingProducer` takes the place of a producer, and each of its requests is retried as the messages in it ask
  for. It leaves unique jobs to their publisher, who learns at once what happened to them. If it may take long until the
  next message comes, a thread stores what was collected.
* With `taken_by` the messages are handed over, and their publisher does not wait for CouchDB.

Broadcasts, events and replies of remote control go to no sink.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

from kombu import exceptions

from ..couchdb.address import Address
from ..couchdb.client import Document
from ..documents import workitem
from ..documents.ids import ONCE
from ..documents.types import WorkItem
from ..errors import CouchDBError

#: The error of kombu 5.7 for a batch that failed. Older versions do not create batches.
BatchPublishError: type[Exception] = getattr(exceptions, 'BatchPublishError', exceptions.OperationalError)

#: The messages are stored when there are so many of them, or so many characters in them; `_OTHER_CHARACTERS` is about
#: what a message has besides its body.
_MAX_DOCS, _MAX_CHARACTERS, _OTHER_CHARACTERS = 1000, 1_000_000, 1000

#: How often a request is retried that a worker sends after a task, if the retry policy has no limit. It is Celery's.
_MAX_RETRIES = 3

#: Called with a connection (a `Transport`) and new documents for it.
Sink = Callable[[Any, Sequence[WorkItem]], Sequence[WorkItem]]

#: What has the messages that are published now, or None.
sink: ContextVar[Sink | None] = ContextVar('kombu_couchdb_sink', default=None)


@contextmanager
def _into(taking: Sink | None) -> Iterator[None]:
    token = sink.set(taking)
    try:
        yield
    finally:
        sink.reset(token)


@contextmanager
def taken_by(take: Callable[[Address, Sequence[WorkItem]], Sequence[WorkItem]] | None) -> Iterator[None]:
    """Let `take` have the messages that this context publishes and that need no more than one write each.

    It is called with the address of a database and new items for it, and returns the items that the publisher must
    store itself. With None, the publisher stores all.
    """

    def take_simple(connection: Any, docs: Sequence[WorkItem]) -> Sequence[WorkItem]:
        assert take is not None
        is_simple = all(
            doc['type'] == 'WorkItem'
            and 'key' not in doc
            and not doc['_id'].startswith(ONCE)
            and connection.topology.known.limit(doc['queue']).length is None
            for doc in docs
        )
        return take(connection.address, docs) if is_simple else docs

    with _into(take_simple if take else None):
        yield


class CollectingProducer:
    """Collects the messages that are published through it, and stores them when there are many, or when it is flushed.

    `producer` is a kombu producer of a connection to CouchDB; all other attributes are those of `producer`. A producer
    that failed to store messages cannot be used again. With `always_retry` it retries also the messages that were
    published without the option `retry`, as their `retry_policy` says, but not for ever.

    `max_seconds` is for how long a message may be collected; None: until `flush`.
    """

    def __init__(self, producer: Any, *, always_retry: bool = False, max_seconds: float | None = None) -> None:
        self._producer, self._always_retry, self._max_seconds = producer, always_retry, max_seconds
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._docs: list[WorkItem] = []
        self._characters = 0
        self._policy: dict[str, Any] | None = None
        self._failure: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __deepcopy__(self, memo: Any) -> CollectingProducer:
        return self  # Celery copies the options of tasks, which may contain this object

    def publish(
        self, body: Any, *args: Any, retry: bool = False, retry_policy: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Add a message; the parameters are those of `kombu.Producer.publish`. Store the messages if there are many.

        *Raises* the errors of `flush`, and those of kombu if the message cannot be encoded or its queue declared.
        """
        policy = dict(retry_policy or {}) if retry or self._always_retry else None
        if policy and self._always_retry and policy.get('max_retries', 0) is None:
            policy['max_retries'] = _MAX_RETRIES
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if policy != self._policy:
                self.flush()
            self._policy = policy
            with _into(self._take):
                self._producer.publish(body, *args, retry=retry, retry_policy=retry_policy, **options)
            if len(self._docs) >= _MAX_DOCS or self._characters >= _MAX_CHARACTERS:
                self.flush()
            elif self._docs and self._timer is None and self._max_seconds is not None:
                # The context says whether the messages have fixed ids, and who takes them: it is that of this call.
                self._timer = threading.Timer(self._max_seconds, copy_context().run, [self._flush_late])
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Store the collected messages, and retry that as the retry policy of the messages says.

        *Raises* what `kombu.Producer.publish` raises. Then some of the messages may be stored and others not.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if not self._docs:
                return
            connection = self._producer.connection
            try:
                if self._policy is None:
                    self._send()
                else:
                    connection.ensure(self._producer, self._send, **self._policy)()
            except BaseException as exc:
                self._failure = exc
                raise
            finally:
                self.discard()

    def discard(self) -> None:
        """Drop the messages that are not stored yet."""
        with self._lock:
            self._docs, self._characters = [], 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _take(self, connection: Any, docs: Sequence[WorkItem]) -> Sequence[WorkItem]:
        if any('key' in doc for doc in docs):
            return docs
        self._docs += docs
        self._characters += sum(map(_characters, docs))
        return ()

    def _flush_late(self) -> None:
        try:
            self.flush()
        except BaseException:
            pass  # the next call of `publish` or `flush` raises it

    def _send(self) -> None:
        self._producer.channel.send(self._docs)


class PublishBatch:
    """Collects messages for `Producer.batch()` of kombu 5.7, unique jobs too: `max_size` of them for each `flush`."""

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel, self._max_size = channel, max_size
        self._docs: list[WorkItem] = []

    def publish(self, message: Document, **kwargs: Any) -> None:
        """Add one message, and flush a full batch; *raises* `BatchPublishError` if the flush fails."""
        with _into(self._take):
            self.channel.basic_publish(message, **kwargs)
        if len(self._docs) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Store the collected messages; *raises* `BatchPublishError` if some of them may not be stored."""
        docs, self._docs = self._docs, []
        try:
            self.channel.send(docs)
        except CouchDBError as exc:
            raise BatchPublishError(
                f'a batch of {len(docs)} messages failed; which of them were stored is uncertain: {exc}'
            ) from exc

    def discard(self) -> None:
        """Drop the messages that are not stored yet; kombu takes no more after that."""
        self._docs = []

    close = discard

    def _take(self, connection: Any, docs: Sequence[WorkItem]) -> Sequence[WorkItem]:
        self._docs += docs
        return ()


def _characters(doc: WorkItem) -> int:
    body = sum(len(attachment.get('data', '')) for attachment in doc.get('_attachments', {}).values())
    return workitem.size(doc) + body + _OTHER_CHARACTERS
