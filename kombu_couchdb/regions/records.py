"""The records of tasks that a region gave away, in its database of regions: find, list, cancel, replay and drop them.

*Every* function raises the errors of `kombu_couchdb.errors`. A `client` is for the region's own database of regions,
except in `documents`. See `region` for the documents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypedDict

from ..couchdb.client import Client, Document, chunks
from ..couchdb.conflicts import delete_leaves
from ..values import is_number
from .region import RECORD, STATES, record_id, records_to, region_of, state_of

#: The documents that one request reads or writes.
_BATCH_DOCS = 200

#: How many records of one id, or of ids that begin alike, are looked for in each region.
_MAX_FOUND = 50

#: The most attempts to write a record. An attempt fails only if another process has changed the record.
_MAX_TRIES = 20

#: The members that a replayed record loses.
_OF_REFUSED = frozenset(('status', 'reason', 'failed', 'state', 'taken', 'delayed', 'run_in', 'cancelled', 'terminate'))

#: The member with the date of a record, by state.
_DATES = {'sent': 'published', 'there': 'taken', 'refused': 'failed', 'withdrawn': 'published'}


class Whereabouts(TypedDict):
    """Where a task is that was given to another region."""

    region: str
    #: One of `region.STATES`.
    state: str
    #: Since when, in seconds since the epoch; None if the record does not say it.
    since: float | None


def documents(client: Client, prefix: str) -> Iterator[Document]:
    """Yield the documents whose ids begin with `prefix`, as they are read. You may change them while you iterate."""
    start = prefix
    while rows := client.id_range(start, to=prefix, limit=_BATCH_DOCS, docs=True):
        yield from (row['doc'] for row in rows)
        start = f'{rows[-1]["id"]} '  # sorts before every other id that follows


def listing(client: Client, name: str = '', states: Collection[str] = STATES) -> Iterator[Document]:
    """Yield the records of tasks for region `name`, or for all, in these states; ordered by region."""
    for doc in documents(client, records_to(name) if name else RECORD):
        if state_of(doc) in states:
            yield doc


def find(client: Client, start: str) -> list[Document]:
    """Return the records of tasks whose ids begin with `start`, or the record with this document id.

    A request for each region that has records, and two more.
    """
    if start.startswith(RECORD):
        return [doc for doc in client.find([start]) if doc]
    rows = [row for name in regions(client) for row in client.id_range(record_id(name, start)[:-1], limit=_MAX_FOUND)]
    return [doc for doc in client.fetch([row['id'] for row in rows]) if doc] if rows else []


def regions(client: Client) -> Iterator[str]:
    """Yield the regions for which there are records, among them those that are not in the option `regions` any more."""
    start = RECORD
    while rows := client.id_range(start, to=RECORD, limit=1):
        yield (name := region_of(rows[0]['id']))
        start = f'{records_to(name)[:-1]};'  # the character after the colon


def task_id_of(doc: Mapping[str, object]) -> str:
    """Return the id of the task of a record, or the id of the document if the record is malformed."""
    return task_id if isinstance(task_id := doc.get('id'), str) else str(doc['_id'])


def since(doc: Mapping[str, object]) -> float | None:
    """Return since when a record is in its state, in seconds since the epoch; None if it does not say it."""
    date = doc.get(_DATES[state_of(doc)])
    return date if is_number(date) else None


def whereabouts(doc: Mapping[str, object]) -> Whereabouts:
    """Return where the task of a record is."""
    return {'region': region_of(str(doc['_id'])), 'state': state_of(doc), 'since': since(doc)}


def of_task(client: Client, task_id: str) -> list[Document]:
    """Return the records of a task: one for each message that was sent."""
    return [doc for doc in find(client, task_id) if task_id_of(doc) == task_id]


def where(client: Client, task_id: str) -> Whereabouts | None:
    """Return where a task is that was given to another region and has not ended; None for any other task."""
    found = map(whereabouts, of_task(client, task_id))
    return max(found, key=lambda one: one['since'] or 0.0, default=None)


# -- changes


def cancel(client: Client, task_id: str, *, terminate: bool = False) -> tuple[int, dict[str, str]]:
    """Ask for the end of a task in another region; see `cancel_all` for what is returned.

    A worker of this region or of the other one does the rest. Then the record is gone, and the result is `REVOKED`.
    """
    return cancel_all(client, of_task(client, task_id), terminate=terminate)


def cancel_all(client: Client, docs: Sequence[Document], *, terminate: bool = False) -> tuple[int, dict[str, str]]:
    """Ask for the end of tasks that were given away. With `terminate`, a task that runs is ended, too.

    Return how many were cancelled, and the reasons, one sentence each, why others were not, by document id.
    """
    now = client.clock.now()

    def cancelled(doc: Document) -> Document | str:
        state = state_of(doc)
        if state == 'withdrawn':
            return f'it does not run in region {region_of(doc["_id"])} any more, but in {doc.get("run_in")}'
        if state == 'refused':
            return f'region {region_of(doc["_id"])} has refused it, so it does not run'
        return {'cancelled': now, **doc, **({'terminate': True} if terminate else {})}

    return _change(client, docs, cancelled)


def replay(client: Client, docs: Sequence[Document]) -> tuple[int, dict[str, str]]:
    """Send tasks again that were refused; see `cancel_all` for what is returned."""

    def replayed(doc: Document) -> Document | str:
        if state_of(doc) != 'refused':
            return 'it was not refused'
        return {name: value for name, value in doc.items() if name not in _OF_REFUSED}

    return _change(client, docs, replayed)


def drop(client: Client, docs: Sequence[Document]) -> int:
    """Delete records with all their leaf revisions, and return how many were deleted.

    The task of a record in the state `there` runs all the same, and its result is stored.
    """
    return sum(delete_leaves(client, part) for part in chunks(docs, _BATCH_DOCS))


def _change(
    client: Client, docs: Sequence[Document], edit: Callable[[Document], Document | str]
) -> tuple[int, dict[str, str]]:
    """Write what `edit` returns for each record, which is read again if somebody else has changed it.

    `edit` returns a reason in place of a document to leave the record as it is.
    """
    reasons, left = dict[str, str](), list(docs)
    for _ in range(_MAX_TRIES):
        edited = {doc['_id']: edit(doc) for doc in left}
        reasons |= {doc_id: reason for doc_id, reason in edited.items() if isinstance(reason, str)}
        results = client.bulk([doc for doc in edited.values() if not isinstance(doc, str)])
        reasons |= {result.id: result.reason for result in results if result.is_refused}
        conflicts = [result.id for result in results if result.is_conflict]
        read_again = client.find(conflicts) if conflicts else []
        left = [doc for doc in read_again if doc]
        reasons |= dict.fromkeys({*conflicts} - {doc['_id'] for doc in left}, 'it has ended just now')
        if not left:
            break
    reasons |= {doc['_id']: f'it was changed by others at each of {_MAX_TRIES} attempts' for doc in left}
    return len(docs) - len(reasons), reasons
