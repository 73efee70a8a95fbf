"""Jobs by the ids of their tasks: find them, say in what state they are, wait for a change of it, remove them.

The states are `pending` (can be taken now), `scheduled` (waits for its due date), `running` (a worker holds it: it runs, or
waits in that worker for its turn), `dead` (a dead letter) and `gone` (done, expired or removed, or never there). A task has
several items if it went to several queues, or is to be retried; it is then in the state that comes first in `STATES`.
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

#: A row of `waiting` by queue; that of a spoilt item may have anything for a name.
_BY_QUEUE = members(key=exactly(lambda name: True), value=number)

#: How many jobs are read to see whether the beginning of an id is that of one job only.
_CANDIDATES = 200

#: How long one wait for a change lasts at the most, in seconds: for what no change tells of.
_LONGEST = 300.0


class Removal(NamedTuple):
    """What became of a job that was to be removed."""

    #: The items that are deleted.
    removed: list[Document]
    #: The items that a worker holds, and that are left as they are.
    running: list[Document]
    #: The dead letters, which are left, too.
    dead: list[Document]


def find(client: Client, name: str) -> list[Document]:
    """Return the items of a task, or the item with this document id; one that waits behind a unique job as it will be then.

    The index is brought up to date for it: after many changes that may take some time.
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
    """Return the ids that begin with `start`: those of tasks, and of documents whose task's id does not.

    With `dead` only dead letters count. At most `_CANDIDATES` jobs that begin so are looked at.
    """
    rows = client.view(
        design.JOBS, 'by_task', startkey=start, endkey=start + '\ufff0', include_docs=True, limit=_CANDIDATES
    )
    docs = [row['doc'] for row in [*rows, *client.id_range(start, docs=True, limit=_CANDIDATES)] if row.get('doc')]
    now = client.clock.now()
    names = {
        name if (name := workitem.task_id(item) or '').startswith(start) else item['_id']
        for doc in docs
        if doc.get('type') == 'WorkItem' and (doc.get('status') or not dead)
        for item in _items(doc, now)
    }
    return sorted(name for name in names if name.startswith(start))


def _items(doc: Document, now: float) -> Iterator[Document]:
    """Yield an item, and those that wait behind it as they will be."""
    yield doc
    while doc.get('next'):
        doc = {**workitem.acked(doc, now), 'behind': True}
        if doc.get('_deleted'):
            return
        yield doc


def state(client: Client, task_id: str) -> str:
    """Return the state of a job; one request."""
    return _state(client, find(client, task_id))


def _state(client: Client, docs: list[Document]) -> str:
    now = client.clock.now()
    return min((workitem.state(doc, now) for doc in docs), key=STATES.index, default='gone')


def watch(client: Client, task_id: str, timeout: float | None = None) -> Iterator[str]:
    """Yield the state of a job, and each further one as it comes, until it is `gone`; nothing polls.

    *Raises* `TimeoutError` if it is not gone after `timeout` seconds, and the errors of `Client`.
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
        # A due date comes without a change of the document.
        due = [float(doc['date']) - now for doc in docs if workitem.state(doc, now) == 'scheduled']
        left = min(deadline - time.monotonic(), *due, _LONGEST)
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
    """Delete what waits of a job, now or for later, for good; what a worker holds, and dead letters, are left."""
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
            # Else somebody has taken or changed it meanwhile: look again.


def _without(client: Client, doc: Document) -> Document | None:
    """Return the unique job behind which an item waits, without that; None if it is gone."""
    found = client.fetch([doc['_id']])[0]
    if found is None or not isinstance(found.get('next'), list):
        return None
    rest = [one for one in found['next'] if workitem.task_id(one) != workitem.task_id(doc)]
    return {**{name: value for name, value in found.items() if name != 'next'}, **({'next': rest} if rest else {})}


def listing(client: Client, states: tuple[str, ...], queue: str | None, limit: int) -> list[Document]:
    """Return up to `limit` items in one of the states, of one queue or of all: those that run, then the next to be taken."""
    found: list[Document] = []
    now, store = client.clock.now(), Store(client)
    every = {'include_docs': True, 'reduce': False}
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
        found += _rows(client, 'leases', startkey=['claim'], endkey=['claim', LAST], **every)
    for name in queues:
        if 'pending' in states:
            found += [row.doc for row in store.ready(name, limit) if row.doc]
        if 'scheduled' in states:
            found += store.planned([name], limit)
    if 'dead' in states:
        of = design.rows_of(queue) if queue else {}
        found += _rows(client, 'dead', limit=limit, **of, **every)
    return [doc for doc in found if workitem.state(doc, now) in states and (not queue or doc.get('queue') == queue)][
        :limit
    ]


def _rows(client: Client, view: str, **where: Any) -> list[Document]:
    return [row['doc'] for row in client.view(design.NAME, view, **where) if row.get('doc')]
