"""A scene: an app and a worker of one configuration, in which scenarios run, and the outcome of a scenario."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from celery.result import AsyncResult, GroupResult

from tests.patience import PATIENCE

from .canvas import CANVAS, ENDLESS
from .results import RESULTS, attempt
from .tasks import Tasks
from .values import EXCEPTIONS, VALUES, shown

__all__ = ['CONFIGURATIONS', 'SCENARIOS', 'Scene']

#: The settings of the workers, by the serializer of arguments and results.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    name: {
        'task_serializer': name,
        'result_serializer': name,
        'accept_content': ['json', name],
        'result_extended': name == 'json',  # as in README
        'worker_send_task_events': False,
    }
    for name in ('json', 'pickle', 'yaml')
}

#: What differs from run to run, and what replaces it.
_CHANGING = [(r'Job: \d+', 'Job: N'), (r'\bat 0x[0-9a-f]+', 'at 0x'), (r'celery_test_worker@\w+', 'worker')]
_ID = re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')


class Scene(Tasks):
    """The tasks of an app with a worker, and the file in which they write notes."""

    def notes(self) -> list[str]:
        """Return what the tasks have noted."""
        return sorted(self.app.notes.read_text().splitlines())

    def say(self, line: str) -> None:
        """Note a line for which a task waits."""
        with self.app.notes.open('a') as file:
            file.write(line + '\n')

    def start(self, name: str) -> Any:
        """Run a scenario and return its outcome, or the function that reads it."""
        return SCENARIOS[name](self)

    def outcome(self, started: Any, expected: Sequence[Any] = (), patience: float = 7.0) -> Any:
        """Return the outcome of a scenario: one that is expected, or one that stays for `patience` seconds.

        `get()` returns before all errbacks have run, and before all members of a group have ended. After the loss of a
        process, its pool starts another one up to five seconds later, and an errback may wait for that.
        """
        if not callable(started):
            return _normal(started)
        seen, since = None, 0.0
        while (now := _normal(started())) not in expected and (now != seen or time.monotonic() < since + patience):
            if now != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.02)
        return now


def _normal(outcome: Any) -> Any:
    """Return the outcome as JSON, with short names in the place of ids."""
    text = json.dumps(outcome, default=str)
    for pattern, replacement in _CHANGING:
        text = re.sub(pattern, replacement, text)
    names: dict[str, str] = {}
    return json.loads(_ID.sub(lambda found: names.setdefault(found[0], f'id{len(names) + 1}'), text))


def _canvas(make: Callable[[Any], Any], scene: Scene, *, ends: bool) -> Callable[[], Any]:
    """Send a signature, and return a function that reads the outcome."""
    sent: list[Any] = []
    error = attempt(lambda: sent.append(make(scene).apply_async()))
    if not sent:
        return lambda: error
    [result] = sent
    got = attempt(result.get, timeout=PATIENCE) if ends and result is not None else None
    return lambda: {'get': got, 'results': list(_lines(result, set())), 'notes': scene.notes()}


def _lines(result: Any, seen: set[str]) -> Iterator[str]:
    """Return a line for each result to which one leads: parents first, then itself, then children."""
    if result is None or result.id in seen:
        return
    seen.add(result.id)
    yield from _lines(result.parent, seen)
    below = result.results if isinstance(result, GroupResult) else (result.children or [])
    about = 'group' if isinstance(result, GroupResult) else f'{result.state} {shown(result.result)}'
    yield f'{result.id} {about}' + (f' > {" ".join(child.id for child in below)}' if below else '')
    for child in below:
        yield from _lines(child, seen)


def _sent(send: Callable[..., Any], argument: Any) -> Callable[[], str]:
    """Send a task, and return a function that waits for it and returns what it returns or raises."""
    sent: list[Any] = []
    error = attempt(lambda: sent.append(send(argument)))
    return lambda: attempt(sent[0].get, timeout=PATIENCE) if sent else error


def _value(kind: str, scene: Scene) -> Callable[[], Any]:
    """Read what comes back of a value that a task returns, and of one that is also sent to it."""
    value, same = _sent(scene.value.delay, kind), _sent(scene.same.delay, VALUES[kind])

    def read() -> Any:
        returned, sent = value(), same()
        return [returned, 'the same' if sent == returned else sent]

    return read


def _exception(kind: str, scene: Scene) -> Callable[[], Any]:
    result = scene.throw.delay(kind)

    def read() -> Any:
        raised = attempt(result.get, timeout=PATIENCE)
        fresh = AsyncResult(result.id, app=scene.app)
        stored = f'raises {shown(fresh.result)}'
        return [
            raised,
            'the same' if stored == raised else stored,
            fresh.state,
            (fresh.traceback or '').count('\n') > 1,
        ]

    return read


SCENARIOS: dict[str, Callable[[Scene], Any]] = {
    **{f'canvas: {name}': partial(_canvas, make, ends=True) for name, make in CANVAS.items()},
    **{f'canvas: {name}': partial(_canvas, make, ends=False) for name, make in ENDLESS.items()},
    **{f'results: {name}': function for name, function in RESULTS.items()},
    **{f'value: {name}': partial(_value, name) for name in VALUES},
    **{f'exception: {name}': partial(_exception, name) for name in EXCEPTIONS},
}
