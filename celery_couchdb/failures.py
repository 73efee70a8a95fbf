"""Failures of a Celery app: tasks whose result is a failure, and messages that became dead letters.

A task that raises an exception leaves a failed result in the database of results. A message that no worker could
process becomes a dead letter in the broker's database. This module finds both, in one list, and sends them again or
deletes them. It works with one of the two if the broker or the result backend of the app is not CouchDB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import compress, islice
from typing import Any, Literal, NamedTuple, TypeVar

from celery import states
from celery.utils.saferepr import saferepr

from kombu_couchdb.admin import dead
from kombu_couchdb.admin.jobs import BATCH_ROWS, FIRST_ROWS, choose, complete, find_all
from kombu_couchdb.admin.listing import mentions
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.documents.task_message import headers_of
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.values import is_number

from .backend import CouchDBBackend
from .connections import backend_of, has_our_broker
from .jobs import Jobs
from .stored_results import StoredResult, StoredResults

#: What failed: the task, or the delivery of its message.
Kind = Literal['failed', 'dead']
KINDS: tuple[Kind, ...] = ('failed', 'dead')

#: The type of the failure that Celery stores when a task rejects its message.
_REJECTED = 'Reject'

#: Up to this number, failures are read to count them if a task may have both kinds.
_MAX_COUNTED = 1000

#: The maximum length of the arguments as text, in characters, as Celery cuts them.
_MAX_REPR = 1024

_CHANGED = 'it was changed by somebody else just now'

T = TypeVar('T')


class FailureFilter(NamedTuple):
    """Which failures are meant; None stands for all."""

    kind: Kind | None = None
    #: The name of the queue. That of a failed result is known only with `result_extended = True`.
    queue: str | None = None
    #: The name of the task.
    task: str | None = None
    #: The type of the exception (`ValueError`) or the kind of the reason of a dead letter (`rejected`), as in groups;
    #: or with a colon the beginning of the error from its type on: `ValueError: no such`.
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
    def dates(self) -> dict[str, Any]:
        """The dates, as arguments of the lists of both kinds."""
        return {'since': self.since, 'until': self.until}

    def matches(self, failure: Failure) -> bool:
        """Tell whether a failure is one of these, apart from its date."""
        return (
            self.kind in (None, failure.kind)
            and self.queue in (None, failure.queue)
            and self.task in (None, failure.task)
            and (self.error is None or failure.has_error(self.error))
            and (self.args is None or failure.mentions(self.args))
        )


#: All failures.
EVERY = FailureFilter()


@dataclass(frozen=True)
class Failure:
    """A dead letter, or a failed result; or both for one task: a dead letter with the error of the result."""

    letter: Document | None
    result: StoredResult | None

    @property
    def id(self) -> str:
        """The id of the task, or of the document of a dead letter without a task."""
        if self.letter is not None:
            return workitem.task_id(self.letter) or str(self.letter['_id'])
        assert self.result is not None
        return self.result.id

    @property
    def kind(self) -> Kind:
        """Whether the task failed, or its message is a dead letter."""
        return 'failed' if self.letter is None else 'dead'

    @property
    def task(self) -> str | None:
        """The name of the task."""
        return (workitem.task_name(self.letter) if self.letter else None) or (self.result.task if self.result else None)

    @property
    def queue(self) -> str | None:
        """The queue of the message, if it is known."""
        found = self.letter.get('queue') if self.letter else self.result.queue if self.result else None
        return found if isinstance(found, str) else None

    @property
    def date(self) -> float:
        """When it failed, in seconds since the epoch; 0 if that is unknown."""
        date = self.letter.get('failed') if self.letter else self.result.date if self.result else None
        return float(date) if is_number(date) else 0.0

    @property
    def reason(self) -> str | None:
        """Why the message is a dead letter."""
        return None if self.letter is None else str(self.letter.get('reason') or dead_letter.OTHER)

    @property
    def error(self) -> str | None:
        """The type and the text of the exception; the reason of a dead letter without a failed result."""
        return self.reason if self.result is None else self.result.error

    @property
    def error_type(self) -> str | None:
        """The kind of the reason of a dead letter, or the type of the exception: what groups have."""
        if self.letter is not None:
            return dead_letter.kind_of(self.letter)
        return self.result.error_type if self.result else None

    def has_error(self, wanted: str) -> bool:
        """Tell whether `FailureFilter.error` selects this failure."""
        text = self.reason or self.error or ''
        return text.startswith(wanted) if ':' in wanted else self.error_type == wanted

    def mentions(self, text: str) -> bool:
        """Tell whether the arguments contain a text."""
        return mentions(self.letter, text) if self.letter is not None else text in self.arguments

    @property
    def arguments(self) -> str:
        """The arguments as Python shows them, in one short line; '' if they are unknown."""
        headers = headers_of(self.letter) if self.letter is not None else {}
        shown: list[Any] = [headers.get('argsrepr'), headers.get('kwargsrepr')]
        if self.result is not None and self.letter is None:
            values = (self.result.args, self.result.kwargs)
            shown = [None if value is None else saferepr(value, _MAX_REPR) for value in values]
        return ' '.join(text for text in shown if isinstance(text, str) and text not in ('()', '[]', '{}'))


@dataclass(frozen=True)
class FailureGroup:
    """Failures of one kind of one task for one reason."""

    kind: Kind
    task: str | None
    #: The type of the exception, or the kind of the reason.
    error: str | None
    count: int
    #: When the first and the last of them failed, in seconds since the epoch.
    first: float
    last: float


class Failures:
    """The failures of an app. *Every* method raises the errors of `kombu_couchdb.errors`.

    Only dead letters are found if the result backend of the app is not CouchDB, and only failed results if its broker
    is not.
    """

    def __init__(self, app: Any, broker: Client | None = None, results: Client | None = None) -> None:
        """Use the clients for the broker's database and that of results, or create them; their users do everything.

        *Raises* `ConfigurationError` if neither is CouchDB, or if one of them cannot be loaded.
        """
        self.jobs = Jobs(app, broker, results) if has_our_broker(app) else None
        self.results = StoredResults(app, results, broker) if isinstance(backend_of(app), CouchDBBackend) else None
        if self.jobs is None and self.results is None:
            raise ConfigurationError(
                'neither the broker nor the result backend of this app is CouchDB: set broker_url or result_backend to '
                'couchdb://…, or name the app with celery -A'
            )

    def now(self) -> float:
        """Return the server's time, in seconds since the epoch."""
        source = self.jobs or self.results
        assert source is not None
        return source.client.clock.now()

    # -- reading

    def listing(self, wanted: FailureFilter = EVERY) -> Iterator[Failure]:
        """Yield failures, the newest first, in batches that are read when they are needed.

        For the first 50 failures of a kind, and then for 200 each, there are three requests: rows, documents, and the
        other kind of the same tasks. You may retry and drop failures while you iterate. What fails again meanwhile is
        newer, and not in the list.
        """
        found: list[Iterator[Failure]] = []
        kinds = (None, *dead_letter.KINDS, dead_letter.OTHER)
        if self.jobs and wanted.kind in (None, 'dead') and wanted.error_type in kinds:
            found.append(self._dead(self.jobs, wanted))
        if self.results and wanted.kind in (None, 'failed'):
            found.append(self._failed(self.results, wanted))
        return filter(wanted.matches, merge(*found, key=lambda failure: -failure.date))

    def leave_out_results(self) -> bool:
        """Show and change dead letters only from now on; return False if there would be nothing, and change nothing."""
        if self.results is None or self.jobs is None:
            return False
        self.results = None
        return True

    def groups(self, wanted: FailureFilter = EVERY) -> list[FailureGroup]:
        """Return failures in groups by kind, task and error, the largest group first.

        Only `kind`, `task` and the type of the error of `wanted` count. One request for each database, however many
        failures there are; up to 1,000 groups of each. The results of rejected messages are left out beside their dead
        letters. Other tasks with both kinds count twice, and results count that have expired and are not deleted yet.
        """
        sources: list[tuple[Kind, Callable[[], list[dead.ErrorGroup]]]] = []
        if self.jobs and wanted.kind in (None, 'dead'):
            client = self.jobs.client
            sources.append(('dead', lambda: dead.groups(client)))
        if self.results and wanted.kind in (None, 'failed'):
            sources.append(('failed', self.results.groups))
        found = [FailureGroup(kind, **vars(group)) for kind, read in sources for group in read()]
        if len(sources) > 1:
            found = [group for group in found if (group.kind, group.error) != ('failed', _REJECTED)]
        return sorted(
            (
                group
                for group in found
                if wanted.task in (None, group.task) and wanted.error_type in (None, group.error)
            ),
            key=lambda group: (-group.count, -group.last),
        )

    def count(self, wanted: FailureFilter = EVERY, most: int | None = None) -> int:
        """Return the number of failures that `listing` yields.

        It is taken from the groups if they tell it, which takes two requests. The failures are read if there are other
        conditions (then at most `most`), or if there are up to 1,000 with failed results; among more, a task with both
        kinds counts twice.
        """
        conditions = (wanted.queue, wanted.since, wanted.until, wanted.args)
        if not any(given is not None for given in conditions) and wanted.error == wanted.error_type:
            groups = self.groups(wanted)
            total = sum(group.count for group in groups)
            if total > _MAX_COUNTED or self.jobs is None or all(group.kind == 'dead' for group in groups):
                return total
        return sum(1 for _ in islice(self.listing(wanted), most))

    def find(self, names: Sequence[str]) -> list[Failure]:
        """Return the failures with these ids: of tasks, of documents of dead letters, or the beginning of one.

        *Raises* `ConfigurationError` if there is no such failure, or if an id is too short or ambiguous.
        """
        found: dict[str, Failure] = {}
        for name, failures in self.named(names).items():
            if not failures:
                full = choose(name, partial(self._complete, name))
                failures = self.named([full])[full] if full else []
            if not failures:
                raise ConfigurationError(f'there is no failure {name!r}')
            found |= {(failure.letter or {'_id': failure.id})['_id']: failure for failure in failures}
        return list(found.values())

    def named(self, names: Sequence[str]) -> dict[str, list[Failure]]:
        """Return the failures with exactly these ids: of tasks, or of documents; a few requests for each 100 ids."""
        docs = find_all(self.jobs.client, names) if self.jobs else {name: [] for name in names}
        letters = {name: [dead.as_letter(doc) for doc in found if dead.is_letter(doc)] for name, found in docs.items()}
        task_ids = {task_id for found in letters.values() for doc in found if (task_id := workitem.task_id(doc))}
        results = self._failed_among({*names, *task_ids})
        return {
            name: [Failure(doc, results.get(workitem.task_id(doc) or '')) for doc in found]
            or ([Failure(None, results[name])] if name in results else [])
            for name, found in letters.items()
        }

    def _complete(self, start: str) -> set[str]:
        found = {*complete(self.jobs.client, start, dead=True)} if self.jobs else set[str]()
        results = self.results.complete(start) if self.results else []
        return found | {result.id for result in results if result.state == states.FAILURE}

    def _dead(self, jobs: Jobs, wanted: FailureFilter) -> Iterator[Failure]:
        where = {'queue': wanted.queue, 'task': wanted.task, 'kind': wanted.error_type, **wanted.dates}
        letters = dead.latest(jobs.client, **where)
        for part in _parts(letters):
            results = self._failed_among({task_id for doc in part if (task_id := workitem.task_id(doc))})
            yield from (Failure(doc, results.get(workitem.task_id(doc) or '')) for doc in part)

    def _failed(self, results: StoredResults, wanted: FailureFilter) -> Iterator[Failure]:
        for part in _parts(results.listing(task=wanted.task, error=wanted.error_type, **wanted.dates)):
            dead_ids = dead.among(self.jobs.client, [result.id for result in part]) if self.jobs else set()
            yield from (Failure(None, result) for result in part if result.id not in dead_ids)

    def _failed_among(self, task_ids: Iterable[str]) -> dict[str, StoredResult]:
        found = self.results.get_many(list(task_ids)) if self.results else {}
        return {task_id: result for task_id, result in found.items() if result.state == states.FAILURE}

    # -- changing

    def retry(
        self,
        failures: Sequence[Failure],
        *,
        queue: str | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[Failure], dict[str, str]]:
        """Replay dead letters, and send failed tasks again; to `queue`, and with other arguments, if they are given.

        See `Jobs.replay` and `StoredResults.retry`: both may be repeated after this process was killed. Return the
        failures that were retried, and the reasons, one sentence each, why others were not, by id.
        """
        letters = [failure.letter for failure in failures if failure.letter is not None]
        results = [failure.result for failure in failures if failure.letter is None and failure.result]
        replayed, kept = self.jobs.replay(letters, queue=queue, args=args, kwargs=kwargs) if self.jobs else ([], {})
        sent, refused = self.results.retry(results, queue=queue, args=args, kwargs=kwargs) if self.results else ([], {})
        done, left = _divided(failures, {doc['_id'] for doc in replayed}, {result.id for result in sent})
        reasons = {each.id: kept[each.letter['_id']] if each.letter else refused[each.id] for each in left}
        return done, reasons

    def drop(self, failures: Sequence[Failure]) -> tuple[list[Failure], dict[str, str]]:
        """Delete dead letters and failed results for good.

        A failure that is both loses the letter first: a process that is killed leaves the failed result, and the call
        can be repeated. Return the failures that were dropped, and the reasons, one sentence each, why others were not,
        by id.
        """
        letters = [failure.letter for failure in failures if failure.letter is not None]
        dropped = {doc['_id'] for doc in dead.drop(self.jobs.client, letters)} if self.jobs else set[str]()
        results = [
            failure.result
            for failure in failures
            if failure.result and (failure.letter is None or failure.letter['_id'] in dropped)
        ]
        deleted = {result.id for result in self.results.drop(results)} if self.results else set[str]()
        done, left = _divided(failures, dropped, deleted)
        return done, {failure.id: _CHANGED for failure in left}


def _divided(failures: Sequence[Failure], letters: set[str], results: set[str]) -> tuple[list[Failure], list[Failure]]:
    """Return the failures that were changed, by the ids of their letters or else of their tasks, and the others."""
    changed = [each.letter['_id'] in letters if each.letter else each.id in results for each in failures]
    done, left = [list(compress(failures, mask)) for mask in (changed, [not one for one in changed])]
    return done, left


def _parts(found: Iterator[T]) -> Iterator[list[T]]:
    """Yield what is found in the batches in which it is read: with one row more than the next request needs."""
    size = FIRST_ROWS + 1
    while part := list(islice(found, size)):
        yield part
        size = BATCH_ROWS
