"""Stored results of a Celery app: list them by state, count failures in groups, send failed tasks again, drop them.

The views in `celery_couchdb.design` find the results. CouchDB brings their index up to date when it is read, so the
first read after many new results takes long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from celery import states
from kombu.exceptions import KombuError

from kombu_couchdb.admin.dead import GROUP, MAX_GROUPS, ErrorGroup, groups_in
from kombu_couchdb.admin.jobs import FIRST_ROWS, paged
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import LAST, Client, Document, Row, chunks
from kombu_couchdb.couchdb.shapes import items, members
from kombu_couchdb.documents.idempotency import copy_id, fixed_id, idempotent
from kombu_couchdb.documents.ids import QUEUE
from kombu_couchdb.errors import RETRIED, ConfigurationError, CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport import CollectingProducer
from kombu_couchdb.values import is_number

from . import design
from .backend import CouchDBBackend
from .chords.counter import is_sound, size_of
from .connections import backend_of, client_of, has_our_broker, producer_as
from .results.documents import error_text, is_expired, pack, unpack

logger = get_logger(__name__)

#: How long a request may take. Reading a view first brings its index up to date, which may take long.
_REQUEST_SECONDS = 120.0

#: The maximum number of documents that are read or written in one request.
_BATCH_DOCS = 200

#: The tasks of a chord are counted in a request with a row for each.
_MAX_COUNTED_PARTS = 1000

#: The shape of the rows of the views by date.
_ROW = members(key=items(lambda part: True))

_CHANGED = 'another process changed its result just now'


@dataclass(frozen=True)
class StoredResult:
    """The result of a task, or its state before. Members are None if they are unknown."""

    id: str
    task: str | None
    state: str
    #: When the result was stored, in seconds since the epoch.
    date: float | None
    #: The type and the text of the exception, if the state has one.
    error: str | None
    #: The return value, or the meta-data of a custom state, if the state has no exception.
    result: Any
    traceback: str | None
    #: The members below are stored only with `result_extended = True`.
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    #: The routing key of the task's message: the name of its queue, unless it was sent to another exchange.
    queue: str | None
    worker: str | None
    retries: int | None
    #: Celery's meta-data, and the document of the result.
    meta: Mapping[str, Any] = field(repr=False)
    document: Document = field(repr=False)

    @property
    def error_type(self) -> str | None:
        """The type of the exception of a failed task, as its document has it."""
        return _text(self.document.get('error'))

    def described(self) -> dict[str, Any]:
        """Return all members but meta-data and document, for JSON."""
        found = asdict(self)
        del found['document'], found['meta']
        return found


class StoredResults:
    """The results of an app. *Every* method raises the errors of `kombu_couchdb.errors`.

    If the database does not exist yet, there are no results.
    """

    def __init__(self, app: Any, client: Client | None = None, broker: Client | None = None) -> None:
        """Use `client`, or create one for the app's database of results. Tasks are sent by the user of `broker`.

        *Raises* `ConfigurationError` if the result backend of the app is not CouchDB.
        """
        if not isinstance(backend_of(app), CouchDBBackend):
            raise ConfigurationError(
                'the result backend of this app is not CouchDB: set result_backend to couchdb://…, '
                'or name the app with celery -A'
            )
        self.app, self.backend, self._broker = app, app.backend, broker
        self.client = client or Client(app.backend.store.client.address, _REQUEST_SECONDS)

    # -- reading

    def listing(
        self,
        state: str = states.FAILURE,
        *,
        task: str | None = None,
        error: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> Iterator[StoredResult]:
        """Yield the results with this state, the newest first, in batches that are read when they are needed.

        `task` is the name of a task, `error` the type of the exception of a failed one, `since` and `until` are dates
        in seconds since the epoch. Two requests for the first 50 results, then for 200 each. You may retry or drop
        results while you iterate.
        """
        if state == states.FAILURE and task is not None and error is not None:
            view, key = 'failures', [task, error]
        else:
            view, key = ('by_state', [state]) if task is None else ('by_task', [task, state])
        first, last = [] if since is None else [since], LAST if until is None else until
        where = {'startkey': [*key, last], 'endkey': [*key, *first], 'descending': True}
        where |= {'reduce': False, 'include_docs': True}
        rows = paged(self.client, design.NAME, view, _ROW, first=FIRST_ROWS, **where)
        for row in self._if_exists(rows):
            doc = row['doc']
            if not doc or doc.get('status') != state or is_expired(doc, self.client.clock.now()):
                continue
            if task in (None, doc.get('task')) and error in (None, doc.get('error')):
                yield self.of(doc)

    def groups(self) -> list[ErrorGroup]:
        """Return the failed results in groups by task and type of the exception; one request, for up to 1,000 groups.

        Results that have expired and are not deleted yet count, too.
        """
        with self._existing():
            return groups_in(self.client.view(design.NAME, 'failures', GROUP, group_level=2, limit=MAX_GROUPS))
        return []

    def get(self, task_id: str) -> StoredResult | None:
        """Return the result of a task, or None if none is stored; one request."""
        return self.get_many([task_id]).get(task_id)

    def get_many(self, task_ids: Collection[str]) -> dict[str, StoredResult]:
        """Return the stored results of these tasks, by id; one request for each 200."""
        keys = [self.backend.get_key_for_task(task_id) for task_id in task_ids if task_id]
        with self._existing():
            docs = [doc for part in chunks(keys, _BATCH_DOCS) for doc in self.client.find(part)]
            return {result.id: result for result in self._valid(docs)}
        return {}

    def complete(self, start: str) -> list[StoredResult]:
        """Return up to 200 results of tasks whose ids begin with `start`, by id; one request."""
        prefix = self.backend.get_key_for_task(start)
        with self._existing():
            return list(self._valid(row['doc'] for row in self.client.id_range(prefix, docs=True, limit=_BATCH_DOCS)))
        return []

    @contextmanager
    def _existing(self) -> Iterator[None]:
        """Leave the context if the database does not exist: then nothing is stored yet.

        *Raises* `ConfigurationError` if it lacks the views.
        """
        try:
            yield
        except DatabaseMissing as exc:
            logger.info('there are no results: %s', exc)
        except NotFound as exc:
            raise ConfigurationError(
                f'{self.client.address.url} lacks the design document {design.NAME}; let an administrator run '
                f'"celery -A your_app couchdb setup"'
            ) from exc

    def _if_exists(self, rows: Iterator[Row]) -> Iterator[Row]:
        with self._existing():
            yield from rows

    def _valid(self, docs: Iterable[Document | None]) -> Iterator[StoredResult]:
        now = self.client.clock.now()
        return (self.of(doc) for doc in docs if doc and not is_expired(doc, now))

    def chord_progress(self, group_id: str) -> tuple[int, int] | None:
        """Return how many tasks of an unfinished chord have ended, and how many it has; two requests.

        None if there is no such chord, its size is not known yet, or it has too many tasks to count them here.
        """
        chord_id = self.backend.get_key_for_chord(group_id)
        chord = self.client.get_or_none(chord_id)
        if chord is None or not is_sound(chord) or (size := size_of(chord)) > _MAX_COUNTED_PARTS:
            return None
        return len(self.client.id_range(f'{chord_id}:part:', limit=size)), size

    # -- changing

    def retry(
        self,
        results: Sequence[StoredResult],
        *,
        queue: str | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[StoredResult], dict[str, str]]:
        """Send failed tasks again, with their ids and their arguments, to their queues or to `queue`.

        `args` and `kwargs` replace their arguments. The state of a result becomes `RETRY` until its task runs. Only the
        task itself is sent: the chain, the chord or the callbacks that it was part of have ended with its failure. If
        this process is killed meanwhile, a result is still a failure, and another call does the rest: a task is sent
        once for each failure. Return the results whose tasks were sent, and the reasons, one sentence each, why others
        were not, by task id. For each 200 results there are two writes and one request with the messages.
        """
        sent: list[StoredResult] = []
        refused: dict[str, str] = {}
        for part in chunks(results, _BATCH_DOCS):
            calls = [_Call.of(result, queue, args, kwargs) for result in part]
            for step in (self._flaws, self._without_deliveries, self._send):
                reasons = step(calls)
                refused |= reasons
                calls = [call for call in calls if call.id not in reasons]
            self.client.bulk([self._waiting(call) for call in calls])  # a conflict means that the task has run already
            for call in calls:  # this process may remember the failure
                self.backend.subscriber.drop(call.result.document['_id'])
            sent += [call.result for call in calls]
        return sent, refused

    def drop(self, results: Sequence[StoredResult]) -> list[StoredResult]:
        """Delete failed results for good and return them. Those that another process has changed are kept."""
        failed = [result for result in results if result.state == states.FAILURE]
        dropped = [
            result
            for part in chunks(failed, _BATCH_DOCS)
            for result, write in zip(part, self.client.bulk([deletion(each.document) for each in part]), strict=True)
            if write.is_stored
        ]
        for result in dropped:
            self.backend.subscriber.drop(result.document['_id'])
        return dropped

    # The steps of `retry`. Each returns why calls are refused, by the ids of their tasks.

    def _flaws(self, calls: Sequence[_Call]) -> dict[str, str]:
        refused = {call.id: reason for call in calls if (reason := call.flaw())}
        edited = {call.id: call.message_ids() for call in calls if call.is_edited and call.id not in refused}
        if edited and has_our_broker(self.app):
            known = (self._broker or client_of(self.app)).known([doc_id for ids in edited.values() for doc_id in ids])
            # That of another process which was killed, or has not changed the result yet. Its arguments are not these.
            refused |= {task_id: 'it was sent again already' for task_id, ids in edited.items() if known & {*ids}}
        return refused

    def _without_deliveries(self, calls: Sequence[_Call]) -> dict[str, str]:
        """Write the failures without their deliveries, so that any later result replaces them."""
        refused = {}
        for call, write in zip(calls, self.client.bulk([call.document for call in calls]), strict=True):
            if write.is_stored:
                call.document['_rev'] = write.rev
            else:
                refused[call.id] = str(write.exception(self.client.address.url)) if write.is_refused else _CHANGED
        return refused

    def _send(self, calls: Sequence[_Call]) -> dict[str, str]:
        names = sorted({call.queue for call in calls if call.queue})
        known = self._queues_among([name for name in names if name not in self.app.amqp.queues])
        for call in calls:
            if not call.is_moved and call.queue not in known and call.queue not in self.app.amqp.queues:
                call.queue = None  # a routing key, or a queue that was deleted
        if not has_our_broker(self.app):
            return self._publish(calls, None)
        with producer_as(self.app, self._broker) as producer:
            collecting = CollectingProducer(producer)
            refused = self._publish(calls, collecting)
            try:
                collecting.flush()
            except (KombuError, CouchDBError) as exc:
                if isinstance(exc, RETRIED) or isinstance(exc.__cause__, RETRIED):
                    return {call.id: f'it cannot be sent: {exc}' for call in calls}
                return self._publish(calls, producer)  # CouchDB refuses one of the messages: find out which
        return refused

    def _publish(self, calls: Sequence[_Call], producer: Any) -> dict[str, str]:
        refused = {}
        for call in calls:
            try:
                with idempotent(call.key):
                    task = self.app.signature(call.result.task, args=call.args, kwargs=call.kwargs)
                    options = {'queue': call.queue} if call.queue else {}
                    task.apply_async(task_id=call.id, producer=producer, **options)
            except (KombuError, CouchDBError, TypeError, ValueError, LookupError) as exc:
                refused[call.id] = f'it cannot be sent: {exc}'
        return refused

    def _waiting(self, call: _Call) -> Document:
        """Return a failed result with the state `RETRY`."""
        doc, extended = call.document, {'args': call.args, 'kwargs': call.kwargs} if call.is_edited else {}
        meta = {'task_id': call.id, 'result': None, 'traceback': None, 'children': [], **call.result.meta, **extended}
        kept = {name: value for name, value in doc.items() if name not in ('value', 'base64', 'content_type', 'error')}
        payload = self.backend.encode({**meta, 'status': states.RETRY, 'date_done': None})
        date = self.client.clock.now()
        return {**kept, 'status': states.RETRY, 'date': date, **pack(payload, self.backend.content_type)}

    def _queues_among(self, names: Sequence[str]) -> set[str]:
        """Return which of these names are those of queues that a process has declared; one request, or none."""
        if not names or not has_our_broker(self.app):
            return set()
        found = (self._broker or client_of(self.app)).find([QUEUE + name for name in names])
        return {name for name, doc in zip(names, found, strict=True) if doc}

    def of(self, doc: Document) -> StoredResult:
        """Return what a document of the database of results says."""
        error = None
        try:
            meta = self.backend.decode(unpack(doc))
            meta = meta if isinstance(meta, dict) else {}
        except Exception as exc:  # any serializer may have written it, and anybody may have changed it
            meta, error = {}, f'the result cannot be decoded: {exc}'
        state, result = str(doc.get('status')), meta.get('result')
        if state in states.EXCEPTION_STATES:
            error, result = error or error_text(result), None
        args, kwargs, date = meta.get('args'), meta.get('kwargs'), doc.get('date')
        return StoredResult(
            id=doc['_id'].removeprefix(self.backend.key_t(self.backend.task_keyprefix)),
            task=_text(meta.get('name')) or _text(doc.get('task')),
            state=state,
            date=float(date) if is_number(date) else None,
            error=error,
            result=result,
            traceback=_text(meta.get('traceback')),
            args=[*args] if isinstance(args, (list, tuple)) else None,
            kwargs=kwargs if isinstance(kwargs, dict) else None,
            queue=_text(meta.get('queue')),
            worker=_text(meta.get('worker')),
            retries=meta['retries'] if isinstance(meta.get('retries'), int) else None,
            meta=meta,
            document=doc,
        )


@dataclass
class _Call:
    """A failed task that is to be sent again."""

    result: StoredResult
    args: Any
    kwargs: Any
    queue: str | None
    #: Whether somebody has chosen the arguments, and the queue.
    is_edited: bool
    is_moved: bool
    #: The document of the failure, without a delivery.
    document: Document

    @classmethod
    def of(cls, result: StoredResult, queue: str | None, args: Any, kwargs: Any) -> _Call:
        """Return the call of a failed task with its own arguments and queue, unless others are given."""
        return cls(
            result,
            result.args if args is None else args,
            result.kwargs if kwargs is None else kwargs,
            queue or result.queue,
            is_edited=args is not None or kwargs is not None,
            is_moved=queue is not None,
            document={name: value for name, value in result.document.items() if name != 'delivery'},
        )

    @property
    def id(self) -> str:
        """The id of the task."""
        return self.result.id

    @property
    def key(self) -> str:
        """What makes the ids of its messages: a failure is sent once."""
        return f'{self.document["_id"]} {self.document.get("date")}'

    def message_ids(self) -> list[str]:
        """Return the ids that its message may have."""
        with idempotent(self.key):
            message_id = str(fixed_id({'headers': {'id': self.id}}))
        return [message_id, *([copy_id(message_id, self.queue)] if self.queue else [])]

    def flaw(self) -> str | None:
        """Return why it cannot be sent, or None."""
        if self.result.state != states.FAILURE:
            return f'its state is {self.result.state}: only failed tasks can be sent again'
        if self.result.task is None:
            return 'the name of its task is not stored'
        if self.args is None or self.kwargs is None:
            if str in (type(self.result.meta.get(name)) for name in ('args', 'kwargs')):  # see `documents.shortened`
                return 'its arguments were too large to be stored with its result: give both args and kwargs'
            return (
                'its arguments are not stored: give them, or set result_extended = True in the app of the workers, and '
                'tasks that fail from then on can be sent again'
            )
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
