"""Groups and the headers of chords are published in few requests.

`group.apply_async` publishes its tasks one by one, through one producer. This module gives it a producer that collects
the messages, if the broker is CouchDB. Celery calls the same method for the header of a chord and for `chunks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from celery import canvas
from celery.app import amqp
from celery.canvas import Signature, group

from kombu_couchdb.errors import ConfigurationError, CouchDBError
from kombu_couchdb.transport import CollectingProducer, Transport

from . import chord_headers

__all__ = ['install']

#: Celery's own method.
_apply_one_by_one = group._apply_tasks

#: Set by Celery 5.7 while a worker publishes the next tasks of one that has ended. Celery then retries each message.
_is_next_task = getattr(amqp, '_callback_publish_retry', None)


def _apply_tasks(
    self: group, tasks: Iterable[Any], producer: Any = None, app: Any = None, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    """Publish the tasks of a group and yield their results. All tasks are stored when the iterator is exhausted.

    *Raises* the errors of publishing one task. If a task cannot be published, those that are not stored yet are
    dropped.
    """
    app = app or self.app
    if kwargs.get('chord') is not None:
        if isinstance(self.tasks, list):
            _check(app, self.tasks, kwargs)
        else:  # a generator, which must not be exhausted
            tasks = _checked(tasks, app, kwargs)
    with app.producer_or_acquire(producer) as own:
        if isinstance(own, CollectingProducer) or not isinstance(own.connection.transport, Transport):
            yield from _apply_one_by_one(self, tasks, own, app, *args, **kwargs)
            return
        retries = app.conf.task_publish_retry if kwargs.get('retry') is None else kwargs['retry']
        collecting = CollectingProducer(own, always_retry=bool(retries and _is_next_task and _is_next_task.get()))
        results = _apply_one_by_one(self, _bound(tasks, collecting), collecting, app, *args, **kwargs)
        yield from results
        with own.connection._reraise_as_library_errors():
            collecting.flush()


def _checked(tasks: Iterable[Any], app: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Yield the tasks of a chord's header, each after `_check`."""
    for task in tasks:
        _check(app, task[:1], options)
        yield task


def _check(app: Any, tasks: Iterable[Any], options: dict[str, Any]) -> None:
    """Check tasks of a chord's header. If they are refused, delete the chord, which Celery has stored before."""
    try:
        chord_headers.check(app, tasks, options)
    except ConfigurationError:
        if drop := getattr(app.backend, 'drop_chord', None):  # not with the backend of another database
            with suppress(CouchDBError):  # it expires
                drop(options['group_id'])
        raise


def _bound(tasks: Iterable[Any], producer: CollectingProducer) -> Iterator[Any]:
    """Yield the tasks of a group. Those that are chains publish their first task through `producer`."""
    for task in tasks:
        first = task[0]
        while isinstance(first, canvas._chain) and first.tasks:
            first = first.tasks[0]
        # A chain does not pass its own producer on. It is a copy that Celery made for this call.
        if first is not task[0] and isinstance(first, Signature) and not isinstance(first, (group, canvas._chord)):
            first.options['producer'] = producer
        yield task


def install() -> None:
    """Replace Celery's method. The result backend calls this when it is imported."""
    group._apply_tasks = _apply_tasks
