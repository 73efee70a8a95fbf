"""Lists of jobs: those in the queues, in the order in which they run, or the history, the latest first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from heapq import merge
from itertools import chain, islice
from typing import Any, NamedTuple

from .. import design
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import Shape, anything, exactly, members, number, text
from ..design.rows import QueueCount, Row, WaitingRow
from ..documents import workitem
from ..documents.task_message import HIGHEST
from ..queues import waiting
from ..queues.backlog import internal
from .claimants import Claimants
from .dead import letters
from .jobs import BATCH_ROWS, items_in, needs_jobs_view, paged

#: The shape of a row of `waiting`, grouped by queue. The key of a malformed item can be anything.
_BY_QUEUE = members(key=exactly(lambda name: True), value=number)
_ROW = members(id=text, key=anything)


class JobFilter(NamedTuple):
    """Which jobs are listed; None stands for all."""

    states: Collection[str]
    queue: str | None = None
    #: The name of the task.
    task: str | None = None
    #: Only jobs to which something happened since then: published, failed or finished; in seconds since the epoch.
    since: float | None = None
    #: Text that the arguments of the task must contain, see `mentions`.
    args: str | None = None

    @property
    def needs_history(self) -> bool:
        """Whether the views of the queues are not enough to find these jobs."""
        return 'done' in self.states or any(one is not None for one in (self.task, self.since, self.args))

    def matches(self, doc: Document, claimants: Claimants, now: float) -> bool:
        """Tell whether a job is one of these."""
        return (
            claimants.state(doc, now) in self.states
            and (self.queue is None or doc.get('queue') == self.queue)
            and (self.task is None or workitem.task_name(doc) == self.task)
            and (self.args is None or mentions(doc, self.args))
        )


def listing(client: Client, wanted: JobFilter, limit: int) -> Iterator[Document]:
    """Yield up to `limit` jobs, in batches that are read when they are needed.

    If only states and a queue are `wanted`, and `done` is not: claimed items come first, then ready ones in the order
    in which workers claim them, scheduled, parked and dead ones. Otherwise the latest come first, by the time of the
    last thing that happened to them; that request first brings its index up to date.
    """
    now = client.clock.now()
    found = _history(client, wanted, now) if wanted.needs_history else _queued(client, wanted, now)
    claimants = Claimants.all(client) if {'running', 'prefetched'} & set(wanted.states) else Claimants((), now)
    return islice((doc for doc in found if wanted.matches(doc, claimants, now)), limit)


def _queued(client: Client, wanted: JobFilter, now: float) -> Iterator[Document]:
    states, queue = wanted.states, wanted.queue
    queues = (
        [queue]
        if queue
        else [
            name
            for row in client.view(design.NAME, 'waiting', _BY_QUEUE, group_level=1)
            if (name := QueueCount.of(row).queue) is not None
        ]
    )
    if not queue:
        queues = sorted({*queues} - internal(client, queues))
    rows: list[Iterator[Row]] = []
    if {'running', 'prefetched'} & set(states):
        rows.append(_rows(client, 'leases', startkey=['claim'], endkey=['claim', LAST]))
    for name in queues:
        key = design.key_of(name)
        if 'ready' in states:
            at_once = _rows(client, 'waiting', waiting.is_row, startkey=[key], endkey=[key, HIGHEST, LAST])
            range_of_due = {'startkey': [key, design.PLANNED], 'endkey': [key, design.PLANNED, now]}
            due = _rows(client, 'waiting', waiting.is_row, **range_of_due)
            rows.append(merge(at_once, _by_priority(due), key=_order))
        if 'scheduled' in states:
            rows.append(_rows(client, 'waiting', **design.planned_rows(name, now)))
        if 'parked' in states:
            rows.append(_rows(client, 'waiting', **design.rows_of(name, design.PARKED)))
    found = (row['doc'] for row in chain.from_iterable(rows) if row.get('doc'))
    return chain(found, letters(client, queue) if 'dead' in states else ())


def _rows(client: Client, view: str, row: Shape = _ROW, **where: Any) -> Iterator[Row]:
    return paged(client, design.NAME, view, row, **where, include_docs=True, reduce=False)


def _by_priority(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows of messages that are due, which the view sorts by date only. Workers sort a part of them, too."""
    while part := sorted(islice(rows, BATCH_ROWS), key=_order):
        yield from part


def _order(row: Row) -> tuple[int, float, str]:
    found = WaitingRow.of(row)
    return found.rank, found.date, found.id


def _history(client: Client, wanted: JobFilter, now: float) -> Iterator[Document]:
    task = wanted.task or ''
    where = {'startkey': [task, {}], 'endkey': [task, wanted.since or 0], 'descending': True, 'include_docs': True}
    with needs_jobs_view(client):
        for row in paged(client, design.JOBS, 'history', _ROW, **where):
            if row.get('doc'):
                yield from items_in(row['doc'], now)


def mentions(doc: Document, searched: str) -> bool:
    """Tell whether the arguments of a task contain a text.

    They are searched as Celery writes them into the headers `argsrepr` and `kwargsrepr` (Python's `repr`, at most about
    1,000 characters each), so that no body is read or decoded. A message without these headers is searched in its body,
    if that is text in the document.
    """
    message = doc.get('message')
    headers = message.get('headers') if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(headers, dict):
        return False
    shown = [value for name in ('argsrepr', 'kwargsrepr') if isinstance(value := headers.get(name), str)]
    return any(searched in value for value in shown or [str(message.get('body'))])


def workers_of(claimants: Claimants, docs: Collection[Document]) -> Mapping[str, str]:
    """Return the workers that hold or have completed these jobs, by the ids of their jobs' consumers.

    That is the name of a Celery worker if it is known, or else host and process id.
    """
    names = {name for doc in docs if isinstance(name := workitem.claimant(doc) or doc.get('consumer'), str)}
    known = {str(doc['consumer']): str(doc['worker']) for doc in docs if doc.get('worker') and doc.get('consumer')}
    return {name: known.get(name) or claimants.name(name) for name in names}
