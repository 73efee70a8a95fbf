"""Waiting for jobs: one changes feed for all of them, and no polling."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from ..couchdb.changes import Longpoll
from ..couchdb.client import Client, Document
from ..documents import workitem
from .jobs import ENDED, find_all, state_of

__all__ = ['watch', 'watch_all']

#: How long `watch` waits for a change before it reads the jobs again, in case that no change announces a new state.
_MAX_WAIT_SECONDS = 300.0


def watch(client: Client, task_id: str, timeout: float | None = None) -> Iterator[str]:
    """Yield the state of a job, then each new state, until the job is `done` or `gone`. It does not poll.

    *Raises* `TimeoutError` if the job has not ended after `timeout` seconds (None means no limit), and the errors of
    `Client`.
    """
    return (state for _, state in watch_all(client, [task_id], timeout))


def watch_all(client: Client, task_ids: Collection[str], timeout: float | None = None) -> Iterator[tuple[str, str]]:
    """Yield `(task_id, state)` for each job, then for each new state, until all are `done` or `gone`.

    All jobs share one changes feed, and only those that have changed are read again. *Raises* as `watch`.
    """
    deadline = float('inf') if timeout is None else time.monotonic() + timeout
    longpoll, last = Longpoll(client), dict[str, str]()
    docs: dict[str, list[Document]] = {}
    changed, since = list(dict.fromkeys(task_ids)), client.sequence()
    while True:
        turn = longpoll.generation
        docs.update(find_all(client, changed))
        now = client.clock.now()
        for name in list(docs):
            state = state_of(docs[name], now)
            if state in ENDED:
                del docs[name]
            if state != last.get(name):
                last[name] = state
                yield name, state
        if not docs:
            return
        if deadline <= time.monotonic():
            name = next(iter(docs))
            others = f', and {len(docs) - 1} more have not ended' if len(docs) > 1 else ''
            raise TimeoutError(f'job {name} is still {last[name]}{others}')
        waiting = [doc for found in docs.values() for doc in found]
        # The document of a scheduled job does not change when the job becomes due.
        due = [float(doc['date']) - now for doc in waiting if workitem.state(doc, now) == 'scheduled']
        left = min(deadline - time.monotonic(), *due, _MAX_WAIT_SECONDS)
        changes = _wait(longpoll, turn, since, sorted({doc['_id'] for doc in waiting}), max(left, 0.01))
        if changes is None:
            changed, since = list(docs), client.sequence()
        else:
            ids, since = {row['id'] for row in changes['results']}, changes['last_seq']
            changed = [name for name, found in docs.items() if any(doc['_id'] in ids for doc in found)]


def _wait(longpoll: Longpoll, turn: int, since: object, ids: list[str], seconds: float) -> dict[str, Any] | None:
    """Return the changes of these documents, or None after `seconds`."""
    timer = threading.Timer(seconds, longpoll.interrupt)
    timer.daemon = True
    timer.start()
    try:
        return longpoll.wait(turn, since, {'doc_ids': ids}, docs=False)
    finally:
        timer.cancel()
