"""Dead letters: list them, put them back into their queues, or delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import design
from ..couchdb.client import Client, Document, chunks
from ..couchdb.shapes import items, members, number, text
from ..documents import dead_letter, validation, workitem
from ..documents.dead_letter import NO_QUEUE
from ..documents.ids import job_id
from ..documents.types import WorkItem
from ..documents.unique_merge import MOVED, merge
from ..queues.unique_jobs import enqueue
from .jobs import paged

#: The maximum number of documents that are read or written in one request.
_BATCH_DOCS = 200

#: The shapes of the rows of the view `dead`, and of its reduction.
LETTER, _COUNT = members(id=text, key=items(lambda part: True)), members(value=number)


def count(client: Client, queue: str | None = None) -> int:
    """Return the number of dead letters in a queue, or in all queues."""
    rows = client.view(design.NAME, 'dead', _COUNT, **range_of(queue))
    return int(rows[0]['value']) if rows else 0


def letters(client: Client, queue: str | None = None) -> Iterator[Document]:
    """Yield the dead letters of a queue, or of all queues, ordered by queue and time.

    You may delete or replay the letters while you iterate.
    """
    for row in paged(client, design.NAME, 'dead', LETTER, **range_of(queue), include_docs=True, reduce=False):
        if doc := row.get('doc'):
            yield as_letter(doc)


def is_letter(doc: Document) -> bool:
    """Tell whether an item is a dead letter. An item whose queue is not text is one, because no consumer sees it."""
    return workitem.is_dead(doc) or not (workitem.is_done(doc) or isinstance(doc.get('queue'), str))


def as_letter(doc: Document) -> Document:
    """Return a dead letter with status and reason. An item without a valid queue has none in its document."""
    return (
        doc
        if doc.get('status') or not is_letter(doc)
        else {**doc, 'status': 'fail', 'reason': NO_QUEUE, 'failed': None}
    )


def range_of(queue: str | None) -> dict[str, Any]:
    """Return `startkey` and `endkey` for the dead letters of a queue, or of all queues."""
    return {} if queue is None else design.rows_of(queue)


def replay(
    client: Client, docs: Sequence[Document], *, before: Callable[[Document], object] | None = None
) -> tuple[list[Document], dict[str, str]]:
    """Put dead letters back at the end of their queues, as if they had never been delivered.

    `before` is called with each letter that can be replayed, before its message can be delivered again. Return the
    replayed letters, and the reasons, one sentence each, why others were not replayed, by document id.
    """
    replayed: list[Document] = []
    refused: dict[str, str] = {}
    pairs: list[tuple[Document, WorkItem]] = []  # the letter, and the document to write
    for doc in docs:
        item = {name: value for name, value in doc.items() if name not in ('status', 'reason', 'failed')}
        if not workitem.is_dead(doc):
            refused[doc['_id']] = 'it is no dead letter (any more)'
        elif not isinstance(doc.get('queue'), str):
            refused[doc['_id']] = f'it cannot be delivered: {NO_QUEUE}'
        elif reason := validation.flaw({**item, 'claimed': None}):
            refused[doc['_id']] = f'it cannot be delivered: {reason}'
        elif 'key' in doc and not workitem.is_unique(doc):
            # A unique job that failed, and was copied to a document of its own when the next message with its job key
            # was published. Merge it with the job that has this key now, if there is one.
            if _replay_unique(client, doc, before):
                replayed.append(doc)
            else:
                refused[doc['_id']] = 'another message with its job key waits'
        else:
            pairs.append((doc, dead_letter.replayed(validation.checked(doc), client.clock.now())))
    for part in chunks(pairs, _BATCH_DOCS):
        if before:
            for doc, _ in part:
                before(doc)
        for (doc, _), result in zip(part, client.bulk([changed for _, changed in part]), strict=True):
            if result.is_stored:
                replayed.append(doc)
            else:
                refused[doc['_id']] = 'it was changed by somebody else just now'
    return replayed, refused


def _replay_unique(client: Client, letter: Document, before: Callable[[Document], object] | None) -> bool:
    """Enqueue a dead unique job again and delete the letter; return False if another job with its key waits."""
    job = job_id(letter['queue'], letter['message']['headers'].get('task'), letter['key'])
    again = dead_letter.replayed(validation.checked(letter), client.clock.now())
    again['_id'] = job
    del again['_rev']
    [found] = client.fetch([job])
    if merge(found, again, client.clock.now())[1].what == MOVED:
        return False
    if before:
        before(letter)
    enqueue(client, again)
    client.bulk([workitem.deleted(letter)])
    return True


def drop(client: Client, docs: Sequence[Document]) -> int:
    """Delete dead letters for good and return their number. Letters that were replayed or changed are kept."""
    deletions = [workitem.deleted(doc) for doc in docs if workitem.is_dead(doc)]
    return sum(1 for part in chunks(deletions, _BATCH_DOCS) for result in client.bulk(part) if result.is_stored)
