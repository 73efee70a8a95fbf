"""Room: the base class of the optional parts of results, workers and commands, such as beat, with empty methods.

The rest of the package knows an optional part by this class alone. `celery_couchdb.rooms` lists the subclasses, and
`kombu_couchdb.room` is the same for the broker. A room that an app does not use costs its tasks nothing: `on_result` is
called only for a task with one of the room's `headers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from celery.canvas import Signature

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents.types import Document
from kombu_couchdb.leases.leader import Led

__all__ = ['Elsewhere', 'Room']

#: The documents that take a result to other databases on the broker's server, each with the name of its database; and
#: whether the result is stored among the results, too.
Elsewhere = tuple[list[tuple[str, Document]], bool]


class Room:
    """An optional room. A room overrides what it needs; a process has one instance of each."""

    #: The headers by which tasks belong to the room. The tasks that such a task sends inherit them.
    headers: tuple[str, ...] = ()
    #: The type of the documents of `on_result` that `complete` stores; '' if they are stored as they are.
    completed_type = ''
    #: The name of the room's command `celery couchdb …`; None if it has none.
    command_name: str | None = None
    #: Whether the room has a page.
    has_page = False

    # -- results and publishers

    def on_result(self, backend: Any, request: Any, task_id: str, doc: Any, *, is_result: bool) -> Elsewhere:
        """Return where the result `doc` of the `backend` is stored beside, or instead of, the results.

        `request` is the request of its task, which has one of `headers`, or None. `is_result` is false if the task has
        ended and has no result.
        """
        return [], True

    def complete(self, client: Client, docs: Sequence[Document]) -> None:
        """Write documents of `on_result` into those of the same task in the database of `client`.

        They have the type `completed_type`. *Raises* the errors of `kombu_couchdb.errors`.
        """

    def check_header(self, app: Any, tasks: Iterable[Signature], options: Mapping[str, Any]) -> None:
        """Check the tasks of a chord's header; `options` override those of the tasks.

        *Raises* `ConfigurationError` if they cannot be in a header.
        """

    # -- workers

    def prepare_worker(self, app: Any) -> None:
        """Do what each worker of `app` needs before it starts."""

    def services(self, app: Any, concurrency: int) -> Mapping[str, Led]:
        """Return the loops that a worker runs while it is up, by the names of their threads.

        The broker of `app` is CouchDB, and the worker runs up to `concurrency` tasks at once. Of all workers, one at a
        time leads each loop. The room's own options are fields of `kombu_couchdb.options.Options`.
        """
        return {}

    # -- commands and page

    def command(self) -> Any:
        """Return the command of click whose name is `command_name`."""
        raise NotImplementedError

    def page(self) -> Any:
        """Return the room's page, a `web.view.Page`. It needs the packages of the extra `web`."""
        raise NotImplementedError

    def setup_plans(
        self, app: Any, members: tuple[str, ...], publishers: tuple[str, ...], devices: tuple[str, ...], admin: Any
    ) -> list[tuple[str, list[Any]]]:
        """Return the steps of the command `setup` for the room's databases, by URL; see `cli.setup`."""
        return []

    def vacuum_part(self, app: Any, admin: Any) -> Any:
        """Return the room's part in the command `vacuum`, a `cli.vacuum.VacuumPart`; None if it has none."""
        return None

    def exposition(self, status: Any, seconds: float) -> bytes | None:
        """Return the metrics of a status, which took so many seconds to read, in Prometheus' text format."""
        return None

    def read_history(self, client: Client, hours: float) -> list[Any]:
        """Return the minutes of the last hours in which something happened; see `metrics.history`."""
        return []

    def whereabouts(self, jobs: Any, start: str) -> list[Any]:
        """Return the tasks that are elsewhere and whose ids begin with `start`: `id`, `task`, and where, as `text`.

        So a task with this id that has ended elsewhere is returned, too, with `has_failed` if it can be retried there.
        `jobs` are the `jobs.Jobs` of the app.
        """
        return []

    def retry(self, jobs: Any, task_id: str) -> None:
        """Let a task be retried where it has failed, if the room knows it, see `whereabouts`."""
