"""The rules by which parcels are accepted: listed tasks, in queues of the app, also for callbacks, chains and chords.

What follows a task is written as signatures. Celery also takes the mere name of a task for one, and has tasks that run others
(`celery.map`, for example); so what is not written exactly as Celery writes callbacks, chains, groups and chords is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

__all__ = ['Accept']

#: The options of a signature that say where it goes, and those that are signatures themselves.
_PLACES, _FOLLOWING = ('exchange', 'queue', 'routing_key'), ('chord', 'link', 'link_error')

#: What follows a task, in its message.
_EMBEDDED = ('callbacks', 'chain', 'chord', 'errbacks')

#: Signatures that hold others: their tasks, by type, and the arguments that are signatures.
_HOLDERS = {
    'chain': ('celery.chain', ('tasks',)),
    'group': ('celery.group', ('tasks',)),
    'chord': ('celery.chord', ('header', 'body')),
}


class _Malformed(Exception):
    """Something is no signature."""


class Accept:
    """What is accepted: tasks by name or pattern, and queues by name."""

    def __init__(self, tasks: Sequence[str], queues: Collection[str]) -> None:
        self._tasks, self._queues = tasks, queues

    def refusal(self, task: Any, embedded: Any) -> str | None:
        """Return in one sentence why a task is not accepted with what follows it, or None if it is."""
        if not self._is_listed(task):
            return _unlisted(task)
        try:
            for signature in _signatures(embedded):
                if not signature.get('subtask_type') and not self._is_listed(signature.get('task')):
                    return _unlisted(signature.get('task'))
                for place in filter(None, map((signature.get('options') or {}).get, _PLACES)):
                    if reason := self.wrong_queue(place):
                        return reason
        except _Malformed:
            return 'what follows its task is not written as callbacks, chains, groups and chords are'
        return None

    def wrong_queue(self, queue: Any) -> str | None:
        """Return in one sentence why a queue is not accepted, or None if it is."""
        if isinstance(queue, str) and queue in self._queues:
            return None
        return f'queue {queue!r:.80} is not in task_queues of the app that moves parcels'

    def _is_listed(self, task: Any) -> bool:
        return isinstance(task, str) and any(fnmatchcase(task, pattern) for pattern in self._tasks)


def _unlisted(task: Any) -> str:
    return f'task {task!r:.200} is not in parcels_accept'


def _signatures(embedded: Any) -> Iterator[dict[str, Any]]:
    """Yield all signatures, however deep they are nested; *raises* `_Malformed` for anything else in their places."""
    if embedded is None:
        return
    if not isinstance(embedded, dict):
        raise _Malformed
    left = [embedded.get(name) for name in _EMBEDDED]
    while left:
        one = left.pop()
        if one is None:
            continue
        if isinstance(one, (list, tuple)):
            left += one
            continue
        if not isinstance(one, dict) or not isinstance(options := one.get('options') or {}, dict):
            raise _Malformed
        yield one
        left += [options.get(name) for name in _FOLLOWING]
        if kind := one.get('subtask_type'):
            task, names = _HOLDERS.get(kind, (None, ())) if isinstance(kind, str) else (None, ())
            kwargs = one.get('kwargs')
            if task is None or one.get('task') != task or one.get('args') or not isinstance(kwargs, dict):
                raise _Malformed
            left += [kwargs.get(name) for name in names]
