"""Dead letters: see them, give them back to their queues, or drop them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .. import design
from ..couchdb.client import Client, Document, Row, chunks
from ..couchdb.shapes import items, members, number
from ..design.rows import DeadRow
from ..documents import dead_letter, workitem
from ..documents.job_key import job_id
from ..documents.reasons import NO_QUEUE
from ..documents.types import WorkItem
from ..documents.unique_merge import MOVED, merge
from ..queues.unique_jobs import enqueue

__all__ = ['as_letter', 'count', 'drop', 'is_letter', 'letters', 'replay']

#: Documents read or written in one request.
_BATCH = 200

#: The rows of the view, and of its reduction.
_LETTER, _COUNT = members(key=items(lambda part: True)), members(value=number)


def count(client: Client, queue: str | None = None) -> int:
    """Return how many dead letters a queue has, or all queues together."""
    rows = client.view(design.NAME, 'dead', _COUNT, **_of(queue))
    return int(rows[0]['value']) if rows else 0


def letters(client: Client, queue: str | None = None) -> Iterator[Document]:
    """Yield the dead letters of a queue, or of all, by queue and time; they may be dropped or replayed meanwhile."""
    where, seen = _of(queue), set[str]()
    while rows := client.view(design.NAME, 'dead', _LETTER, **where, include_docs=True, reduce=False, limit=_BATCH + 1):
        new = [row for row in rows[:_BATCH] if row['id'] not in seen]
        for row in new:
            seen.add(row['id'])
            if doc := _letter(client, row):
                yield doc
        if len(rows) <= _BATCH or not new:
            return  # the embedded server does not know startkey_docid, and stands still in too many of one moment
        where = {**where, 'startkey': rows[_BATCH]['key'], 'startkey_docid': rows[_BATCH]['id']}


def is_letter(doc: Document) -> bool:
    """Tell whether an item is a dead letter; so is one whose queue is not text, which no consumer can see."""
    return bool(doc.get('status')) or not isinstance(doc.get('queue'), str)


def as_letter(doc: Document) -> Document:
    """Return a dead letter with its reason, though nobody has written one."""
    return (
        doc
        if doc.get('status') or not is_letter(doc)
        else {**doc, 'status': 'fail', 'reason': NO_QUEUE, 'failed': None}
    )


def _letter(client: Client, row: Row) -> Document | None:
    """Return the letter in a row of the view; of one that cannot be read what the view has of it; None if it is gone."""
    if row.get('doc'):
        return as_letter(row['doc'])
    found = DeadRow.of(row)
    rev = client.rev(found.id) if client.unusable.has(found.id, None) else None
    return (
        None
        if rev is None
        else {
            '_id': found.id,
            '_rev': rev,
            'type': 'WorkItem',
            'status': 'fail',
            'reason': found.reason,
            'queue': found.queue,
            'failed': found.failed,
        }
    )


def _of(queue: str | None) -> dict[str, Any]:
    return {} if queue is None else design.rows_of(queue)


def replay(client: Client, docs: Sequence[Document]) -> tuple[list[Document], dict[str, str]]:
    """Give dead letters back to their queues, at the end, as if they had never been delivered.

    Return those that are back, and by id of the others in one sentence why they are not.
    """
    back: list[Document] = []
    refused: dict[str, str] = {}
    plain: list[tuple[Document, WorkItem]] = []
    for doc in docs:
        alive = {name: value for name, value in doc.items() if name not in ('status', 'reason', 'failed')}
        if not doc.get('status'):
            refused[doc['_id']] = 'it is no dead letter (any more)'
        elif not isinstance(doc.get('queue'), str):
            refused[doc['_id']] = f'it cannot be delivered: {NO_QUEUE}'
        elif reason := workitem.flaw({**alive, 'claimed': None}):
            refused[doc['_id']] = f'it cannot be delivered: {reason}'
        elif 'key' in doc and not workitem.is_unique(doc):
            # A dead unique job that made way for a newer one: it has to find its place among those of its key.
            if _is_back_in_place(client, doc):
                back.append(doc)
            else:
                refused[doc['_id']] = 'another message with its job key waits'
        else:
            plain.append((doc, dead_letter.replayed(workitem.checked(doc), client.clock.now())))
    for part in chunks(plain, _BATCH):
        for (doc, _), result in zip(part, client.bulk([changed for _, changed in part]), strict=True):
            if result.is_stored:
                back.append(doc)
            else:
                refused[doc['_id']] = 'it was changed by somebody else just now'
    return back, refused


def _is_back_in_place(client: Client, letter: Document) -> bool:
    """Enqueue a dead unique job again, unless another one of its key waits: tell whether that was done."""
    job = job_id(letter['queue'], letter['message']['headers'].get('task'), letter['key'])
    again = dead_letter.replayed(workitem.checked(letter), client.clock.now())
    again['_id'] = job
    del again['_rev']
    [found] = client.fetch([job])
    if merge(found, again, client.clock.now())[1].what == MOVED:
        return False
    enqueue(client, again)
    client.bulk([workitem.deleted(letter)])
    return True


def drop(client: Client, docs: Sequence[Document]) -> int:
    """Delete dead letters for good and return how many; what is none any more is left."""
    gone = [workitem.deleted(doc) for doc in docs if doc.get('status')]
    return sum(1 for part in chunks(gone, _BATCH) for result in client.bulk(part) if result.is_stored)
