"""Jobs of a Celery app by task id: read their states, wait for them, remove them, replay dead letters.

`kombu_couchdb.admin` has the functions that need only the broker's database. This module combines them with Celery's
results, revoked tasks and remote control.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from celery import states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.exceptions import TimeoutError as CeleryTimeout
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.serialization import loads, prepare_accept_content

from kombu_couchdb.admin import dead, jobs
from kombu_couchdb.consumer.bodies import read
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents.body import decoded, stub
from kombu_couchdb.documents.compressed import unpacked
from kombu_couchdb.documents.workitem import task_id as task_id_of
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.transport import Transport

__all__ = ['Jobs', 'Unreadable', 'client_of']

#: How long a request may take. Reading the index of tasks first brings it up to date, which may take long.
_REQUEST_SECONDS = 120.0


class Unreadable(ValueError):
    """The body of a message cannot be decoded, or the app does not accept its content type."""


class Jobs:
    """The jobs in the database of an app's broker. *Every* method raises the errors of `kombu_couchdb.errors`.

    The states are those of `kombu_couchdb.admin.jobs`: `pending`, `scheduled`, `running`, `dead`, `gone`. With Celery's
    default, early acknowledgement, the message of a running task is no longer in the queue. Then the state is `running`
    if the result says that the task has started (`task_track_started`), and `gone` otherwise.
    """

    def __init__(self, app: Any, client: Client | None = None) -> None:
        """Use `client`, or create one for the database of the app's broker.

        *Raises* `ConfigurationError` if the app's broker is not CouchDB.
        """
        self.app = app
        self.client = client or client_of(app)

    def state(self, task_id: str) -> str:
        """Return the state of a job."""
        found = jobs.state(self.client, task_id)
        return 'running' if found == 'gone' and self._has_started(task_id) else found

    def watch(self, task_id: str, timeout: float | None = None) -> Iterator[str]:
        """Yield the state of a job, then each new state, until the job is `gone`. It does not poll.

        *Raises* `TimeoutError` if the job is not gone after `timeout` seconds; None means no limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        last = ''
        for found in jobs.watch(self.client, task_id, timeout):
            state = 'running' if found == 'gone' and self._has_started(task_id) else found
            if state != last:
                yield state
            last = state
        if last == 'running':
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                self.app.AsyncResult(task_id).get(timeout=left, propagate=False, disable_sync_subtasks=False)
            except CeleryTimeout as exc:
                raise TimeoutError(f'job {task_id} is still running') from exc
            yield 'gone'

    def workers(self, task_id: str, timeout: float = 1.0) -> dict[str, str]:
        """Ask all workers for a task. Return `{worker: state}` with 'active', 'reserved' or 'ready' as the state.

        Workers that do not know the task are left out. The call always takes `timeout` seconds, because the number of
        replies is not known.
        """
        replies = self.app.control.inspect(timeout=timeout).query_task(task_id) or {}
        return {worker: found[task_id][0] for worker, found in replies.items() if task_id in found}

    def wait(self, task_id: str, *wanted: str, timeout: float | None = None) -> str:
        """Wait until a job is in one of the states `wanted`, or gone, and return its state.

        *Raises* `TimeoutError` after `timeout` seconds; None means no limit.
        """
        for found in self.watch(task_id, timeout):
            if found in wanted:
                return found
        return 'gone'

    def remove(self, task_id: str, *, terminate: bool = False, signal: str = 'SIGTERM') -> jobs.Removal:
        """Delete a pending or scheduled job for good. Its result becomes `REVOKED`.

        `task_id` is the id of the task or of the job's document. A job that a worker holds is revoked: the worker does
        not start it, or, if it runs and `terminate` is true, sends `signal` to its process. A job that is not found is
        revoked, too, because a worker may have acknowledged it early and run it. Dead letters are kept.
        """
        removal = jobs.remove(self.client, task_id)
        if removal.running or not (removal.removed or removal.dead):
            # Do not revoke a task that is a dead letter only: workers would refuse it after a replay.
            # Workers know a task by its own id only, not by the id of its document.
            for name in dict.fromkeys(task_id_of(doc) or task_id for doc in removal.running) or [task_id]:
                self.app.control.revoke(name, terminate=terminate, signal=signal)
        elif removal.removed:
            self._mark_as_revoked(removal.removed[0])
        return removal

    def replay(self, letters: Sequence[Document]) -> tuple[list[Document], dict[str, str]]:
        """Put dead letters back into their queues and delete their results.

        A result is deleted because a final result would not be replaced, and before its message can run again. A letter
        that is not replayed keeps its result, unless another process changes the letter at this moment. Return the
        replayed letters, and the reasons, one sentence each, why others were not replayed, by document id.
        """
        found = self.client.fetch([doc['_id'] for doc in letters])
        same = [doc for doc, now in zip(letters, found, strict=True) if now and now['_rev'] == doc['_rev']]
        changed = {doc['_id']: 'it was changed by somebody else just now' for doc in letters if doc not in same}
        replayed, refused = dead.replay(self.client, same, before=self._forget_result_of)
        return replayed, {**changed, **refused}

    def decode(self, doc: Document) -> Any:
        """Return the decoded body of a job's message; for a task that is `[args, kwargs, embedded]`.

        *Raises* `Unreadable` if the body cannot be decoded, or if the app does not accept its content type.
        """
        try:
            message = doc['message']
            stored = message['body'] if stub(doc) is None else read(self.client, [doc])[0].content
            body = decoded(stored, message['properties'].get('body_encoding'))
            if compression := message['headers'].get('compression'):
                body = unpacked(body, compression)
            return loads(
                body,
                message.get('content-type'),
                message.get('content-encoding'),
                accept=prepare_accept_content(self.app.conf.accept_content),
            )
        except ContentDisallowed as exc:
            raise Unreadable(f'the app does not accept {doc["message"].get("content-type")}') from exc
        except (DecodeError, ValueError, TypeError, KeyError, AttributeError, LookupError) as exc:
            raise Unreadable(f'the body cannot be decoded: {exc}') from exc

    def _has_started(self, task_id: str) -> bool:
        return not isinstance(self.app.backend, DisabledBackend) and bool(
            self.app.AsyncResult(task_id).state == states.STARTED
        )

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
        self.app.backend.mark_as_revoked(
            task_id, 'removed', request=request, store_result=not headers.get('ignore_result')
        )

    def _forget_result_of(self, doc: Document) -> None:
        task_id = task_id_of(doc)
        if task_id and not isinstance(self.app.backend, DisabledBackend):
            try:
                self.app.backend.forget(task_id)
            except NotImplementedError:
                pass  # a backend without `forget` overwrites its results


def client_of(app: Any) -> Client:
    """Return a client for the database of an app's broker.

    *Raises* `ConfigurationError` if the app's broker is not CouchDB.
    """
    try:
        opened = app.connection_for_write()
    except KeyError as exc:
        raise ConfigurationError(f'{exc.args[0]}; broker_url must be couchdb://…') from exc
    with opened as connection:
        if not isinstance(connection.transport, Transport):
            raise ConfigurationError(
                f'the broker of this app is {connection.transport.driver_type}, not CouchDB: '
                f'set broker_url to couchdb://…, or name the app with celery -A'
            )
        return Client(connection.transport.address, _REQUEST_SECONDS)
