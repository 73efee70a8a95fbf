"""Sends tasks for due dates, many in one request, and each only once however often it is repeated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from celery.beat import BeatLazyFunc
from kombu.exceptions import OperationalError

from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.errors import RETRIED, CouchDBError
from kombu_couchdb.transport import CollectingProducer

from .entries import Entry


class DueCall(NamedTuple):
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

    def send(self, calls: Sequence[DueCall], seconds: float) -> list[str | None]:
        """Send tasks for about `seconds`, and at least one of them.

        Return for each task, of the first ones, why it can never be sent, or None if it was. *Raises* the errors of the
        client; then some of the tasks may have been sent. Call it again with the same tasks.
        """
        if self._producer is None:
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        with idempotent('beat'):
            producer, until = CollectingProducer(self._producer), time.monotonic() + seconds
            try:
                errors = self._send_until(calls, producer, until, CouchDBError)
                producer.flush()
                return errors
            except RETRIED:
                raise
            except CouchDBError:  # CouchDB refuses one of the messages: find out which
                return self._send_until(calls, self._producer, time.monotonic() + seconds, RETRIED)

    def _send_until(self, calls: Sequence[DueCall], producer: Any, until: float, raised: Any) -> list[str | None]:
        errors: list[str | None] = []
        for call in calls:
            errors.append(self._try(call, producer, raised))
            if time.monotonic() >= until:
                break
        return errors

    def _try(self, call: DueCall, producer: Any, raised: Any) -> str | None:
        """Send one task and return an error that concerns it alone; raise the errors in `raised`."""
        try:
            # The caller repeats what fails: a retry here could outlast the lease.
            send(self._app, call.entry, producer, task_id=call.task_id, retry=False)
        except raised:
            raise
        except OperationalError as exc:
            if isinstance(exc.__cause__, RETRIED):
                raise exc.__cause__ from exc
            return f'{exc!r:.300}'
        except CouchDBError as exc:
            return str(exc)
        except Exception as exc:  # queues, serializers, signals and classes of tasks may raise anything
            return f'{exc!r:.300}'
        return None
