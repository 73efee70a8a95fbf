"""Jobs by task id: find them, read their states, wait for them, remove them.

The states are

* `ready`: a worker can claim it now;
* `scheduled`: it waits for its due date;
* `parked`: it waits for a concurrency limit or a rate;
* `prefetched`: a worker has claimed it, and has not reported that it runs;
* `running`: a worker has reported that it runs;
* `dead`: it is a dead letter;
* `done`: it is acknowledged, and kept for a while (`keep_done`);
* `gone`: it is acknowledged or removed, has expired and is no task, or never existed.

A task has several items if it was published to several queues, or if a retry is waiting. Its state is then the one that
comes first in `STATES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from .. import design
from ..couchdb.changes import Follower
from ..couchdb.client import Client, Document, Row, chunks
from ..couchdb.shapes import Shape
from ..documents import workitem
from ..errors import ConfigurationError, NotFound
from ..values import enumerated
from .claimants import Claimants

STATES = ('running', 'prefetched', 'ready', 'scheduled', 'parked', 'dead', 'done', 'gone')

#: The states of jobs that have not ended.
OPEN = STATES[:5]

#: The states that do not change any more, unless the same task is sent again.
ENDED = ('dead', 'done', 'gone')

#: The rows that one request of `paged` reads, and those of the first request of lists that people see the beginning of.
BATCH_ROWS, FIRST_ROWS = 200, 50

#: The minimum length of an abbreviated id, in characters.
_MIN_CHARACTERS = 4

#: The types of the documents of jobs.
TYPES = ('WorkItem', 'DoneItem')

#: How many tasks, and how many documents, `complete` reads at most.
_MAX_CANDIDATES = 200

#: How long `watch_all` waits for a change before it reads the jobs again, in case that no change announces a new state.
_MAX_WAIT_SECONDS = 300.0

#: The ids that one request asks for: they are in its URL.
_MAX_KEYS = 100


class Removal(NamedTuple):
    """The result of `remove`: the items of the job, by what was done with them."""

    #: The deleted items.
    removed: list[Document]
    #: The items that a worker holds. They are deleted when the worker's claim ends.
    claimed: list[Document]
    #: The dead letters. They were not changed.
    dead: list[Document]
    #: The completed items that are kept (`keep_done`). They were not changed.
    done: list[Document]
    #: Whether workers were told to revoke the task. Only `celery_couchdb.jobs.Jobs.remove` does that.
    revoked: bool = False


def find(client: Client, name: str) -> list[Document]:
    """Return the items of the task with the id `name`, or the item with this document id.

    A running unique job stores later messages with its key in its own document. Each is returned as the separate item
    that it becomes when the job ends, with `behind: True`. The request first brings the index up to date, which may
    take long after many changes. *Raises* `ConfigurationError` if the design document of the index is missing.
    """
    return find_all(client, [name])[name]


def find_all(client: Client, names: Collection[str]) -> dict[str, list[Document]]:
    """Return what `find` returns for each of these ids.

    One request for each 100 ids. Two more, for those without an item: one for their documents, and one for their items
    again, because a node of a cluster may answer whose index lacks what the other nodes have stored a moment ago.
    """
    found: dict[str, list[Document]] = {name: [] for name in names}
    _read_items(client, list(found), found)
    others = _without_items(found)
    for name, doc in zip(others, client.find(others) if others else (), strict=True):
        if doc and doc.get('type') in TYPES:
            found[name].append(doc)
    _read_items(client, _without_items(found), found)
    return found


def _without_items(found: Mapping[str, list[Document]]) -> list[str]:
    return [name for name, docs in found.items() if name and not docs]


def _read_items(client: Client, names: Collection[str], found: Mapping[str, list[Document]]) -> None:
    """Add the items of the tasks with these ids to `found`."""
    now = client.clock.now()
    for part in chunks(sorted(names), _MAX_KEYS):
        rows = _by_task(client, keys=part, include_docs=True)
        docs = {row['id']: row['doc'] for row in rows if row.get('doc')}
        for item in (item for doc in docs.values() for item in items_in(doc, now)):
            if (name := workitem.task_id(item)) in part:
                found[str(name)].append(item)


def _by_task(client: Client, **where: Any) -> list[Row]:
    with needs_jobs_view(client):
        return client.view(design.JOBS, 'by_task', **where)


@contextmanager
def needs_jobs_view(client: Client) -> Iterator[None]:
    """Raise `ConfigurationError` if the design document for the views of jobs is missing."""
    try:
        yield
    except NotFound as exc:
        raise ConfigurationError(
            f'{client.address.url} lacks the design document {design.JOBS}; let an administrator run '
            f'"celery -A your_app couchdb setup"'
        ) from exc


def paged(
    client: Client, name: str, view: str, row: Shape, *, after: Any = None, first: int | None = None, **where: Any
) -> Iterator[Row]:
    """Yield the rows of the view of the design document `name`, each document once.

    `after` is the key and the id of a row: only those after it. `first` is how many rows the first request reads, if
    not as many as the others. You may change or delete the documents while you iterate.
    """
    size = first or BATCH_ROWS
    seen = set[str]()
    if after is not None:
        where, seen = {**where, 'startkey': after[0], 'startkey_docid': after[1]}, {after[1]}
    while rows := client.view(name, view, row, **where, limit=size + 1):
        new = [row for row in rows if row['id'] not in seen]
        seen.update(row['id'] for row in new)
        yield from new
        if len(rows) <= size or not new:
            # `new` is empty if more rows than a page have the same key: the embedded server ignores startkey_docid.
            return
        # After the last row that was read, not from the next one: the embedded server returns some fractions in keys a
        # little larger than they are, and would leave out the row with such a key.
        where, size = {**where, 'startkey': rows[-1]['key'], 'startkey_docid': rows[-1]['id']}, BATCH_ROWS


def complete(client: Client, start: str, *, dead: bool = False) -> list[str]:
    """Return the ids that begin with `start`, sorted: ids of tasks, and ids of documents if only these match.

    With `dead`, only dead letters count. At most 200 tasks and 200 documents are read, so the list may be incomplete.
    """
    rows = _by_task(client, startkey=start, endkey=start + '\ufff0', include_docs=True, limit=_MAX_CANDIDATES)
    docs = [row['doc'] for row in [*rows, *client.id_range(start, docs=True, limit=_MAX_CANDIDATES)] if row.get('doc')]
    now = client.clock.now()
    names = {
        name if (name := workitem.task_id(item) or '').startswith(start) else item['_id']
        for doc in docs
        if doc.get('type') in TYPES and (workitem.is_dead(doc) or not dead)
        for item in items_in(doc, now)
    }
    return sorted(name for name in names if name.startswith(start))


def choose(start: str, complete: Callable[[], Collection[str]]) -> str | None:
    """Return the only one of the ids that begin with `start`, which `complete` returns; None if there is none.

    *Raises* `ConfigurationError` if there are several, or if `start` is too short to look for them.
    """
    if len(start) < _MIN_CHARACTERS:
        raise ConfigurationError(f'{start!r} is too short: give at least {_MIN_CHARACTERS} characters of an id')
    found = sorted(complete())
    if len(found) > 1:
        raise ConfigurationError(f'several ids begin with {start!r}: {enumerated(found)}')
    return found[0] if found else None


def items_in(doc: Document, now: float) -> Iterator[Document]:
    """Yield an item, and for each message that waits behind it, the separate item that it becomes."""
    yield doc
    while doc.get('next'):
        doc = {**workitem.acked(doc, now), 'behind': True}
        if doc.get('_deleted'):
            return
        yield doc


def state_of(docs: Collection[Document], claimants: Claimants, now: float) -> str:
    """Return the state of a job with these items, see `STATES`."""
    return min((claimants.state(doc, now) for doc in docs), key=STATES.index, default='gone')


def state(client: Client, task_id: str) -> str:
    """Return the state of a job, see `STATES`. One request; two if it is claimed, three if no task has this id."""
    docs = find(client, task_id)
    return state_of(docs, Claimants.of(client, docs), client.clock.now())


def watch_all(client: Client, task_ids: Collection[str], timeout: float | None = None) -> Iterator[tuple[str, str]]:
    """Yield `(task_id, state)` for each job, then for each new state, until all have ended (`ENDED`). It does not poll.

    All jobs share one changes feed, with the heartbeats of the workers that have claimed them, and only what has
    changed is read again. *Raises* `TimeoutError` if a job has not ended after `timeout` seconds (None means no limit),
    and the errors of `Client`.
    """
    deadline = float('inf') if timeout is None else time.monotonic() + timeout
    follower, last = Follower(client, 'kombu-couchdb-watch'), dict[str, str]()
    docs: dict[str, list[Document]] = {}
    changed, since = list(dict.fromkeys(task_ids)), client.sequence()
    try:
        while True:
            docs.update(find_all(client, changed))
            claimants = Claimants.of(client, chain.from_iterable(docs.values()))
            now = client.clock.now()
            for name in list(docs):
                state = state_of(docs[name], claimants, now)
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
            follower.follow(since, doc_ids=sorted({*(doc['_id'] for doc in waiting), *claimants.ids}))
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


def remove(client: Client, names: Collection[str]) -> dict[str, Removal]:
    """Delete the waiting items of the jobs with these ids, and mark the claimed ones as removed; return all by id.

    A claimed item is deleted when its claim ends: when its worker acknowledges or releases it, or when a sweep releases
    the messages of a worker that was killed or cut off. Dead letters and completed items are not changed. Four requests
    for each 100 ids, if nobody else changes these jobs.
    """
    removals, left, now = {name: Removal([], [], [], []) for name in names}, [*names], client.clock.now()
    while left:
        to_write = list[tuple[str, Document]]()
        for name, docs in find_all(client, left).items():
            open_docs = [doc for doc in docs if not doc.get('status')]
            dead, done = ([doc for doc in docs if workitem.state(doc, now) == state] for state in ('dead', 'done'))
            removals[name] = removals[name]._replace(claimed=open_docs, dead=dead, done=done)
            to_write += [(name, doc) for doc in open_docs if workitem.is_waiting(doc) or not doc.get('removed')]
        written = [_removed(client, doc) for _, doc in to_write]
        results = iter(client.bulk([doc for doc in written if doc is not None]) if any(written) else ())
        for (name, doc), after in zip(to_write, written, strict=True):
            if (after is None or next(results).is_stored) and workitem.is_waiting(doc):
                removals[name].removed.append(doc)
            # Otherwise a worker has claimed it, or somebody has changed it: the loop reads it again.
        left = [*dict.fromkeys(name for name, _ in to_write)]
    return removals


def _removed(client: Client, doc: Document) -> Mapping[str, Any] | None:
    """Return the document to write when an item is removed; None if there is nothing left to write."""
    if doc.get('behind'):
        return _without(client, doc)
    now = client.clock.now()
    return workitem.dropped(doc, now) if workitem.is_waiting(doc) else {**doc, 'removed': now}


def _without(client: Client, doc: Document) -> Document | None:
    """Return the running unique job without the message `doc` that waits behind it; None if none waits any more."""
    found = client.fetch([doc['_id']])[0]
    if found is None or not isinstance(found.get('next'), list):
        return None
    rest = [message for message in found['next'] if workitem.task_id(message) != workitem.task_id(doc)]
    return {**{name: value for name, value in found.items() if name != 'next'}, **({'next': rest} if rest else {})}
