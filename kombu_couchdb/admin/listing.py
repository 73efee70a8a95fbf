"""Lists of jobs: those in the queues, in the order in which they run, or the history, the latest first."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from heapq import merge
from itertools import chain, islice
from typing import Any, NamedTuple

from .. import design
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import Shape, anything, exactly, maybe, members, number, text
from ..design.rows import Row, WaitingRow
from ..documents import workitem
from ..documents.task_message import HIGHEST
from ..queues import waiting
from ..queues.backlog import internal
from .claimants import Claimants
from .dead import LETTER, as_letter, range_of
from .jobs import BATCH_ROWS, TYPES, items_in, needs_jobs_view, paged

#: The most documents that one page reads; the first requests for a queue count as so many documents.
MAX_EXAMINED, _QUEUE_COST = 1000, 20

#: The shapes of rows. The queue in the key of a malformed item can be anything.
_HEAD = members(key=exactly(lambda queue: True, number, number))
_ROW, _CLAIM = members(id=text, key=anything), members(id=text, key=exactly(text, text, lambda queue: True))

#: The parts of a list for each queue, and all parts in their order.
_IN_QUEUES = ('ready', 'scheduled', 'parked')
_PARTS = ('history', 'claimed', *_IN_QUEUES, 'dead')

#: The shapes of a place in a list: of the last row that was read, and of that of messages that are due.
_LAST = exactly(anything, text)
_LAST_DUE = exactly(maybe(_LAST), exactly(exactly(text, number, number), text), exactly(number, number, text))
_PLACE = exactly(
    lambda part: part in ('history', 'claimed', *_IN_QUEUES, 'dead'),
    maybe(text),
    exactly(maybe(_LAST), maybe(_LAST_DUE)),
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
    return islice((doc for docs, _, _ in _examined(client, wanted) for doc in docs), limit)


class Place(NamedTuple):
    """Where a list of jobs goes on: in which part of it, and after which row."""

    part: str
    queue: str | None
    #: The key and the id of the last row, None before the first one; and the same of ready messages that had a due
    #: date, see `_by_priority`.
    after: tuple[Any, Any]

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
        part, queue, after = found
        return cls(part, queue, tuple(after))


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


class _Range(NamedTuple):
    """A range of the keys of a view."""

    view: str
    where: dict[str, Any]
    row: Shape = _ROW
    design: str = design.NAME
    #: Only the rows whose keys end in this; None stands for all.
    last: str | None = None

    def rows(self, client: Client, after: Any, first: int | None = None) -> Iterator[Row]:
        """Yield the rows in the order of the view, after the one with the key and id `after`; see `paged`."""
        more = {'reduce': False} if self.design == design.NAME else {}
        with needs_jobs_view(client) if self.design == design.JOBS else nullcontext():
            for row in paged(client, self.design, self.view, self.row, after=after, first=first, **self.where, **more):
                if self.last is None or row['key'][-1] == self.last:
                    yield row


def _examined(
    client: Client, wanted: JobFilter, after: Place | None = None, batch: int = BATCH_ROWS
) -> Iterator[tuple[list[Document], Place, int]]:
    """Yield for each document after a place the jobs in it that are `wanted`, the place after it, and its cost.

    The cost of a document is 1. Where a queue begins, there is an item without jobs, with the cost of a few requests.
    """
    now, is_claimed = client.clock.now(), bool({'running', 'prefetched'} & set(wanted.states))
    claimants = Claimants.all(client) if is_claimed else Claimants((), now)
    rows = _rows(client, wanted, now, after, batch)
    while part := list(islice(rows, batch)):
        docs = iter(client.fetch([row['id'] for row, _ in part if row]))
        for row, place in part:
            jobs = _jobs_in(next(docs), place.part, now) if row else ()
            yield [job for job in jobs if wanted.matches(job, claimants, now)], place, 1 if row else _QUEUE_COST
        batch = BATCH_ROWS


def _jobs_in(doc: Document | None, part: str, now: float) -> Iterable[Document]:
    if doc is None:
        return ()
    return items_in(doc, now) if part == 'history' else [as_letter(doc) if part == 'dead' else doc]


def _rows(
    client: Client, wanted: JobFilter, now: float, after: Place | None, first: int
) -> Iterator[tuple[Row | None, Place]]:
    """Yield the rows of a list, and the place after each; also None with the place where each queue begins."""
    hidden = dict[str, bool]()  # the queues for replies, events and remote control, which rarely have messages
    for part, queue, ranges in _parts(client, wanted, now, after):
        if not ranges:
            yield None, Place(part, queue, (None, None))
            continue
        last, last_due = after.after if after and (after.part, after.queue) == (part, queue) else (None, None)
        for row, position in _ordered(client, part, ranges, last, last_due, first):
            if queue is not None and wanted.queue is None:
                if queue not in hidden:
                    hidden[queue] = bool(internal(client, [queue]))
                if hidden[queue]:
                    break
            if part == 'ready' and _is_planned(row):
                last_due = position
            else:
                last = position
            yield row, Place(part, queue, (last, last_due))


def _ordered(
    client: Client, part: str, ranges: Sequence[_Range], last: Any, last_due: Any, first: int
) -> Iterator[tuple[Row, Any]]:
    """Yield the rows of a part of a list, and for each what to give as `last` or `last_due` to go on after it."""
    if part == 'ready':
        *at_once, due = ranges
        rows = [*(_positioned(one.rows(client, last, first)) for one in at_once), _by_priority(client, due, last_due)]
        return merge(*rows, key=lambda found: _order(found[0]))
    return _positioned(ranges[0].rows(client, last, first))


def _positioned(rows: Iterator[Row]) -> Iterator[tuple[Row, Any]]:
    return ((row, [row['key'], row['id']]) for row in rows)


def _is_planned(row: Row) -> bool:
    return bool(row['key'][1] == design.PLANNED)


_Part = tuple[str, str | None, Sequence[_Range]]


def _parts(client: Client, wanted: JobFilter, now: float, after: Place | None) -> Iterator[_Part]:
    """Yield the parts of a list in their order, each with its ranges; without those before `after`."""
    if wanted.needs_history:
        task = wanted.task or ''
        where = {'startkey': [task, {}], 'endkey': [task, wanted.since or 0], 'descending': True}
        yield 'history', None, [_Range('history', where, design=design.JOBS)]
        return
    states, begin = set(wanted.states), after or Place('claimed', None, (None, None))
    if begin.part == 'claimed' and states & {'running', 'prefetched'}:
        queue = None if wanted.queue is None else design.key_of(wanted.queue)
        yield (
            'claimed',
            None,
            [_Range('leases', {'startkey': ['claim'], 'endkey': ['claim', LAST]}, _CLAIM, last=queue)],
        )
    if begin.part != 'dead' and states & {*_IN_QUEUES}:
        for name, rank in _queues(client, wanted.queue, begin.queue):
            if name != begin.queue:
                yield 'ready', name, []
            for state in _IN_QUEUES:
                is_before = name == begin.queue and _PARTS.index(state) < _PARTS.index(begin.part)
                if state in states and not is_before and (ranges := _ranges(state, name, rank, now)):
                    yield state, name, ranges
    if 'dead' in states:
        yield 'dead', None, [_Range('dead', range_of(wanted.queue), LETTER)]


def _queues(client: Client, queue: str | None, first: str | None) -> Iterator[tuple[str, int]]:
    """Yield the queues that have messages, from `first` on, and the lowest rank of a message in each.

    One small request for each. To group all rows by queue takes a second with a million messages.
    """
    if queue is not None:
        yield queue, 0
        return
    start: list[Any] = [] if first is None else [design.key_of(first)]
    while rows := client.view(design.NAME, 'waiting', _HEAD, startkey=start, limit=1, reduce=False):
        key, rank, _ = rows[0]['key']
        if (name := design.queue_of(key)) is not None:
            yield name, int(rank)
        start = [key, LAST]


def _ranges(state: str, queue: str, rank: int, now: float) -> Sequence[_Range]:
    """Return the ranges of a queue's messages in a state; `rank` is the lowest that any of its messages has."""
    key = design.key_of(queue)
    if state == 'parked':
        return [_Range('waiting', design.rows_of(queue, design.PARKED))]
    if rank > design.PLANNED:
        return []
    if state == 'scheduled':
        return [_Range('waiting', design.planned_rows(queue, now))]
    at_once = {'startkey': [key], 'endkey': [key, HIGHEST, LAST]}
    due = {'startkey': [key, design.PLANNED], 'endkey': [key, design.PLANNED, now]}
    ranges = [_Range('waiting', where, waiting.is_row) for where in (at_once, due)]
    return ranges if rank <= HIGHEST else ranges[1:]


def _by_priority(client: Client, due: _Range, after: Any) -> Iterator[tuple[Row, Any]]:
    """Yield the rows of messages that are due, which the view sorts by date only, sorted by priority.

    They are sorted in parts, as workers do. So the place after a row has three members: the last row before its part,
    the last row of its part, and its own order there.
    """
    before, end, done = after or (None, None, None)
    rows = due.rows(client, before)
    while batch := list(islice(rows, BATCH_ROWS)):
        part = [row for row in batch if end is None or row['key'][2] <= end[0][2]]
        rows = chain(batch[len(part) :], rows)
        end = end or [part[-1]['key'], part[-1]['id']]
        for row in sorted(part, key=_order):
            order = list(_order(row))
            if done is None or order > done:
                yield row, [before, end, order]
        before, end, done = end, None, None


def _order(row: Row) -> tuple[int, float, str]:
    found = WaitingRow.of(row)
    return found.rank, found.date, found.id


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
