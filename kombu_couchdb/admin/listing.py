"""Lists of jobs: those in the queues, by state and time, or the history, the latest first."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from .. import design
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import anything, exactly, maybe, members, number, text
from ..documents import workitem
from ..documents.task_message import mentions
from ..queues.backlog import internal
from .claimants import Claimants
from .dead import as_letter
from .jobs import BATCH_ROWS, TYPES, items_in, needs_jobs_view, paged

#: The most documents that one page reads; the first requests for a queue count as so many documents.
MAX_EXAMINED, _QUEUE_COST = 1000, 20

#: The shapes of rows. The queue in the key of a malformed item can be anything.
_HEAD = members(key=exactly(lambda queue: True, number, number))
_ROW = members(id=text, key=anything)
_CLAIM = members(id=text, key=exactly(text, text, lambda queue: True), value=number)

#: The parts of a list for each queue. Their rows follow each other in the view `waiting`.
_IN_QUEUES = ('ready', 'scheduled', 'parked')

#: The shape of a place in a list.
_PLACE = exactly(
    lambda part: part in ('history', 'claimed', *_IN_QUEUES, 'dead'), maybe(text), maybe(exactly(anything, text))
)


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
    #: Only jobs to which the last thing happened before this date.
    until: float | None = None

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
            and (self.until is None or _happened(doc) <= self.until)
        )


def _happened(doc: Document) -> float:
    """Return when the last thing happened to a job, as the view `history` does."""
    dates = (doc.get(name) for name in ('finished', 'failed', 'published'))
    return next((date for date in dates if isinstance(date, (int, float))), 0.0)


def listing(client: Client, wanted: JobFilter, limit: int) -> Iterator[Document]:
    """Yield up to `limit` jobs, in batches that are read when they are needed.

    If only states and a queue are `wanted`, and `done` is not: claimed items come first, by the time of the claim; then
    those of each queue: ready ones by priority and time (those that had a due date after the others), scheduled ones by
    due date, and parked ones; then dead ones. Otherwise the latest come first, by the time of the last thing that
    happened to them; that request first brings its index up to date.
    """
    return islice((doc for docs, _, _ in _examined(client, wanted) for doc in docs), limit)


class Place(NamedTuple):
    """Where a list of jobs goes on: in which part of it, and after which row."""

    part: str
    queue: str | None
    #: The key of the last row, of a claimed item the time of its claim, and its id; None before the first row.
    after: Any

    def text(self) -> str:
        """Return the place as text, for a URL."""
        return json.dumps(self, separators=(',', ':'))

    @classmethod
    def of(cls, value: str) -> Place:
        """Read such a text; *raises* `ValueError` for any other."""
        try:
            found = json.loads(value)
        except RecursionError as exc:
            raise ValueError('nested too deeply') from exc
        if not _PLACE(found):
            raise ValueError('this is not the place of a page')
        return cls(*found)


class JobPage(NamedTuple):
    """One page of a list of jobs."""

    jobs: list[Document]
    #: Where the next page begins; None if there is none.
    next: Place | None


def page(client: Client, wanted: JobFilter, limit: int, after: Place | None = None) -> JobPage:
    """Return one page of what `listing` yields: `limit` jobs from `after` on.

    It needs the same time wherever it begins. It has fewer jobs, perhaps none, and a next page, if `MAX_EXAMINED` jobs
    were read and most of them are not `wanted`.
    """
    found, place, examined = list[Document](), after, 0
    for docs, following, cost in _examined(client, wanted, after, limit + 1):
        if (found and len(found) + len(docs) > limit) or examined >= MAX_EXAMINED:
            return JobPage(found, place)
        found, place, examined = found + docs, following, examined + cost
    return JobPage(found, None)


def published_since(client: Client, wanted: JobFilter, since: float, limit: int) -> int:
    """Return how many of the `limit` jobs that were published first since then are `wanted`; one request or two.

    It is read from the primary index. Unique jobs are not counted: their ids say nothing about the time.
    """
    now, first = client.clock.now(), workitem.new_id(since)
    rows = client.id_range(first, to=first[:1], docs=True, limit=limit)
    docs = [row['doc'] for row in rows if row['doc'].get('type') in TYPES]
    claimants = Claimants.of(client, docs)
    return sum(wanted.matches(doc, claimants, now) for doc in docs)


# -- the parts of a list


def _examined(
    client: Client, wanted: JobFilter, after: Place | None = None, batch: int = BATCH_ROWS
) -> Iterator[tuple[list[Document], Place, int]]:
    """Yield for each document after a place the jobs in it that are `wanted`, the place after it, and its cost.

    The cost of a document is 1. Where a queue begins, there is an item without jobs, with the cost of a few requests.
    """
    now, is_claimed = client.clock.now(), bool({'running', 'prefetched'} & set(wanted.states))
    claimants = Claimants.all(client) if is_claimed else Claimants((), now)
    rows = _rows(client, wanted, now, after or Place('claimed', None, None), batch)
    while part := list(islice(rows, batch)):
        docs = iter(client.fetch([doc_id for doc_id, _ in part if doc_id]))
        for doc_id, place in part:
            jobs = _jobs_in(next(docs), place.part, now) if doc_id else ()
            yield [job for job in jobs if wanted.matches(job, claimants, now)], place, 1 if doc_id else _QUEUE_COST
        batch = BATCH_ROWS


def _jobs_in(doc: Document | None, part: str, now: float) -> Iterable[Document]:
    if doc is None:
        return ()
    return items_in(doc, now) if part == 'history' else [as_letter(doc) if part == 'dead' else doc]


def _rows(
    client: Client, wanted: JobFilter, now: float, after: Place, first: int
) -> Iterator[tuple[str | None, Place]]:
    """Yield the ids of the documents of a list, and the place after each; None with the place where a queue begins."""

    def begin(part: str, queue: str | None = None) -> Place:
        return after if after[:2] == (part, queue) else Place(part, queue, None)

    if wanted.needs_history:
        task = wanted.task or ''
        last: Any = {} if wanted.until is None else wanted.until
        where = {'startkey': [task, last], 'endkey': [task, wanted.since or 0], 'descending': True}
        with needs_jobs_view(client):
            yield from _range(client, design.JOBS, 'history', begin('history'), first, **where)
        return
    states = set(wanted.states)
    if after.part == 'claimed' and states & {'running', 'prefetched'}:
        yield from _claimed(client, wanted.queue, begin('claimed'))
    if after.part != 'dead' and states & {*_IN_QUEUES}:
        for queue in _queues(client, wanted.queue, after.queue):
            is_begun = queue == after.queue and after.part in _IN_QUEUES
            if not is_begun:
                yield None, Place('ready', queue, None)
            for state, where in _ranges(queue, now).items():
                is_before = is_begun and _IN_QUEUES.index(state) < _IN_QUEUES.index(after.part)
                if state in states and not is_before:
                    yield from _range(client, design.NAME, 'waiting', begin(state, queue), first, reduce=False, **where)
    if 'dead' in states:
        where = {} if wanted.queue is None else design.rows_of(wanted.queue)
        yield from _range(client, design.NAME, 'dead', begin('dead'), first, reduce=False, **where)


def _range(client: Client, name: str, view: str, place: Place, first: int, **where: Any) -> Iterator[tuple[str, Place]]:
    """Yield the ids of the rows of a view after a place, see `paged`, and the place after each."""
    for row in paged(client, name, view, _ROW, after=place.after, first=first, **where):
        yield row['id'], place._replace(after=[row['key'], row['id']])


def _claimed(client: Client, queue: str | None, place: Place) -> Iterator[tuple[str, Place]]:
    """Yield the ids of claimed items after a place, and the place after each; there are as many as workers hold."""
    where = {'startkey': ['claim'], 'endkey': ['claim', LAST], 'reduce': False}
    rows = client.view(design.NAME, 'leases', _CLAIM, **where)
    key = None if queue is None else design.key_of(queue)
    last = place.after if place.after and number(place.after[0]) else []
    for found in sorted([row['value'], row['id']] for row in rows if key in (None, row['key'][2])):
        if found > last:
            yield found[1], place._replace(after=found)


def _queues(client: Client, queue: str | None, first: str | None) -> Iterator[str]:
    """Yield the queues that have messages, from `first` on, without those for replies, events and remote control.

    Two small requests for each. To group all rows by queue takes a second with a million messages.
    """
    if queue is not None:
        yield queue
        return
    start: list[Any] = [] if first is None else [design.key_of(first)]
    while rows := client.view(design.NAME, 'waiting', _HEAD, startkey=start, limit=1, reduce=False):
        key = rows[0]['key'][0]
        if (name := design.queue_of(key)) is not None and not internal(client, [name]):
            yield name
        start = [key, LAST]


def _ranges(queue: str, now: float) -> dict[str, dict[str, Any]]:
    """Return the ranges of a queue's messages in the view `waiting`, by state."""
    key = design.key_of(queue)
    return {
        'ready': {'startkey': [key], 'endkey': [key, design.PLANNED, now]},
        'scheduled': design.planned_rows(queue, now),
        'parked': design.rows_of(queue, design.PARKED),
    }


def workers_of(claimants: Claimants, docs: Collection[Document]) -> Mapping[str, str]:
    """Return the workers that hold or have completed these jobs, by the ids of their jobs' consumers.

    That is the name of a Celery worker if it is known, or else host and process id.
    """
    names = {name for doc in docs if isinstance(name := workitem.claimant(doc) or doc.get('consumer'), str)}
    known = {str(doc['consumer']): str(doc['worker']) for doc in docs if doc.get('worker') and doc.get('consumer')}
    return {name: known.get(name) or claimants.name(name) for name in names}
