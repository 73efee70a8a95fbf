"""The tasks that the scenarios send, and the app of publisher and worker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery, chain, chord, current_app, current_task, group, signals
from celery.exceptions import Ignore, Reject

from .values import EXCEPTIONS, VALUES

__all__ = ['App', 'Tasks', 'of_worker']

_TASKS: list[tuple[Callable[..., Any], dict[str, Any]]] = []


class Tasks:
    """The tasks of an app: `tasks.add` is the task `add`."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __getattr__(self, name: str) -> Any:
        return self.app.tasks[name]


class App(Celery):
    """An app with all tasks. `notes` is the file in which tasks write lines."""

    def __init__(self, environment: Any, notes: Path) -> None:
        super().__init__(
            'comparison',
            broker=environment['BROKER_URL'],
            backend=environment['RESULT_URL'],
            set_as_current=False,
        )
        self.conf.update(json.loads(environment['SETTINGS']))
        self.notes = notes
        for function, options in _TASKS:
            self.task(name=function.__name__, shared=False, **options)(function)


class _Process:
    """What `worker_process_init` has opened, as a connection to a database is; None in the worker's main process."""

    connection: str | None = None


def of_worker() -> App:
    """Return the app of a worker. The header `tenant` goes from a task to all that it publishes."""
    app = App(os.environ, Path(os.environ['NOTES']))
    app.set_current()

    @signals.before_task_publish.connect(weak=False)
    def hand_on(headers: dict[str, Any], **_: Any) -> None:
        if current_task and (tenant := (current_task.request.headers or {}).get('tenant')):
            headers.setdefault('tenant', tenant)

    @signals.worker_process_init.connect(weak=False)
    def connect(**_: Any) -> None:
        _Process.connection = 'open'

    return app


def _task(**options: Any) -> Any:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        _TASKS.append((function, options))
        return function

    return keep


@_task()
def add(x: Any, y: Any = 0) -> Any:
    """Return the sum."""
    return x + y


@_task()
def total(numbers: Any, start: int = 0) -> int:
    """Return the sum of numbers that are nested in lists."""
    return start + sum(total(each) if isinstance(each, list) else each for each in numbers)


@_task()
def same(*args: Any, **kwargs: Any) -> Any:
    """Return the one argument, or all arguments."""
    return args[0] if len(args) == 1 and not kwargs else [args, kwargs]


@_task(ignore_result=True)
def ignored(value: Any) -> Any:
    """Return the value, which is not stored."""
    return value


@_task()
def fail(*_: Any, text: str = 'no') -> None:
    """Fail."""
    raise ValueError(text)


@_task(bind=True, max_retries=2)
def again(self: Any, value: Any = None, times: int = 1, countdown: float = 0) -> list[Any]:
    """Retry so many times; then return the value and the number of retries."""
    if self.request.retries < times:
        raise self.retry(countdown=countdown, exc=ValueError('again'))
    return [value, self.request.retries]


@_task(bind=True)
def about(self: Any, *args: Any, fields: str) -> list[Any]:
    """Return members of the request."""
    request = {**vars(self.request), **(self.request.headers or {}), **self.request.delivery_info, 'args': args}
    return [request.get(field) for field in fields.split()]


@_task()
def ignores() -> None:
    """End without a result."""
    raise Ignore


@_task()
def rejects() -> None:
    """Refuse the message."""
    raise Reject('no', requeue=False)


@_task()
def value(kind: str) -> Any:
    """Return one of the values."""
    return VALUES[kind]


@_task()
def throw(kind: str) -> None:
    """Raise one of the exceptions."""
    try:
        exc = EXCEPTIONS[kind]()
    except ImportError as missing:
        exc = missing
    raise exc


@_task(bind=True, track_started=True)
def progress(self: Any, *states: str) -> str:
    """Set one state after the other; go on when the publisher has noted it."""
    for state in states:
        self.update_state(state=state, meta={'done': state})
        _wait(self.app, f'seen {state}')
    return 'end'


@_task(bind=True, track_started=True)
def waits(self: Any, value: Any = None) -> Any:
    """Return the value when the publisher has noted `go on`."""
    _wait(self.app, 'go on')
    return value


def _wait(app: App, line: str) -> None:
    while line not in app.notes.read_text().splitlines():
        time.sleep(0.02)


# -- notes


@_task(bind=True)
def note(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Note the arguments, and return the first one."""
    write(self.app, 'note', *args, *kwargs.items())
    return args[0] if args else None


@_task(bind=True)
def old(self: Any, task_id: str) -> None:
    """Note the call of an errback."""
    write(self.app, 'old', task_id)


@_task()
def new(request: Any, exc: Any, traceback: Any) -> None:
    """Note the call of an errback with three arguments."""
    write(current_app, 'new', request.id, request.task, repr(exc), request.args, isinstance(traceback, str))


@_task()
def new_in_process(request: Any, exc: Any, traceback: Any) -> None:
    """Note whether an errback has what `worker_process_init` opened."""
    write(current_app, 'connection', _Process.connection)


@_task()
def new_fails(request: Any, exc: Any, traceback: Any) -> None:
    """Fail as an errback."""
    write(current_app, 'new fails')
    raise KeyError('in the errback')


def write(app: App, *words: Any) -> None:
    """Append a line to the notes."""
    with app.notes.open('a') as file:
        file.write(' '.join(map(str, words)) + '\n')


# -- tasks that send others


@_task(bind=True)
def replace(self: Any, kind: str, *args: Any) -> Any:
    """Be replaced."""
    return self.replace(REPLACEMENTS[kind](Tasks(self.app), *args))


@_task(bind=True)
def grow(self: Any, number: int) -> int:
    """Add a task to the chord of which this one is a member."""
    self.add_to_chord(self.app.tasks['add'].s(number, 100))
    return number


@_task(bind=True)
def sends(self: Any, kind: str, *args: Any) -> Any:
    """Send tasks, and return the id of their result."""
    result = REPLACEMENTS[kind](Tasks(self.app), *args).apply_async()
    return result.id


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    'task': lambda t, *args: t.same.s(*args),
    'again': lambda t, *args: t.replace.s('task', *args),
    'chain': lambda t, x=1: chain(t.add.s(x, 1), t.add.s(10)),
    'group': lambda t, x=1: group(t.add.s(x, 1), t.add.s(x, 2)),
    'chain with group': lambda t, x=1: chain(t.add.s(x, 1), group(t.add.s(1), t.add.s(2))),
    'chord': lambda t, x=1: chord([t.add.s(x, 1), t.add.s(x, 2)], t.total.s()),
    'failing': lambda t, *args: t.fail.s(text='replaced'),
    'empty group': lambda t, *args: group([]),
    'empty chain': lambda t, *args: chain(),
    'note': lambda t, *args: t.note.si('sent'),
    'tenant': lambda t, *args: t.about.s(fields='tenant'),
    'tenant in chain': lambda t, *args: chain(t.same.s(1), t.about.s(fields='tenant')),
    'tenant in body': lambda t, *args: chord([t.same.s(1), t.same.s(2)], t.about.s(fields='tenant')),
    'tenant after chord': lambda t, *args: chain(
        group(t.same.s(1), t.same.s(2)), t.total.s(), t.about.s(fields='tenant')
    ),
}
