"""Beats in a model: their scheduler, duty and leader as they are, a database in memory, and clocks that a test sets.

A beat stops at each request and before each decision: there it may be killed or cut off, and anything else may happen
meanwhile. The messages of tasks are only recorded, under the ids that they have in CouchDB.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from celery import Celery

from celery_couchdb.contrib.beat import CouchDBScheduler, due_dates
from celery_couchdb.contrib.beat import scheduler as beat_scheduler
from kombu_couchdb.couchdb.changes import Changes
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.documents.types import Document
from kombu_couchdb.leases import leader

__all__ = ['Beat', 'Killed', 'World']

START = 1_763_709_000.0

#: The ids of tasks are known for so long, in seconds; those that no beat has noted are known until one has. (See the
#: limits in docs/howto/beat.rst.)
_KNOWN_SECONDS = 300.0


class Killed(BaseException):
    """The process is killed here."""


class World:
    """The database, the time, and what was sent."""

    def __init__(self) -> None:
        #: The seconds since the start, and how far the server's clock is ahead of the true time.
        self.elapsed, self.server_step = 0.0, 0.0
        #: The documents, and what is left of deleted ones.
        self.docs: dict[str, Document] = {}
        self.deleted: dict[str, Document] = {}
        self.changed: dict[str, int] = {}
        self.seq = itertools.count(1)
        #: The due dates that were sent, as entry and date, and the times at which CouchDB learned the ids of tasks.
        self.sent: list[tuple[str, float]] = []
        self.known: dict[str, float] = {}
        #: The latest time that the server's clock has shown.
        self.latest = 0.0
        self.beats: list[Beat] = []
        #: Called at each request and before each decision of a beat.
        self.on_stop: Callable[[Beat], None] = lambda beat: None

    @property
    def now(self) -> float:
        """The server's time."""
        return START + self.elapsed + self.server_step

    def put(self, name: str, doc: Document) -> None:
        """Write an entry, as any program may."""
        self.write({**doc, '_id': f'beat:entry:{name}'})

    def write(self, doc: Document) -> str:
        number = next(self.seq)
        self.docs[doc['_id']], self.changed[doc['_id']] = {**doc, '_rev': f'{number}-x'}, number
        return f'{number}-x'

    def delete(self, doc_id: str, left: Document | None = None) -> None:
        """Delete a document; `left` is what is left of it, with its id."""
        number, _ = next(self.seq), self.docs.pop(doc_id)
        self.deleted[doc_id] = {**(left or {'_id': doc_id}), '_rev': f'{number}-x', '_deleted': True}
        self.changed[doc_id] = number

    def leaders(self) -> list[Beat]:
        """Return the beats that lead now."""
        return [beat for beat in self.beats if beat.duty is not None and beat.duty._leader.leads]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the modules of the product the clock of this world."""
        clock = SimpleNamespace(monotonic=lambda: self.elapsed)
        stop = due_dates.decide

        def decide(entry: Any, *args: Any) -> Any:
            self.on_stop(next(beat for beat in self.beats if beat.is_running))
            return stop(entry, *args)

        with (
            mock.patch.object(leader, 'time', clock),
            mock.patch.object(leader, 'uptime', clock.monotonic),
            mock.patch.object(beat_scheduler, 'time', clock),
            mock.patch.object(beat_scheduler, 'decide', decide),
            mock.patch.object(beat_scheduler, 'Follower', ModelFollower),
            mock.patch.object(beat_scheduler, 'Messages', ModelMessages),
        ):
            yield


class Clock:
    """The clock of one process, see `ServerClock`: the server's time at the last response, and the time since."""

    def __init__(self, world: World) -> None:
        self._world, self._offset = world, world.server_step
        #: The error of the local clock in seconds, and how far the server's time has run ahead.
        self.local_step = self.gained = 0.0

    def now(self) -> float:
        return START + self._world.elapsed + self._offset

    def observe(self) -> None:
        self.gained += max(0.0, self._world.server_step - self._offset)
        self._offset = self._world.server_step


