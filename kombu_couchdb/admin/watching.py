"""Waiting for jobs: one changes feed for all of them, and no polling."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

from ..couchdb.changes import Follower
from ..couchdb.client import Client, Document
from ..documents import workitem
from .jobs import ENDED, find_all, state_of

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
    follower, last = Follower(client, 'kombu-couchdb-watch'), dict[str, str]()
    docs: dict[str, list[Document]] = {}
    changed, since = list(dict.fromkeys(task_ids)), client.sequence()
    try:
        while True:
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
            follower.follow(since, doc_ids=sorted({doc['_id'] for doc in waiting}))
            # The document of a scheduled job does not change when the job becomes due.
            due = [float(doc['date']) - now for doc in waiting if workitem.state(doc, now) == 'scheduled']
            changes = follower.take(max(min(deadline - time.monotonic(), *due, _MAX_WAIT_SECONDS), 0.01))
            if changes is None or changes.last is None:
                changed, since = list(docs), client.sequence()
            else:
                ids, since = set(changes.ids), changes.last
                changed = [name for name, found in docs.items() if any(doc['_id'] in ids for doc in found)]
    finally:
        follower.close()
