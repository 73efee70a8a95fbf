"""Dead letters: list them, count them in groups, put them back into their queues, or delete them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from .. import design
from ..couchdb.bulk import BATCH_DOCS
from ..couchdb.client import LAST, Client, Document, chunks
from ..couchdb.shapes import both, items, members, number, text
from ..documents import dead_letter, validation, workitem
from ..documents.dead_letter import NO_QUEUE
from ..documents.ids import ONCE, job_id
from ..documents.task_message import mentions
from ..documents.types import WorkItem
from ..documents.unique_merge import MOVED, merge
from ..queues.unique_jobs import enqueue, was_enqueued
from ..values import is_number
from .jobs import FIRST_ROWS, needs_jobs_view, paged

#: The shape of the rows of the views of dead letters.
_LETTER = members(id=text, key=items(lambda part: True))

#: The shapes of the views `failures` and `dead`, reduced to numbers, and of the responses to several queries.
_STATS = members(count=number, min=number, max=number)
_NUMBER = members(value=lambda value: number(value) or _STATS(value))
_RESULTS = members(results=items(members(rows=items(members(value=_STATS)))))

#: The shape of the rows of the view `failures`, reduced to groups.
_GROUP = members(key=both(items(lambda part: True), lambda key: len(key) > 1), value=_STATS)

#: The maximum number of groups that are read.
_MAX_GROUPS = 1000

#: What is done with letters before they are replayed.
Before = Callable[[Sequence[Document]], object]


@dataclass(frozen=True)
class FailureGroup:
    """Dead letters of one task for one reason."""

    task: str | None
    #: The type of the exception if the task failed, else the kind of the reason; see `documents.dead_letter`.
    error: str | None
    count: int
    #: When the first and the last of them failed, in seconds since the epoch.
    first: float
    last: float


class FailureFilter(NamedTuple):
    """Which dead letters are meant; None stands for all."""

    #: The name of the queue.
    queue: str | None = None
    #: The name of the task.
    task: str | None = None
    #: The type of the exception (`ValueError`) or the kind of another reason (`rejected`), as in groups; or with a
    #: colon the beginning of the error from its type on: `ValueError: no such`.
    error: str | None = None
    #: When the task failed, at the earliest and at the latest, in seconds since the epoch.
    since: float | None = None
    until: float | None = None
    #: Text that the arguments, as Python shows them, must contain.
    args: str | None = None

    @property
    def error_type(self) -> str | None:
        """The type of the exception or the kind of the reason."""
        return None if self.error is None else self.error.partition(':')[0]

    @property
    def is_indexed(self) -> bool:
        """Whether the rows of a view are those of these letters, so that none must be read."""
        by_task = self.task is not None or self.error is not None
        return self.args is None and self.error == self.error_type and not (self.queue is not None and by_task)

    def matches(self, letter: Document) -> bool:
        """Tell whether a dead letter is one of these, apart from its date."""
        return (
            self.queue in (None, letter.get('queue'))
            and self.task in (None, workitem.task_name(letter))
            and self.error_type in (None, dead_letter.error_type(letter))
            and (self.error == self.error_type or dead_letter.error_text(letter).startswith(str(self.error)))
            and (self.args is None or mentions(letter, self.args))
        )

    def dates(self) -> tuple[list[float], Any]:
        """Return the last parts of the first and of the last key of rows between the dates."""
        return [] if self.since is None else [self.since], LAST if self.until is None else self.until

    def rows(self) -> tuple[str, str, list[Any], list[Any]]:
        """Return a design document, its view, and the first and the last key of rows with these letters."""
        after, last = self.dates()
        if self.queue is not None:
            name, view, start = design.NAME, 'dead', [design.key_of(self.queue)]
        else:
            name, view, task, error = design.JOBS, 'failures', self.task, self.error_type
            start = ['date'] if task is None else ['task', task] if error is None else ['group', task, error]
        return name, view, [*start, *after], [*start, last]


#: All dead letters.
EVERY = FailureFilter()


def letters(client: Client, wanted: FailureFilter = EVERY) -> Iterator[Document]:
    """Yield dead letters, the latest first, in batches that are read when they are needed.

    Two requests for the first 50, then for 200 each. You may delete or replay the letters while you iterate.
    """
    name, view, first, last = wanted.rows()
    where = {'startkey': last, 'endkey': first, 'descending': True, 'include_docs': True}
    with needs_jobs_view(client):
        for row in paged(client, name, view, _LETTER, first=FIRST_ROWS, **where, reduce=False):
            if (doc := row.get('doc')) and is_letter(doc) and wanted.matches(letter := as_letter(doc)):
                yield letter


def count(client: Client, wanted: FailureFilter = EVERY, most: int | None = None) -> int | None:
    """Return the number of dead letters that `letters` yields.

    The index has it for a queue, a task, a type of error or both, and dates: one request or two. For other filters, the
    letters are read; None if they are more than `most`.
    """
    if wanted.is_indexed and (found := _counted(client, wanted)) is not None:
        return found
    read = sum(1 for _ in islice(letters(client, wanted), None if most is None else most + 1))
    return read if most is None or read <= most else None


def _counted(client: Client, wanted: FailureFilter) -> int | None:
    """Return the number of rows that match; None if no range of keys has them, and there may be more groups."""
    if wanted.task is None and wanted.error is not None:
        known = _known(client)
        return sum(group.count for group in _selected(client, known, wanted)) if len(known) < _MAX_GROUPS else None
    name, view, first, last = wanted.rows()
    with needs_jobs_view(client):
        values = [row['value'] for row in client.view(name, view, _NUMBER, startkey=first, endkey=last)]
    return sum(int(value['count'] if isinstance(value, dict) else value) for value in values)


def groups(client: Client, wanted: FailureFilter = EVERY) -> list[FailureGroup]:
    """Return dead letters in groups by task and error.

    The index has up to 1,000 groups: one request, and another one with dates. For a queue, arguments or the text of an
    error, the letters are read.
    """
    if wanted.is_indexed and wanted.queue is None:
        return _selected(client, _known(client), wanted)
    dates: dict[tuple[str | None, str], list[float]] = {}
    for letter in letters(client, wanted):
        date = letter.get('failed')
        key = workitem.task_name(letter), dead_letter.error_type(letter)
        dates.setdefault(key, []).append(float(date) if is_number(date) else 0.0)
    return [FailureGroup(task, error, len(some), min(some), max(some)) for (task, error), some in dates.items()]


def _known(client: Client) -> list[FailureGroup]:
    """Return all groups; one request."""
    where = {'startkey': ['group'], 'endkey': ['group', LAST], 'group_level': 3, 'limit': _MAX_GROUPS}
    with needs_jobs_view(client):
        rows = client.view(design.JOBS, 'failures', _GROUP, **where)
    keys = [[part if isinstance(part, str) else None for part in row['key'][-2:]] for row in rows]
    return [_group(task, error, row['value']) for (task, error), row in zip(keys, rows, strict=True)]


def _selected(client: Client, known: Sequence[FailureGroup], wanted: FailureFilter) -> list[FailureGroup]:
    """Return those groups that match, with the numbers between the dates; one request with dates, or none."""
    found = [each for each in known if wanted.task in (None, each.task) and wanted.error in (None, each.error)]
    if not found or (wanted.since, wanted.until) == (None, None):
        return found
    after, last = wanted.dates()
    keys = [['group', each.task, each.error] for each in found]
    queries = [{'startkey': [*key, *after], 'endkey': [*key, last]} for key in keys]
    results = client.query(design.JOBS, 'POST', 'failures/queries', None, {'queries': queries}, shape=_RESULTS)
    rows = [result['rows'] for result in results['results']]
    return [_group(each.task, each.error, row['value']) for each, some in zip(found, rows, strict=True) for row in some]


def _group(task: str | None, error: str | None, stats: Document) -> FailureGroup:
    return FailureGroup(task, error, int(stats['count']), float(stats['min']), float(stats['max']))


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


def replay(
    client: Client, docs: Sequence[Document], *, before: Before | None = None
) -> tuple[list[Document], dict[str, str]]:
    """Put dead letters back at the end of their queues, as if they had never been delivered.

    Each is written in the revision that was read, so the caller may have changed its message. `before` is called with
    the letters that can be replayed, before their messages can be delivered again. Return the replayed letters, and the
    reasons, one sentence each, why others were not replayed, by document id.
    """
    replayed: list[Document] = []
    refused: dict[str, str] = {}
    pairs: list[tuple[Document, WorkItem]] = []  # the letter, and the document to write
    for doc in docs:
        item = {name: value for name, value in doc.items() if name not in ('status', 'reason', 'failed', 'error')}
        if not workitem.is_dead(doc):
            refused[doc['_id']] = 'it is no dead letter (any more)'
        elif not isinstance(doc.get('queue'), str):
            refused[doc['_id']] = f'it cannot be delivered: {NO_QUEUE}'
        elif reason := validation.malformed_reason({**item, 'claimed': None}):
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
    for part in chunks(pairs, BATCH_DOCS):
        if before:
            before([doc for doc, _ in part])
        for (doc, _), result in zip(part, client.bulk([changed for _, changed in part]), strict=True):
            if result.is_stored:
                replayed.append(doc)
            else:
                refused[doc['_id']] = 'it was changed by somebody else just now'
    return replayed, refused


def _replay_unique(client: Client, letter: Document, before: Before | None) -> bool:
    """Enqueue a dead unique job again and delete the letter; return False if another job with its key waits."""
    job = job_id(letter['queue'], letter['message']['headers'].get('task'), letter['key'])
    again = dead_letter.replayed(validation.checked(letter), client.clock.now())
    again['_id'] = job
    del again['_rev']
    # A message of its own: the job's document may say that the one with the former delivery tag is done. The tag is
    # made of the letter: whoever replays it at the same moment, or after a kill, publishes the same message.
    tag = ONCE + letter['_id']
    again['message'] = {**again['message'], 'properties': {**again['message']['properties'], 'delivery_tag': tag}}
    if not was_enqueued(client, again):  # otherwise it may have run, and `before` would forget its result
        [found] = client.fetch([job])
        if merge(found, again, client.clock.now())[1].what == MOVED:
            return False
        if before:
            before([letter])
        enqueue(client, again)
    client.bulk([workitem.deleted(letter)])
    return True


def drop(client: Client, docs: Sequence[Document]) -> list[Document]:
    """Delete dead letters for good and return them. Letters that were replayed or changed are kept."""
    letters = [doc for doc in docs if workitem.is_dead(doc)]
    return [
        doc
        for part in chunks(letters, BATCH_DOCS)
        for doc, result in zip(part, client.bulk([workitem.deleted(doc) for doc in part]), strict=True)
        if result.is_stored
    ]
