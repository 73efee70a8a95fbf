"""Publishing of many tasks: groups and the headers of chords in few requests, next tasks together with results.

`group._apply_tasks` publishes the tasks of a group one by one, through one producer. If the broker is CouchDB, this
module gives it a producer that collects the messages. Celery calls that method for the header of a chord and for
`chunks`, too.

In a fresh process the first group makes the first connection, which installs this module. A method that is running
cannot be replaced. So this module replaces the function that it calls next, `itertools.tee`: the tasks in the iterator
that the method gets from there are published when the method takes them.

Optional rooms check the tasks in the header of a chord, at any depth: headers stay in one region.

Next tasks are what a worker publishes when a task has ended: callbacks, and the next step of a chain. Celery 5.7
publishes them through one method. With this module the backend gets these messages: they are handed over together with
the result of the task, and the worker's process stores all of them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from celery import canvas
from celery.app import amqp
from celery.app.amqp import AMQP
from celery.canvas import Signature, group, maybe_signature

from kombu_couchdb.errors import ConfigurationError, CouchDBError
from kombu_couchdb.transport import CollectingProducer, Transport, taken_by

from ..rooms import rooms

#: The other parameters of `group._apply_tasks`, except the barrier, to which Celery's method adds the results. Older
#: versions have no `group_index`.
_PASSED_ON = ('add_to_parent', 'chord', 'args', 'kwargs', 'group_index')

#: How long a task from a generator is collected: the generator may take long to yield the next one.
_GENERATOR_SECONDS = 0.1

#: Set by Celery 5.7 while a worker publishes the next tasks of one that has ended. Celery then retries each message.
_is_next_task = getattr(amqp, '_callback_publish_retry', None)

#: Celery's method for next tasks; older versions have none, and a task there waits until its next tasks are stored.
_publish_next = getattr(AMQP, '_retry_publish', None)


class _Published:
    """Takes the place of a task that is published already. It has what `group._apply_tasks` uses of a signature."""

    options: dict[str, Any] = {}

    def apply_async(self, **options: Any) -> None:
        """Do nothing."""

    def __len__(self) -> int:
        return 0  # the number of its tasks in a chord, which are counted already


class _Itertools:
    """The module `itertools` for `celery.canvas`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(itertools, name)

    def tee(self, tasks: Iterable[Any], n: int = 2) -> tuple[Iterator[Any], ...]:
        """Return `n` iterators over `tasks`; for `group._apply_tasks`, iterators that publish the tasks."""
        caller = sys._getframe(1)
        given = caller.f_locals
        if (
            caller.f_code.co_name != '_apply_tasks'
            or isinstance(given['producer'], CollectingProducer)
            or not isinstance(given['producer'].connection.transport, Transport)
        ):
            return itertools.tee(tasks, n)
        results = _apply_tasks(
            given['self'],
            tasks,
            given['producer'],
            given['app'],
            given['options'],
            **{name: given[name] for name in _PASSED_ON if name in given},
        )
        published = _Published()
        # The method looks one task ahead to find the end, where it stores the size of a chord: that is done already.
        return itertools.repeat(published), ((published, result, None) for result in results)


def _apply_tasks(
    self: group, tasks: Iterable[Any], producer: Any, app: Any, options: dict[str, Any], **arguments: Any
) -> Iterator[Any]:
    """Publish the tasks of a group and yield their results. All tasks are stored when the iterator is exhausted.

    A task from a generator is stored within 100 ms, also while the generator does not yield another one.

    *Raises* the errors of publishing one task. If a task cannot be published, those that are not stored yet are
    dropped.
    """
    is_generator = isinstance(self.tasks, canvas._regen)
    if arguments['chord'] is not None:
        if is_generator:  # which must not be exhausted
            tasks = _checked(tasks, app, options)
        else:
            _check(app, self.tasks, options)
    retries = app.conf.task_publish_retry if options.get('retry') is None else options['retry']
    collecting = CollectingProducer(
        producer,
        always_retry=bool(retries and _is_next_task and _is_next_task.get()),
        max_seconds=_GENERATOR_SECONDS if is_generator else None,
    )
    try:
        yield from self._apply_tasks(_bound(tasks, collecting), collecting, app, None, **arguments, **options)
        with producer.connection._reraise_as_library_errors():
            collecting.flush()
    finally:
        collecting.discard()


def _checked(tasks: Iterable[Any], app: Any, options: dict[str, Any]) -> Iterator[Any]:
    """Yield the tasks of a chord's header, each after `_check`."""
    for task in tasks:
        _check(app, task[:1], options)
        yield task


def _check(app: Any, tasks: Iterable[Any], options: dict[str, Any]) -> None:
    """Check tasks of a chord's header. If they are refused, delete the chord, which Celery has stored before."""
    try:
        for room in rooms():
            room.check_header(app, _steps(tasks, app), options)
    except ConfigurationError:
        if drop := getattr(app.backend, 'drop_chord', None):  # not with the backend of another database
            with suppress(CouchDBError):  # it expires
                drop(options['group_id'])
        raise


def _steps(tasks: Iterable[Any], app: Any) -> Iterator[Signature]:
    """Yield all tasks in signatures, at any depth."""
    pending = list(tasks)  # a list, because nesting must not exhaust Python's stack
    while pending:
        found = maybe_signature(pending.pop(), app=app)
        if isinstance(found, (canvas._chain, canvas.group)):
            pending += found.tasks
        elif isinstance(found, canvas._chord):
            pending += [found.tasks, found.body]
        elif isinstance(found, Signature):
            yield found


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


def _retry_publish(self: Any, publish: Any, *args: Any, **kwargs: Any) -> Any:
    """Publish callbacks or the next step of a chain."""
    assert _publish_next is not None
    with taken_by(getattr(getattr(self.app.backend, 'handover', None), 'take_next_tasks', None)):
        return _publish_next(self, publish, *args, **kwargs)


def install() -> None:
    """Replace `itertools` in `celery.canvas`, and Celery's method for next tasks."""
    if not isinstance(canvas.itertools, _Itertools):
        canvas.itertools = _Itertools()
    if _publish_next is not None:
        AMQP._retry_publish = _retry_publish
