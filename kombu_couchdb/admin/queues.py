"""Queues: list, pause, resume, purge and delete them.

While a queue is paused, no consumer claims its messages. A pause is a document of its own (see
`documents.shared_documents.Pause`) and belongs to the name of the queue: no declaration, by whichever process, changes
or conflicts with it. It ends when the queue is resumed, or deleted by `deleting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TypedDict

from ..couchdb.bulk import deletion
from ..couchdb.client import Client, Document, winning
from ..couchdb.shapes import number
from ..documents.ids import CONSUMER, PAUSE, QUEUE
from ..documents.shared_documents import Pause
from ..documents.validation import check_names
from ..errors import ConfigurationError
from ..leases.lease import queues_of
from ..queues.databases import BroadcastsDatabase
from ..queues.store import Store
from ..queues.topology import Topology
from ..schema import Schema

#: What is read of a pause: somebody may have written it by hand.
_PAUSE = Schema.of(Pause)


class Paused(TypedDict):
    """Since when a queue is paused, by whom and why; None if that is unknown."""

    date: float | None
    by: str | None
    reason: str | None
    #: Whether it takes no new messages either.
    refuse: bool


def names(client: Client) -> dict[str, bool]:
    """Return the names of all queues that are declared, have waiting messages or are paused.

    The value tells whether the queue is temporary: declared with `auto_delete`, as those for replies, events and remote
    control are. Three requests.
    """
    docs = [row['doc'] for row in client.id_range(QUEUE, docs=True)]
    return {
        **dict.fromkeys(sorted(Store(client).queues_in_use()), False),
        **dict.fromkeys(paused(client), False),
        **{doc['_id'].removeprefix(QUEUE): bool(doc.get('auto_delete')) for doc in docs},
    }


def paused(client: Client) -> dict[str, Paused]:
    """Return the paused queues by name; one request."""
    return paused_in(row['doc'] for row in client.id_range(PAUSE, docs=True))


def paused_in(docs: Iterable[Document]) -> dict[str, Paused]:
    """Return the paused queues by name: those of the documents that are pauses."""
    return {doc['_id'].removeprefix(PAUSE): _paused(doc) for doc in docs if doc['_id'].startswith(PAUSE)}


def _paused(doc: Document) -> Paused:
    found = _PAUSE.clean(doc)
    return {
        'date': found.get('date'),
        'by': found.get('by'),
        'reason': found.get('reason'),
        'refuse': found.get('refuse') is True,
    }


def pause(
    client: Client, queue: str, *, by: str | None = None, reason: str | None = None, refuse: bool = False
) -> bool:
    """Let no consumer claim messages of a queue until it is resumed; return False if it is paused already.

    With `refuse`, programs cannot publish to it either: they get `QueuePaused`. Workers can, so that the retries and
    the next steps of their tasks are not lost. A queue that is paused already then refuses from now on.

    `by` and `reason` are for people. The queue need not exist. Consumers learn of the pause within a second; messages
    that kombu has received by then are processed. *Raises* `ConfigurationError` for an invalid or empty name.
    """
    check_names(queue=queue)
    if not queue:
        raise ConfigurationError('the name of the queue is empty')
    doc_id = PAUSE + queue
    leaf = winning(client.known_leaves(doc_id))
    if leaf is not None and not leaf.get('_deleted'):
        changed = refuse and not leaf.get('refuse') and client.try_put({**leaf, 'refuse': True}) is not None
        if changed:
            _notify(client)
        return changed
    doc: Pause = {
        '_id': doc_id,
        'type': 'Pause',
        'queue': queue,
        'date': client.clock.now(),
        'by': by,
        'reason': reason,
    }
    if refuse:
        doc['refuse'] = True
    client.write_anew(doc, leaf)  # if others pause the queue at this moment, `resume` deletes all leaves
    _notify(client)
    return True


def resume(client: Client, queue: str) -> bool:
    """Let consumers claim messages of a queue again; return False if it is not paused.

    The lifetime of an unused queue (`x-expires`) begins again.
    """
    check_names(queue=queue)
    if not client.find([PAUSE + queue])[0]:
        return False
    topology = Topology(client)
    for doc in topology.queues([queue]):
        if number(doc.get('lifetime')) and doc['lifetime']:
            topology.prolong(doc, doc['lifetime'])
    # Several users may have paused it at once: the queue is resumed when all leaves are deleted.
    for leaf in [leaf for leaf in client.leaves(PAUSE + queue) if not leaf.get('_deleted')]:
        [result] = client.bulk([deletion(leaf)])
        if result.is_refused:
            raise result.exception(client.address.url)
    _notify(client)
    return True


def purging(client: Client, queue: str) -> Iterator[int]:
    """Delete the ready and scheduled messages of a queue part by part, and yield the number of each; keep claimed ones.

    What is published meanwhile is kept. Who stops iterating leaves the other messages as they are.
    """
    check_names(queue=queue)
    yield from Store(client).purging(queue)


def deleting(client: Client, queue: str, *, force: bool = False) -> Iterator[int]:
    """Delete a queue, its bindings, its pause, and its ready and scheduled messages, as `purging` does.

    Claimed messages and dead letters are kept. The queue itself goes last. *Raises* `ConfigurationError` if consumers
    have subscribed to it, unless `force` is true: they go on to consume what is published to a queue of this name.
    """
    users = [row['doc'] for row in client.id_range(CONSUMER, docs=True) if queue in queues_of(row['doc'])]
    if users and not force:
        where = ', '.join(sorted({_place(doc) for doc in users}))
        raise ConfigurationError(f'queue {queue!r} is in use by {where}: stop these consumers first')
    yield from purging(client, queue)
    Topology(client).delete_queue(queue)
    if not resume(client, queue):
        _notify(client)


def _notify(client: Client) -> None:
    """Let all consumers learn at once what was changed."""
    with closing(BroadcastsDatabase(client)) as broadcasts:
        broadcasts.notify()


def _place(doc: Document) -> str:
    return f'{doc.get("host")} (pid {doc.get("pid")})'
