"""Which tasks a publisher of parcels may ask for: those that are listed, in queues of the app; the same goes for what follows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

__all__ = ['Accept']

#: Celery's own tasks that only hold others, which are looked at.
_HOLDERS = frozenset({'celery.chain', 'celery.chord', 'celery.chunks', 'celery.group', 'celery.map', 'celery.starmap'})

#: The options of a signature that say where it goes.
_PLACES = ('exchange', 'queue', 'routing_key')


class Accept:
    """What is accepted: tasks by name or pattern, and queues by name."""

    def __init__(self, tasks: Sequence[str], queues: Collection[str]) -> None:
        self._tasks, self._queues = tasks, queues

    def refusal(self, task: Any, args: Any, embedded: Any) -> str | None:
        """Return in one sentence why a task is not accepted with what follows it, or None if it is."""
        if not self._is_listed(task):
            return _unlisted(task)
        # The arguments of a task are its own affair, but those of one that holds others are tasks.
        for signature in _signatures([embedded, args if task in _HOLDERS else None]):
            if not isinstance(signature['task'], dict) and not self._is_listed(signature['task']):
                return _unlisted(signature['task'])
            options = signature.get('options')
            for name in _PLACES:
                place = options.get(name) if isinstance(options, dict) else None
                if place and (reason := self.wrong_queue(place)):
                    return reason
        return None

    def wrong_queue(self, queue: Any) -> str | None:
        """Return in one sentence why a queue is not accepted, or None if it is."""
        if isinstance(queue, str) and queue in self._queues:
            return None
        return f'queue {queue!r:.80} is not in task_queues of the app that moves parcels'

    def _is_listed(self, task: Any) -> bool:
        return isinstance(task, str) and (task in _HOLDERS or any(fnmatchcase(task, pattern) for pattern in self._tasks))


def _unlisted(task: Any) -> str:
    return f'task {task!r:.200} is not in parcels_accept'


def _signatures(value: Any) -> Iterator[dict[str, Any]]:
    """Yield everything that could be a signature, however deep it is nested; of `celery.map` also what has one as its `task`."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            if 'task' in one:
                yield one
            left += one.values()
        elif isinstance(one, (list, tuple)):
            left += one
