"""Rules for accepting parcels: allowed tasks and queues, also in callbacks, chains and chords.

A message contains the signatures of the tasks that follow its task. Celery would also accept the mere name of a task as
a signature, and some of its tasks run other tasks (`celery.map`, for example). So signatures are accepted only in
exactly the form in which Celery writes callbacks, chains, groups and chords.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from kombu_couchdb.documents import region

from .inherited import PARCEL

__all__ = ['RESERVED', 'Accept']

#: Headers that a publisher may not set: they say where a result goes. Celery's requests have a member `headers` with
#: those that are not Celery's own: if a message has this header, the others are found in it, and a retry sends them.
RESERVED = (PARCEL, region.FROM_REGION, 'headers')

#: Options of a signature that choose its queue.
_DESTINATIONS = ('exchange', 'queue', 'routing_key')

#: Options of a signature that contain signatures.
_LINKS = ('chord', 'link', 'link_error')

#: Members of a message's body that contain signatures.
_EMBEDDED = ('callbacks', 'chain', 'chord', 'errbacks')

#: Signatures that contain others: for each type the name of the task, and the arguments with signatures.
_COMPOSITES = {
    'chain': ('celery.chain', ('tasks',)),
    'group': ('celery.group', ('tasks',)),
    'chord': ('celery.chord', ('header', 'body')),
}


class _Malformed(Exception):
    """A value is not a signature."""


class Accept:
    """The accepted tasks, as names or patterns, and the accepted queues, as names."""

    def __init__(self, tasks: Sequence[str], queues: Collection[str]) -> None:
        self._tasks, self._queues = tasks, queues

    def refusal(self, task: Any, embedded: Any) -> str | None:
        """Return one sentence that says why a task, or a task that follows it, is not accepted; None if all are.

        `embedded` is the third part of a task's body: callbacks, errbacks, chain and chord.
        """
        if not self._is_listed(task):
            return _not_listed(task)
        try:
            for signature in _signatures(embedded):
                if not signature.get('subtask_type') and not self._is_listed(signature.get('task')):
                    return _not_listed(signature.get('task'))
                if _is_redirected(signature.get('options') or {}):
                    return 'its callbacks, chain or chord name a region or a parcel'
                for destination in filter(None, map((signature.get('options') or {}).get, _DESTINATIONS)):
                    if reason := self.wrong_queue(destination):
                        return reason
        except _Malformed:
            return 'its callbacks, chain or chord are not written as Celery writes them'
        return None

    def wrong_queue(self, queue: Any) -> str | None:
        """Return one sentence that says why a queue is not accepted; None if it is."""
        if isinstance(queue, str) and queue in self._queues:
            return None
        return f'queue {queue!r:.80} is not in task_queues of the app that moves parcels'

    def _is_listed(self, task: Any) -> bool:
        return isinstance(task, str) and any(fnmatchcase(task, pattern) for pattern in self._tasks)


def _is_redirected(options: dict[str, Any]) -> bool:
    """Tell whether a signature says in which region its task runs, or where the result goes."""
    headers = options.get('headers') or {}
    if not isinstance(headers, dict):
        raise _Malformed
    named, _ = region.route({'properties': options, 'headers': headers})
    return named is not None or not headers.keys().isdisjoint(RESERVED)


def _not_listed(task: Any) -> str:
    return f'task {task!r:.200} is not in parcels_accept'


def _signatures(embedded: Any) -> Iterator[dict[str, Any]]:
    """Yield all signatures at any depth; *raises* `_Malformed` for a value that is not a signature."""
    if embedded is None:
        return
    if not isinstance(embedded, dict):
        raise _Malformed
    pending = [embedded.get(name) for name in _EMBEDDED]  # a list, because nesting must not exhaust Python's stack
    while pending:
        signature = pending.pop()
        if signature is None:
            continue
        if isinstance(signature, (list, tuple)):
            pending += signature
            continue
        if not isinstance(signature, dict) or not isinstance(options := signature.get('options') or {}, dict):
            raise _Malformed
        yield signature
        pending += [options.get(name) for name in _LINKS]
        if kind := signature.get('subtask_type'):
            task, names = _COMPOSITES.get(kind, (None, ())) if isinstance(kind, str) else (None, ())
            kwargs = signature.get('kwargs')
            if task is None or signature.get('task') != task or signature.get('args') or not isinstance(kwargs, dict):
                raise _Malformed
            pending += [kwargs.get(name) for name in names]
