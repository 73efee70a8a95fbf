"""Jobs by task id: find them, read their states, wait for changes, remove them.

The states are

* `pending`: a worker can claim it now;
* `scheduled`: it waits for its due date;
* `running`: a worker has claimed it, and runs it or has prefetched it;
* `dead`: it is a dead letter;
* `gone`: it is acknowledged, expired or removed, or never existed.

A task has several items if it was published to several queues, or if a retry is waiting. Its state is then the one that
comes first in `STATES`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from .. import design
from ..couchdb.changes import Longpoll
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import exactly, members, number
from ..design.rows import QueueCount
from ..documents import workitem
from ..errors import ConfigurationError, NotFound
from ..queues.store import Store

__all__ = ['STATES', 'Removal', 'complete', 'find', 'listing', 'remove', 'state', 'watch']

STATES = ('running', 'pending', 'scheduled', 'dead', 'gone')

#: The shape of a row of `waiting`, grouped by queue. The key of a malformed item can be anything.
_BY_QUEUE = members(key=exactly(lambda name: True), value=number)

#: How many tasks, and how many documents, `complete` reads at most.
_MAX_CANDIDATES = 200

#: How long `watch` waits for a change before it reads the job again, in case that no change announces the new state.
_MAX_WAIT_SECONDS = 300.0


class Removal(NamedTuple):
    """The result of `remove`: the items of the job, by what was done with them."""

    #: The deleted items.
    removed: list[Document]
    #: The items that a worker holds. They were not changed.
    running: list[Document]
    #: The dead letters. They were not changed.
    dead: list[Document]


def find(client: Client, name: str) -> list[Document]:
    """Return the items of the task with the id `name`, or the item with this document id.

    A running unique job stores later messages with its key in its own document. Each is returned as the separate item
    that it becomes when the job ends, with `behind: True`. The request first brings the index up to date, which may
    take long after many changes. *Raises* `ConfigurationError` if the design document of the index is missing.
    """
    try:
        rows = client.view(design.JOBS, 'by_task', key=name, include_docs=True)
    except NotFound as exc:
        raise ConfigurationError(
            f'{client.address.url} lacks the design document {design.JOBS}; let an administrator run '
            f'"celery -A your_app couchdb setup"'
        ) from exc
    docs = {row['id']: row['doc'] for row in rows if row.get('doc')}
    if docs:
        now = client.clock.now()
        return [item for doc in docs.values() for item in _items(doc, now) if workitem.task_id(item) == name]
    doc = client.get_or_none(name)
    return [doc] if doc and doc.get('type') == 'WorkItem' else []


def complete(client: Client, start: str, *, dead: bool = False) -> list[str]:
    """Return the ids that begin with `start`, sorted: ids of tasks, and ids of documents if only these match.

    With `dead`, only dead letters count. At most 200 tasks and 200 documents are read, so the list may be incomplete.
    """
    rows = client.view(
        design.JOBS, 'by_task', startkey=start, endkey=start + '\ufff0', include_docs=True, limit=_MAX_CANDIDATES
    )
    docs = [row['doc'] for row in [*rows, *client.id_range(start, docs=True, limit=_MAX_CANDIDATES)] if row.get('doc')]
    now = client.clock.now()
    names = {
        name if (name := workitem.task_id(item) or '').startswith(start) else item['_id']
        for doc in docs
        if doc.get('type') == 'WorkItem' and (doc.get('status') or not dead)
        for item in _items(doc, now)
    }
    return sorted(name for name in names if name.startswith(start))


def _items(doc: Document, now: float) -> Iterator[Document]:
    """Yield an item, and for each message that waits behind it, the separate item that it becomes."""
    yield doc
    while doc.get('next'):
        doc = {**workitem.acked(doc, now), 'behind': True}
        if doc.get('_deleted'):
            return
        yield doc


def state(client: Client, task_id: str) -> str:
    """Return the state of a job, see `STATES`. One request, or two if no task has this id."""
    return _state(client, find(client, task_id))


def _state(client: Client, docs: list[Document]) -> str:
    now = client.clock.now()
    return min((workitem.state(doc, now) for doc in docs), key=STATES.index, default='gone')


def watch(client: Client, task_id: str, timeout: float | None = None) -> Iterator[str]:
    """Yield the state of a job, then each new state, until the job is `gone`. It does not poll.

    *Raises* `TimeoutError` if the job is not gone after `timeout` seconds (None means no limit), and the errors of
    `Client`.
    """
    deadline = float('inf') if timeout is None else time.monotonic() + timeout
    longpoll, last = Longpoll(client), ''
    while True:
        turn, since, now = longpoll.generation, client.sequence(), client.clock.now()
        docs = find(client, task_id)
        found = _state(client, docs)
        if found != last:
            yield found
            last = found
        if found == 'gone':
            return
        # The document of a scheduled job does not change when the job becomes due.
        due = [float(doc['date']) - now for doc in docs if workitem.state(doc, now) == 'scheduled']
        left = min(deadline - time.monotonic(), *due, _MAX_WAIT_SECONDS)
        if deadline <= time.monotonic():
            raise TimeoutError(f'job {task_id} is still {found}')
        _wait(longpoll, turn, since, sorted({doc['_id'] for doc in docs}), max(left, 0.01))


def _wait(longpoll: Longpoll, turn: int, since: object, ids: list[str], seconds: float) -> None:
    timer = threading.Timer(seconds, longpoll.interrupt)
    timer.daemon = True
    timer.start()
    try:
        longpoll.wait(turn, since, {'doc_ids': ids}, docs=False)
    finally:
        timer.cancel()


def remove(client: Client, task_id: str) -> Removal:
    """Delete the pending and scheduled items of a job for good. Running items and dead letters are not changed."""
    removed: list[Document] = []
    while True:
        docs = find(client, task_id)
        waiting = [doc for doc in docs if workitem.is_waiting(doc)]
        if not waiting:
            dead = [doc for doc in docs if doc.get('status')]
            return Removal(removed, [doc for doc in docs if workitem.claimant(doc) and not doc.get('status')], dead)
        for doc in waiting:
            after = _without(client, doc) if doc.get('behind') else workitem.acked(doc, client.clock.now())
            if after is None or client.bulk([after])[0].is_stored:
                removed.append(doc)
            # Otherwise a worker has claimed it, or somebody has changed it: the loop reads it again.


def _without(client: Client, doc: Document) -> Document | None:
    """Return the running unique job without the message `doc` that waits behind it; None if none waits any more."""
    found = client.fetch([doc['_id']])[0]
    if found is None or not isinstance(found.get('next'), list):
        return None
    rest = [message for message in found['next'] if workitem.task_id(message) != workitem.task_id(doc)]
    return {**{name: value for name, value in found.items() if name != 'next'}, **({'next': rest} if rest else {})}


def listing(client: Client, states: tuple[str, ...], queue: str | None, limit: int) -> list[Document]:
    """Return up to `limit` items in one of the `states`, of one queue, or of all queues if `queue` is None.

    Running items come first, then pending, scheduled and dead ones; pending items in the order in which workers claim
    them.
    """
    found: list[Document] = []
    now, store = client.clock.now(), Store(client)
    with_docs = {'include_docs': True, 'reduce': False}
    queues = (
        [queue]
        if queue
        else [
            name
            for row in client.view(design.NAME, 'waiting', _BY_QUEUE, group_level=1)
            if (name := QueueCount.of(row).queue) is not None
        ]
    )
    if 'running' in states:
        found += _rows(client, 'leases', startkey=['claim'], endkey=['claim', LAST], **with_docs)
    for name in queues:
        if 'pending' in states:
            found += [row.doc for row in store.ready(name, limit) if row.doc]
        if 'scheduled' in states:
            found += store.planned([name], limit)
    if 'dead' in states:
        where = design.rows_of(queue) if queue else {}
        found += _rows(client, 'dead', limit=limit, **where, **with_docs)
    return [doc for doc in found if workitem.state(doc, now) in states and (not queue or doc.get('queue') == queue)][
        :limit
    ]


def _rows(client: Client, view: str, **where: Any) -> list[Document]:
    return [row['doc'] for row in client.view(design.NAME, view, **where) if row.get('doc')]
