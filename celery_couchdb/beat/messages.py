"""Sends tasks for due dates, many in one request, and each only once however often it is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from celery.beat import BeatLazyFunc
from kombu.exceptions import OperationalError

from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.errors import RETRIED, CouchDBError
from kombu_couchdb.transport import CollectingProducer

from .entries import Entry

__all__ = ['Call', 'Messages', 'send']


class Call(NamedTuple):
    """A task to send: one due date of an entry."""

    entry: Entry
    due: float
    task_id: str


def send(app: Any, entry: Entry, producer: Any = None, **options: Any) -> Any:
    """Send the task of an entry as `celery beat` does, and return its result."""
    given = {**entry.options, **options}
    given['headers'] = {**(given.get('headers') or {}), 'celery_beat_task': True}
    args = [_called(value) for value in entry.args or ()]
    kwargs = {name: _called(value) for name, value in (entry.kwargs or {}).items()}
    task = app.tasks.get(entry.task)
    if task is not None:
        return task.apply_async(args, kwargs, producer=producer, **given)
    return app.send_task(entry.task, args, kwargs, producer=producer, **given)


def _called(value: Any) -> Any:
    return value() if isinstance(value, BeatLazyFunc) else value


class Messages:
    """Sends tasks through one connection."""

    def __init__(self, app: Any, connection: Any) -> None:
        self._app, self._connection = app, connection
        self._producer: Any = None

    def send(self, calls: Sequence[Call]) -> dict[str, str]:
        """Send tasks, and return the ids of those that can never be sent, each with the reason.

        *Raises* the errors of the client; then some of the tasks may have been sent. Call it again with the same tasks.
        """
        if self._producer is None:
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        with idempotent('beat'):
            try:
                return self._send_together(calls)
            except RETRIED:
                raise
            except CouchDBError:  # CouchDB refuses one of the messages: find out which
                return self._send_each(calls)

    def _send_together(self, calls: Sequence[Call]) -> dict[str, str]:
        producer, errors = CollectingProducer(self._producer), dict[str, str]()
        for call in calls:
            errors.update(self._try(call, producer, CouchDBError))
        producer.flush()
        return errors

    def _send_each(self, calls: Sequence[Call]) -> dict[str, str]:
        errors: dict[str, str] = {}
        for call in calls:
            errors.update(self._try(call, self._producer, RETRIED))
        return errors

    def _try(self, call: Call, producer: Any, raised: Any) -> dict[str, str]:
        """Send one task and return an error that concerns it alone; raise the errors in `raised`."""
        try:
            # The caller repeats what fails: a retry here could outlast the lease.
            send(self._app, call.entry, producer, task_id=call.task_id, retry=False)
        except raised:
            raise
        except OperationalError as exc:
            if isinstance(exc.__cause__, RETRIED):
                raise exc.__cause__ from exc
            return {call.task_id: f'{exc!r:.300}'}
        except CouchDBError as exc:
            return {call.task_id: str(exc)}
        except Exception as exc:  # queues, serializers, signals and classes of tasks may raise anything
            return {call.task_id: f'{exc!r:.300}'}
        return {}
