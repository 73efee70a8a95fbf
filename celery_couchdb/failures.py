"""Failures of a Celery app: the messages that became dead letters, sent again or deleted.

A message becomes a dead letter when its task has failed for good, or when no worker could process it. It is kept as a
whole. So its task can be sent again with what follows it in a chain or a chord, whatever the app does with results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kombu_couchdb.admin import dead
from kombu_couchdb.admin.dead import EVERY, FailureFilter, FailureGroup
from kombu_couchdb.admin.jobs import choose, complete, find_all
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.documents.task_message import arguments_in, headers_of
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.values import is_number

from .jobs import Jobs
from .rooms import rooms

__all__ = ['EVERY', 'Failure', 'FailureFilter', 'FailureGroup', 'Failures']

_CHANGED = 'it was changed by somebody else just now'


@dataclass(frozen=True)
class Failure:
    """A dead letter, with what it says about its task."""

    letter: Document

    @property
    def id(self) -> str:
        """The id of the task, or of the document if the message is not from Celery."""
        return workitem.task_id(self.letter) or str(self.letter['_id'])

    @property
    def task(self) -> str | None:
        """The name of the task."""
        return workitem.task_name(self.letter)

    @property
    def queue(self) -> str | None:
        """The queue of the message, if it is known."""
        found = self.letter.get('queue')
        return found if isinstance(found, str) else None

    @property
    def date(self) -> float:
        """When it failed, in seconds since the epoch; 0 if that is unknown."""
        date = self.letter.get('failed')
        return float(date) if is_number(date) else 0.0

    @property
    def reason(self) -> str:
        """The kind of the reason: `failed` if the task failed, else why no worker could process the message."""
        return dead_letter.kind_of(self.letter)

    @property
    def error(self) -> str:
        """The type and the text of the exception, in one short line; or the reason."""
        return dead_letter.error_text(self.letter)

    @property
    def error_type(self) -> str:
        """The type of the exception, or the kind of another reason: what groups have."""
        return dead_letter.error_type(self.letter)

    @property
    def traceback(self) -> str | None:
        """The traceback of the exception."""
        found = dead_letter.error_in(self.letter).get('traceback')
        return found if isinstance(found, str) else None

    @property
    def arguments(self) -> str:
        """The arguments as Python shows them, in one short line; '' if they are unknown."""
        return arguments_in(headers_of(self.letter))


class Failures:
    """The failures of an app. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, app: Any, broker: Client | None = None, results: Client | None = None) -> None:
        """Use the clients for the broker's database and that of results, or create them; their users do everything.

        *Raises* `ConfigurationError` if the broker of the app is not CouchDB.
        """
        self.jobs = Jobs(app, broker, results)

    def now(self) -> float:
        """Return the server's time, in seconds since the epoch."""
        return self.jobs.client.clock.now()

    # -- reading

    def listing(self, wanted: FailureFilter = EVERY) -> Iterator[Failure]:
        """Yield failures, the newest first, in batches that are read when they are needed.

        For the first 50 failures, and then for 200 each, there are two requests. You may retry and drop failures while
        you iterate. What fails again meanwhile is newer, and not in the list.
        """
        return map(Failure, dead.letters(self.jobs.client, wanted))

    def groups(self, wanted: FailureFilter = EVERY) -> list[FailureGroup]:
        """Return failures in groups by task and error, the largest group first.

        The index has up to 1,000 groups, however many failures there are: one request, and another one with dates. For
        a queue, arguments or the text of an error, the failures are read.
        """
        return sorted(dead.groups(self.jobs.client, wanted), key=lambda group: (-group.count, -group.last))

    def count(self, wanted: FailureFilter = EVERY, most: int | None = None) -> int | None:
        """Return the number of failures that `listing` yields.

        The index has it for a queue, a task, a type of error or both, and dates: one request or two. For other filters,
        the failures are read; None if they are more than `most`.
        """
        return dead.count(self.jobs.client, wanted, most)

    def named(self, names: Sequence[str]) -> dict[str, list[Failure]]:
        """Return the failures with exactly these ids: of tasks, or of documents; three requests for each 100 ids."""
        found = find_all(self.jobs.client, names)
        return {name: [Failure(dead.as_letter(doc)) for doc in found[name] if dead.is_letter(doc)] for name in names}

    def find(self, names: Sequence[str]) -> list[Failure]:
        """Return the failures with these ids: of tasks, of documents of dead letters, or the beginning of one.

        *Raises* `ConfigurationError` if there is no such failure, or if an id is too short or ambiguous.
        """
        found: dict[str, Failure] = {}
        for name, failures in self.named(names).items():
            if not failures:
                full = choose(name, partial(complete, self.jobs.client, name, dead=True))
                failures = self.named([full])[full] if full else []
            if not failures:
                elsewhere = [row['text'] for room in rooms() for row in room.whereabouts(self.jobs, name)]
                raise ConfigurationError('; '.join([f'there is no failure {name!r}', *elsewhere]))
            found |= {failure.letter['_id']: failure for failure in failures}
        return list(found.values())

    def is_elsewhere(self, task_id: str) -> bool:
        """Tell whether a task has failed in another place, which keeps its message."""
        return any(row.get('has_failed') for room in rooms() for row in room.whereabouts(self.jobs, task_id))

    # -- changing

    def retry_elsewhere(self, task_id: str) -> None:
        """Let a task be retried in the other place in which it has failed; it may take a while until that begins."""
        for room in rooms():
            room.retry(self.jobs, task_id)

    def retry(
        self,
        failures: Sequence[Failure],
        *,
        queue: str | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[Failure], dict[str, str]]:
        """Put messages back into their queues, or into `queue`, with other arguments if they are given.

        See `Jobs.replay`, which may be repeated after this process was killed. Return the failures that were retried,
        and the reasons, one sentence each, why others were not, by id.
        """
        letters = [failure.letter for failure in failures]
        replayed, kept = self.jobs.replay(letters, queue=queue, args=args, kwargs=kwargs)
        return _divided(failures, replayed, kept)

    def drop(self, failures: Sequence[Failure]) -> tuple[list[Failure], dict[str, str]]:
        """Delete messages for good; results stay.

        Return the failures that were dropped, and the reasons, one sentence each, why others were not, by id.
        """
        dropped = dead.drop(self.jobs.client, [failure.letter for failure in failures])
        return _divided(failures, dropped, {})


def _divided(
    failures: Sequence[Failure], changed: Sequence[Document], reasons: Mapping[str, str]
) -> tuple[list[Failure], dict[str, str]]:
    """Return the failures whose letters were changed, and why the others were not; `reasons` are by document id."""
    ids = {doc['_id'] for doc in changed}
    done = [failure for failure in failures if failure.letter['_id'] in ids]
    left = [failure for failure in failures if failure.letter['_id'] not in ids]
    return done, {failure.id: reasons.get(failure.letter['_id'], _CHANGED) for failure in left}
