"""Jobs of a Celery app by task id: read their states, wait for them, remove them, replay dead letters.

`kombu_couchdb.admin` has the functions that need only the broker's database. This module combines them with Celery's
results, revoked tasks and remote control.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any

from celery import states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.utils.saferepr import saferepr
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError
from kombu.serialization import dumps, prepare_accept_content, registry

from kombu_couchdb.admin import dead, jobs
from kombu_couchdb.admin.edit import UNCHANGED, change, check_queue, in_queue, moving
from kombu_couchdb.consumer.bodies import read
from kombu_couchdb.couchdb.bulk import BATCH_DOCS
from kombu_couchdb.couchdb.client import Client, Document, chunks
from kombu_couchdb.documents.body import attached, body_stub, decoded, encoded, is_large, loaded
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.documents.types import Message
from kombu_couchdb.documents.workitem import is_unique, task_name
from kombu_couchdb.documents.workitem import task_id as task_id_of
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError, NotChangeable
from kombu_couchdb.values import is_number

from .backend import CouchDBBackend
from .connections import backend_as, client_of, control_as
from .results.documents import is_expired
from .workflows import failed_with

#: How many results of removed jobs become REVOKED at the same time.
_THREADS = 32

#: The maximum length of the arguments in the headers, in characters, as Celery cuts them.
_MAX_REPR = 1024


class Unreadable(NotChangeable):
    """The body of a message cannot be decoded, or the app does not accept its content type."""


class Jobs:
    """The jobs in the database of an app's broker. *Every* method raises the errors of `kombu_couchdb.errors`.

    The states are those of `kombu_couchdb.admin.jobs`: `ready`, `scheduled`, `parked`, `prefetched`, `running`, `dead`,
    `done`, `gone`. With Celery's default, early acknowledgement, the message of a running task is no longer in the
    queue. Then the state is `running` if the result says that the task has started (`task_track_started`), and `done`
    or `gone` otherwise.
    """

    def __init__(self, app: Any, client: Client | None = None, results: Client | None = None) -> None:
        """Use the clients for the broker's database and that of results, or create them.

        The users of the clients read, change and send everything. Only the tasks that a chord calls when it cannot end
        are sent by the user of the app. *Raises* `ConfigurationError` if the app's broker is not CouchDB.
        """
        self.app = app
        self.client, self._results = client or client_of(app), results

    @cached_property
    def backend(self) -> Any:
        """The result backend of the app, for the user of the client for results."""
        return backend_as(self.app, self._results)

    def state(self, task_id: str) -> str:
        """Return the state of a job."""
        return self._refined(jobs.state(self.client, task_id), task_id)

    def watch(self, task_id: str, timeout: float | None = None) -> Iterator[str]:
        """Yield the state of a job, then each new state, until the job is `done`, `gone` or `dead`. It does not poll.

        *Raises* `TimeoutError` if the job has not ended after `timeout` seconds; None means no limit.
        """
        return (state for _, state in self.watch_many([task_id], timeout))

    def watch_many(self, task_ids: Collection[str], timeout: float | None = None) -> Iterator[tuple[str, str]]:
        """Yield `(task_id, state)` for each job, then for each new state, until all are `done`, `gone` or `dead`.

        All jobs share one changes feed. *Raises* `TimeoutError` as `watch` does.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        last: dict[str, str] = {}
        running: dict[str, str] = {}  # acknowledged early, with the state of their messages
        for task_id, found in jobs.watch_all(self.client, task_ids, timeout):
            state = self._refined(found, task_id)
            if state != found:
                running[task_id] = found
            if state != last.get(task_id):
                yield task_id, state
            last[task_id] = state
        for task_id, found in running.items():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self._result(task_id).get(timeout=left, propagate=False, disable_sync_subtasks=False)
            except CeleryTimeout as exc:
                raise TimeoutError(f'job {task_id} is still running') from exc
            yield task_id, found

    def workers(self, task_id: str, timeout: float = 1.0) -> dict[str, str]:
        """Ask all workers for a task. Return `{worker: state}` with 'active', 'reserved' or 'ready' as the state.

        Workers that do not know the task are left out. The call always takes `timeout` seconds, because the number of
        replies is not known.
        """
        with control_as(self.app, self.client) as mailbox:
            replies = mailbox.multi_call('query_task', {'ids': [task_id]}, timeout=timeout)
        found = {worker: reply for one in replies for worker, reply in one.items()}
        return {worker: tasks[task_id][0] for worker, tasks in found.items() if task_id in tasks}

    def wait(self, task_id: str, *wanted: str, timeout: float | None = None) -> str:
        """Wait until a job is in one of the states `wanted`, or has ended (`done`, `gone`, `dead`); return its state.

        *Raises* `TimeoutError` after `timeout` seconds; None means no limit.
        """
        found = 'gone'
        for found in self.watch(task_id, timeout):
            if found in wanted:
                break
        return found

    def wait_many(self, task_ids: Collection[str], timeout: float | None = None) -> dict[str, str]:
        """Wait until all these jobs have ended, and return the last state of each: `done`, `gone` or `dead`.

        *Raises* `TimeoutError` after `timeout` seconds; None means no limit.
        """
        return dict(self.watch_many(task_ids, timeout))

    def remove(self, task_id: str, *, terminate: bool = False, signal: str = 'SIGTERM') -> jobs.Removal:
        """Delete a waiting job for good. Its result becomes `REVOKED`.

        `task_id` is the id of the task or of the job's document. A job that a worker holds is revoked: the worker does
        not start it, or, if it runs and `terminate` is true, sends `signal` to its process. It is also marked, so that
        it is deleted when the worker's claim ends and never runs again, even if the worker is cut off. A job that is
        not found is revoked, too, because a worker may have acknowledged it early and run it. So is a job that is
        `done`, but only if its result says that it has started, or if `terminate` is true and its result is not final.
        Dead letters are kept.
        """
        return self.remove_all([task_id], terminate=terminate, signal=signal)[task_id]

    def remove_all(
        self, task_ids: Collection[str], *, terminate: bool = False, signal: str = 'SIGTERM'
    ) -> dict[str, jobs.Removal]:
        """Remove jobs as `remove` does, and return what came of each, by id: workers are told once for all of them."""
        removals, to_revoke = jobs.remove(self.client, task_ids), list[str]()
        for task_id, removal in removals.items():
            names = self._to_revoke(task_id, removal, terminate)
            removals[task_id] = removal._replace(revoked=bool(names))
            to_revoke += names
        if to_revoke:
            with control_as(self.app, self.client) as mailbox:
                mailbox.abcast('revoke', {'task_id': to_revoke, 'terminate': terminate, 'signal': signal})
        docs = [removal.removed[0] for removal in removals.values() if removal.removed and not removal.claimed]
        is_ours = isinstance(self.backend, CouchDBBackend) if docs else False
        with ThreadPoolExecutor(_THREADS if is_ours else 1) as threads:
            list(threads.map(self._mark_as_revoked, docs))  # our backend writes results of several threads together
        return removals

    def _to_revoke(self, task_id: str, removal: jobs.Removal, terminate: bool) -> list[str]:
        """Return the ids under which workers know a job that they may run."""
        if not removal.claimed and (removal.removed or removal.dead):
            return []  # a task that is a dead letter only is not revoked: workers would refuse it after a replay
        # Workers know a task by its own id only, not by the id of its document.
        found = removal.claimed or removal.done
        names = [*dict.fromkeys(task_id_of(doc) or task_id for doc in found)] or [task_id]
        if removal.done and not removal.claimed:
            names = [name for name in names if self._is_running(name, if_unknown=terminate)]
        return names

    def move(
        self,
        task_id: str,
        *,
        queue: str | None = None,
        eta: datetime | None = UNCHANGED,
        countdown: float | None = None,
        priority: int | None = None,
    ) -> Document:
        """Move a waiting job to another queue, due date or priority, and return its document.

        `eta` None makes it due at once; a date without a time zone is UTC. `countdown` is in seconds from now.
        *Raises* `NotChangeable` if the job does not wait, or is a unique job and `queue` is given;
        `ConfigurationError` if the queue is not declared or a value is wrong.
        """
        return _only(self.move_all([task_id], queue=queue, eta=eta, countdown=countdown, priority=priority))

    def move_all(
        self,
        task_ids: Collection[str],
        *,
        queue: str | None = None,
        eta: datetime | None = UNCHANGED,
        countdown: float | None = None,
        priority: int | None = None,
    ) -> tuple[dict[str, Document], dict[str, CouchDBError]]:
        """Move jobs as `move` does. Return their documents, and the errors of jobs that were not moved, by id."""
        if countdown is not None:
            if eta is not UNCHANGED:
                raise ConfigurationError('give eta or countdown, not both')
            if not is_number(countdown):
                raise ConfigurationError(f'the countdown must be a number of seconds, not {countdown!r:.80}')
            now = self.client.clock.now()
            try:
                eta = (
                    datetime.fromtimestamp(now, timezone.utc) + timedelta(seconds=countdown) if countdown > 0 else None
                )
            except (OverflowError, ValueError) as exc:
                raise ConfigurationError(f'the countdown of {countdown!r:.40} seconds is too long') from exc
        return change(self.client, task_ids, moving(self.client, queue=queue, eta=eta, priority=priority))

    def edit(
        self, task_id: str, *, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Document:
        """Replace the arguments of a waiting job, and return its document.

        They are encoded as the message was: its content type must be one that the app accepts. *Raises*
        `NotChangeable` if the job does not wait, is not a task of Celery's protocol 2, or if the
        task, when this app knows it, does not take these arguments; `Unreadable` as `decode`.
        """
        return _only(self.edit_all([task_id], args=args, kwargs=kwargs))

    def edit_all(
        self,
        task_ids: Collection[str],
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        rev: str | None = None,
    ) -> tuple[dict[str, Document], dict[str, CouchDBError]]:
        """Edit jobs as `edit` does, with `rev` only what has this revision.

        Return their documents, and the errors of jobs that were not edited, by id.
        """
        if args is None and kwargs is None:
            raise ConfigurationError('nothing to change: give args or kwargs')

        def edited(doc: Document) -> Document:
            if rev not in (None, doc['_rev']):
                raise NotChangeable(f'somebody else has changed job {task_id_of(doc) or doc["_id"]} since you read it')
            return _with_arguments(self.app, doc, self.decode(doc), args, kwargs)

        return change(self.client, task_ids, edited)

    def held(self, task: Any) -> bool:
        """Tell a task that runs whether its worker still holds the message: call it before writes of your own.

        `task` is the bound task (`bind=True`) that is running. One request, from whichever process runs the task. True
        means: when CouchDB answered, no other worker had the message and nobody had removed it. False means: the lease
        was lost, the message may run or have run elsewhere, or it was removed. It is a check, not a lock: a process
        that is paused after it may act later. *Raises* `ConfigurationError` if the task is acknowledged early, because
        there is no lease then; `ServerUnavailable` if CouchDB does not respond.
        """
        request = task.request
        if request.called_directly or request.is_eager:
            return True  # there is no message that another worker could get
        if not task.acks_late:
            raise ConfigurationError(
                f'the task {task.name} is acknowledged before it runs, so its worker holds no lease: set acks_late=True'
            )
        properties = getattr(request, 'properties', None) or {}
        doc_id, colon, rev = str(properties.get('delivery_tag')).rpartition(':')
        if not colon:
            raise ConfigurationError(f'the message of task {task.name} did not come from CouchDB')
        doc = self.client.get_or_none(doc_id)
        if doc is None or doc.get('removed'):
            return False
        # Publishers may change a unique job while it runs: the claim is the same, and the revision is not.
        claim = (properties.get('delivery_info') or {}).get('claimed')
        return bool(doc['_rev'] == rev or (is_unique(doc) and claim is not None and doc.get('claimed') == claim))

    def result_states(self, task_ids: Iterable[str]) -> dict[str, str]:
        """Return the states of the results that are stored for these tasks, such as `SUCCESS`, by id.

        One request for every 100 ids, or none if the app's results are not in CouchDB: then nothing is returned, and
        nothing if the user may not read them.
        """
        backend = self.backend
        if not isinstance(backend, CouchDBBackend):
            return {}
        ids = {backend.get_key_for_task(task_id): task_id for task_id in task_ids}
        client = self._results or backend.client
        try:
            docs = [doc for part in chunks([*ids], BATCH_DOCS) for doc in client.find(part)]
        except AccessDenied:
            return {}
        now = client.clock.now()
        return {ids[doc['_id']]: str(doc.get('status')) for doc in docs if doc and not is_expired(doc, now)}

    def replay(
        self,
        letters: Sequence[Document],
        *,
        queue: str | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[Document], dict[str, str]]:
        """Put dead letters back into their queues, or into `queue`, and delete their results.

        What follows a task runs after it, so that its failed results are deleted, too: those of the rest of its chain,
        and that of the body of its chord, which is sent when every part has succeeded (only with our result backend).
        `args` and `kwargs` replace their arguments. The message is changed and waits again in one write: if this
        process is killed, the letter is either replayed or as it was. A result is deleted because a final result would
        not be replaced, and before its message can run again. A letter that is not replayed keeps its result, unless
        another process changes the letter at this moment. Return the replayed letters, and the reasons, one sentence
        each, why others were not replayed, by document id. *Raises* `ConfigurationError` if the queue is not declared.
        """
        if queue is not None:
            check_queue(self.client, queue)
        ready: list[Document] = []
        refused: dict[str, str] = {}
        for doc, now in zip(letters, self.client.fetch([doc['_id'] for doc in letters]), strict=True):
            if not now or now['_rev'] != doc['_rev']:
                refused[doc['_id']] = 'it was changed by somebody else just now'
                continue
            try:
                if queue is not None and queue != doc.get('queue'):
                    doc = in_queue(doc, queue)
                if args is not None or kwargs is not None:
                    doc = _with_arguments(self.app, doc, self.decode(doc), args, kwargs)
            except NotChangeable as exc:
                refused[doc['_id']] = str(exc)
            else:
                ready.append(doc)
        replayed, more = dead.replay(self.client, ready, before=self._forget_results_of)
        return replayed, {**refused, **more}

    def decode(self, doc: Document) -> Any:
        """Return the decoded body of a job's message; for a task that is `[args, kwargs, embedded]`.

        *Raises* `Unreadable` if the body cannot be decoded, or if the app does not accept its content type.
        """
        try:
            message = doc['message']
            stored = message['body'] if body_stub(doc) is None else read(self.client, [doc])[0].content
            body = decoded(stored, message['properties'].get('body_encoding'))
            return loaded(message, body, prepare_accept_content(self.app.conf.accept_content))
        except ContentDisallowed as exc:
            raise Unreadable(f'the app does not accept {doc["message"].get("content-type")}') from exc
        except (DecodeError, ValueError, TypeError, KeyError, AttributeError, LookupError) as exc:
            raise Unreadable(f'the body cannot be decoded: {exc}') from exc

    def _refined(self, found: str, task_id: str) -> str:
        """Return `running` instead of an end if the result says that a task which was acknowledged early runs."""
        return 'running' if found in ('done', 'gone') and self._is_running(task_id) else found

    def _is_running(self, task_id: str, *, if_unknown: bool = False) -> bool:
        """Tell whether the result says that a task has started, or has not ended: then `if_unknown` is returned."""
        if isinstance(self.backend, DisabledBackend):
            return if_unknown
        state = self._result(task_id).state
        return state == states.STARTED or (if_unknown and state not in states.READY_STATES)

    def _result(self, task_id: str) -> Any:
        return self.app.AsyncResult(task_id, backend=self.backend)

    def _mark_as_revoked(self, doc: Document) -> None:
        task_id = task_id_of(doc)
        if task_id is None:
            return  # not a message of Celery
        headers = doc['message'].get('headers') or {}
        try:
            embedded = self.decode(doc)[2]
        except (Unreadable, LookupError, TypeError):
            embedded = {}
        request = Context(headers, chord=embedded.get('chord') if isinstance(embedded, dict) else None)
        try:
            self.backend.mark_as_revoked(
                task_id, 'removed', request=request, store_result=not headers.get('ignore_result')
            )
        except AccessDenied as exc:
            raise AccessDenied(f'the job {task_id} is removed, but its result cannot become REVOKED: {exc}') from exc

    def _forget_results_of(self, docs: Sequence[Document]) -> None:
        backend = self.backend
        task_ids = [*dict.fromkeys(task_id for doc in docs for task_id in self._failed_with(doc))]
        if isinstance(backend, CouchDBBackend):
            found = backend.store.read_many(map(backend.get_key_for_task, task_ids))  # most have no result
            task_ids = [task_id for task_id, doc in zip(task_ids, found, strict=True) if doc]
        for task_id in [] if isinstance(backend, DisabledBackend) else task_ids:
            try:
                backend.forget(task_id)
            except NotImplementedError:
                pass  # a backend without `forget` overwrites its results

    def _failed_with(self, doc: Document) -> Iterator[str]:
        reopen = getattr(getattr(self.backend, 'chords', None), 'reopen', None)  # other backends forget such chords
        try:
            body = self.decode(doc)
        except Unreadable:
            body = None
        return failed_with(headers_of(doc), body, reopen or (lambda group_id, task_id: False))


def _only(outcome: tuple[dict[str, Document], dict[str, CouchDBError]]) -> Document:
    """Return the one document that was changed, or raise why it was not."""
    changed, refused = outcome
    for error in refused.values():
        raise error
    [doc] = changed.values()
    return doc


def _with_arguments(
    app: Any, doc: Document, body: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Document:
    """Return an item with other arguments; None keeps what its decoded `body` has.

    *Raises* `NotChangeable`; `ConfigurationError` if `args` or `kwargs` are of a wrong type.
    """
    if not isinstance(body, (list, tuple)) or len(body) != 3:
        raise NotChangeable("the job cannot be edited: its message is not a task of Celery's protocol 2")
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise ConfigurationError(f'args must be a list, not {args!r:.80}')
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigurationError(f'kwargs must be a dictionary, not {kwargs!r:.80}')
    args = list(body[0] if args is None else args)
    kwargs = dict(body[1] if kwargs is None else kwargs)
    _check_arguments(app.tasks.get(task_name(doc)), args, kwargs)
    message = doc['message']
    serializer = registry.type_to_name.get(message.get('content-type'))
    if serializer is None:
        raise NotChangeable(f'the job cannot be edited: this app has no serializer for {message.get("content-type")}')
    try:
        content_type, encoding, payload = dumps([args, kwargs, body[2]], serializer)
    except (EncodeError, TypeError, ValueError) as exc:
        raise NotChangeable(f'the arguments cannot be encoded as {message.get("content-type")}: {exc}') from exc
    stored, body_encoding = encoded(payload, encoding)
    headers = {name: value for name, value in message['headers'].items() if name != 'compression'}
    changed: Message = {
        **message,
        'body': stored,
        'content-type': content_type,
        'content-encoding': encoding,
        'properties': {**message['properties'], 'body_encoding': body_encoding},
        'headers': {**headers, 'argsrepr': saferepr(args, _MAX_REPR), 'kwargsrepr': saferepr(kwargs, _MAX_REPR)},
    }
    edited = {name: value for name, value in doc.items() if name != '_attachments'}
    if is_large(changed) and 'key' not in doc:
        changed, edited['_attachments'] = attached(changed)
    return {**edited, 'message': changed}


def _check_arguments(task: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Check arguments as Celery does when a task is sent; only if this app knows the task."""
    if task is None or not task.typing or not hasattr(task, '__header__'):
        return
    try:
        task.__header__(*args, **kwargs)
    except TypeError as exc:
        raise NotChangeable(f'the task {task.name} does not take these arguments: {exc}') from exc