class ModelClient:
    """The methods of `Client` that beat calls."""

    address = SimpleNamespace(url='http://model/celery')

    def __init__(self, beat: Beat) -> None:
        self._beat, self.world, self.clock = beat, beat.world, Clock(beat.world)

    def _stop(self) -> None:
        self.world.on_stop(self._beat)

    def bulk(self, docs: Sequence[Document]) -> list[WriteResult]:
        self._stop()
        results = []
        for doc in docs:
            mine = self.world.docs.get(doc['_id'])
            if doc.get('_rev') != (mine and mine['_rev']):
                results.append(WriteResult.conflict(doc['_id']))
                continue
            if doc.get('_deleted'):
                self.world.delete(doc['_id'], doc)
                rev = ''
            else:
                rev = self.world.write(doc)
            results.append(WriteResult(doc['_id'], WriteStatus.STORED, rev))
        self._responded()
        return results

    def find(self, ids: Sequence[str]) -> list[Document | None]:
        self._stop()
        found = [self.world.docs.get(doc_id) for doc_id in ids]
        self._responded()
        return found

    fetch = find

    def known(self, ids: Sequence[str]) -> set[str]:
        self._stop()
        found = {doc_id for doc_id in ids if doc_id in self.world.docs or doc_id in self.world.deleted}
        self._responded()
        return found

    def fetch_leaves(self, ids: Sequence[str]) -> list[list[Document]]:
        self._stop()
        found = [[self.world.docs.get(doc_id) or self.world.deleted[doc_id]] for doc_id in ids]
        self._responded()
        return found

    def get_or_none(self, doc_id: str) -> Document | None:
        return self.find([doc_id])[0]

    def sequence(self) -> int:
        return max(self.world.changed.values(), default=0)

    def id_range(self, start: str, to: str, limit: int) -> list[Any]:
        self._stop()
        found = [{'id': doc_id} for doc_id in sorted(self.world.docs) if start <= doc_id < to + '\uffff']
        self._responded()
        return found[:limit]

    def create_once(self, calls: Sequence[Any]) -> None:
        """Store the messages of tasks, each once while CouchDB knows its id."""
        self._stop()
        world = self.world
        for call in calls:
            assert call.due <= world.now + 1e-6 or call.due <= world.latest, f'{call.due} was sent early'
            last = (world.docs.get(f'beat:state:{call.entry.name}') or {}).get('last') or 0.0
            age = world.elapsed - world.known.get(call.task_id, -1e9)
            if call.task_id not in world.known or (age > _KNOWN_SECONDS and last >= call.due):
                world.sent.append((call.entry.name, call.due))
            world.known.setdefault(call.task_id, world.elapsed)
        self._responded()

    def _responded(self) -> None:
        self._stop()
        self.clock.observe()


class ModelMessages:
    """Sends tasks, see `Messages`."""

    def __init__(self, app: Celery, connection: ModelConnection) -> None:
        self._client = connection.connection.couchdb

    def send(self, calls: Sequence[Any], seconds: float) -> list[str | None]:
        self._client.create_once(calls)
        return [None] * len(calls)


class ModelFollower:
    """Follows the entries, see `Follower`. It reports when the model lets it."""

    def __init__(self, client: ModelClient, name: str, wake: Callable[[], None]) -> None:
        self._client, self._wake = client, wake
        self._since: int | None = None
        self._report: Changes | None = None

    def follow(self, since: Any, selector: Document) -> None:
        self._since = None if since == 'now' else since

    def take(self) -> Changes | None:
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        pass

    def report(self) -> None:
        """Report the changes of entries, as the feed does at some time."""
        world = self._client.world
        rows: list[Any] = [
            {'id': doc_id}
            for doc_id, seq in world.changed.items()
            if self._since is not None and seq > self._since and doc_id.startswith('beat:entry:')
        ]
        if rows:
            self._report = Changes(rows, self._client.sequence())


class ModelConnection:
    """A connection of kombu to the model."""

    def __init__(self, client: ModelClient) -> None:
        self.connection = SimpleNamespace(couchdb=client, options=SimpleNamespace(schedule_name=None))

    def release(self) -> None:
        pass


class Beat:
    """A process that runs beat."""

    def __init__(self, world: World, app: Celery) -> None:
        self.world, self._app, self.is_running = world, app, False
        self.start()

    def start(self) -> None:
        """Start the process, also in place of a killed one."""
        self.client = ModelClient(self)
        connection: Any = ModelConnection(self.client)
        self.scheduler = CouchDBScheduler(self._app)
        self.scheduler.max_interval = 0.0
        self.scheduler._led = self.scheduler._new_led(connection)

    @property
    def duty(self) -> Any:
        """The duty of the process; None until it has ticked."""
        return self.scheduler._led.duty if self.scheduler._led is not None else None

    def tick(self, sees: bool = True) -> None:
        """Do one step; `sees` says whether the feed has reported the changes."""
        if sees and self.duty is not None:
            self.duty._follower.report()
        assert self.scheduler._led is not None
        self.scheduler._led._wake.set()  # each tick is a step
        self.is_running = True
        try:
            self.scheduler.tick()
        except Killed:
            self.start()
        finally:
            self.is_running = False
