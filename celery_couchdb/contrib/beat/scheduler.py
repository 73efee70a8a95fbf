"""The scheduler for `celery beat -S couchdb`, and for workers with `-B --scheduler couchdb`.

Celery's loop calls `CouchDBScheduler.tick`, which leads or looks who leads, and goes on after any error. The leader's
duty, `DueTasks`, reads all entries once, follows their changes, and sends the tasks that are due (`Messages`).

While nothing is due and nobody changes an entry, this causes no requests, however many entries there are. The work is
done in rounds of a few seconds: between them the leader renews its lease and looks for edits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from celery import signals
from celery.beat import BeatLazyFunc, Scheduler
from celery.utils.nodenames import gethostname, nodename
from kombu.exceptions import OperationalError

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client, Document, Row, chunks, winning
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.documents.ids import LEADER
from kombu_couchdb.errors import RETRIED, ConfigurationError, CouchDBError
from kombu_couchdb.leases.leader import LEASE_SECONDS, Duty, LeaderLease, Led
from kombu_couchdb.leases.lease import worker_name
from kombu_couchdb.log import get_logger
from kombu_couchdb.transport import CollectingProducer, Transport

from .due_dates import Decision, decide, done_since, noted, planned
from .entries import (
    CodeEntry,
    Entry,
    Names,
    ScheduleState,
    code_entries,
    deleted_state,
    new_state,
    state_of,
    task_id_of,
    tells_dates,
    to_write,
)

logger = get_logger(__name__)

#: How long an entry stays that has no further due date, and how often such entries are looked for, in seconds.
_DONE_SECONDS, _CLEAN_UP_SECONDS = 604_800.0, 3600.0

#: The most documents in one read.
_READ_DOCS = 1000

#: The most entries and the most tasks in one round, and how long it computes, and then sends, in seconds. The requests
#: come in addition; all together should take a third of the lease at most.
_ROUND_ENTRIES, _ROUND_SECONDS = 250, 1.0


class CouchDBScheduler(Scheduler):
    """A scheduler of which any number may run: one of them, the leader, sends the tasks.

    `schedule` has the entries in the code of the app. The other entries are only in the database, see `Schedules`.
    """

    #: How long a call of `tick` waits at most, in seconds.
    max_interval = 1.0

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._led: Led | None = None
        self._ticking = False
        #: The entries in the code of the app; those with an error, too.
        self.code: dict[str, CodeEntry] = {}
        #: The process that must not end before this one; None if there is none.
        self.parent: int | None = None
        super().__init__(app, *args, **kwargs)

    @property
    def info(self) -> str:
        """The line about this scheduler in the banner of `celery beat`."""
        option = (self.app.conf.broker_transport_options or {}).get('schedule_name')
        return f'    . schedule -> {option}' if option else '    . schedule -> in the database of the broker'

    def setup_schedule(self) -> None:
        """Take over the entries of the code. Malformed ones are logged and left out. No request is made here.

        *Raises* `ConfigurationError` if the broker is not CouchDB.
        """
        with self.app.connection_for_write() as connection:
            if not issubclass(connection.get_transport_cls(), Transport):
                raise ConfigurationError(
                    'the scheduler couchdb needs a broker_url with couchdb://; other brokers need another scheduler'
                )
        self.data: dict[str, Any] = {}
        self.install_default_entries(self.app.conf.beat_schedule)
        self.code = code_entries(self.app, self.data)
        self.data = {name: entry.entry for name, entry in self.code.items() if entry.error is None}
        for name, entry in self.code.items():
            if entry.error is not None:
                logger.error('schedule entry %s of the app is malformed and not used: %s', name, entry.error)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due, wait up to a second for a change, and return 0: call it again at once."""
        if self.parent is not None and os.getppid() != self.parent:
            logger.warning('the worker of this beat has ended without stopping it; beat ends, too')
            raise SystemExit
        self._led = self._led or self._new_led(self.app.connection_for_write())
        self._ticking = True
        try:
            self._led.turn(min(self.max_interval, 1.0))
        finally:
            self._ticking = False
        return 0.0

    def close(self) -> None:
        """Release the lead, so that another process can start at once. The scheduler can be used again."""
        if self._ticking:
            return  # in a signal handler that interrupts `tick`. Celery calls this again when the tick has ended.
        led, self._led = self._led, None
        if led is not None:
            led.close()
            logger.info('this beat has stopped')
        super().close()

    def _new_led(self, connection: Any) -> Led:
        def duty(connection: Any, wake: Callable[[], None]) -> DueTasks:
            return DueTasks(self.app, connection, self.code, wake)

        return Led(connection, duty, 'no tasks are scheduled', 'tasks are scheduled again')


@signals.beat_embedded_init.connect
def _on_embedded_init(sender: Any = None, **_: Any) -> None:
    """Remember the worker of `celery worker -B`: if it is killed, its beat must not go on for ever."""
    if isinstance(scheduler := getattr(sender, 'scheduler', None), CouchDBScheduler):
        scheduler.parent = os.getppid()


# -- the duty of the leader


class _Unread(NamedTuple):
    """An entry that was not taken over yet."""

    doc: Document
    #: Its state, if this process has not taken it over: the document, perhaps malformed, or what is left of a deleted
    #: one; without a revision if this process knows it and it is not stored any more.
    state: Document | None
    #: The document was not written before this date.
    earliest: float = 0.0


class DueTasks(Duty):
    """Sends the tasks that are due. Use it in one thread. *Every* method raises client errors."""

    process = 'this beat'

    def __init__(self, app: Any, connection: Any, code: Mapping[str, CodeEntry], wake: Callable[[], None]) -> None:
        """`code` has the entries in the code of the app. Another thread calls `wake()` when an entry has changed."""
        transport = connection.connection
        self._app, self._code = app, code
        self._client: Client = transport.couchdb
        self._names = Names.of(transport.options.schedule_name)
        node = worker_name() or nodename('beat', gethostname())  # `celery worker -B` is the worker
        super().__init__(LeaderLease(self._client, self._names.leader, node))
        self._messages = Messages(app, connection)
        self._follower = Follower(self._client, 'celery-couchdb-beat-feed', wake)
        self._since: Any = None  # the update sequence up to which the entries are known
        self._clean_up_at = 0.0  # by the server's time
        self._unread: dict[str, _Unread] = {}
        self._entries: dict[str, Entry] = {}
        self._states: dict[str, ScheduleState] = {}  # the one that was changed last is the last

    def rest(self) -> float:
        """Wait until the leader releases the lead."""
        self._follower.take()
        self._follower.follow('now', {'_id': LEADER + self._names.leader, 'holder': None})
        return self._leader.next_in

    def work(self, *, stale: bool) -> float:
        """Take over edits, and send tasks that are due: a part of them, if there are many."""
        changes = self._follower.take()
        if stale:
            self._read_all()
            logger.info('this beat leads from now on, with %d schedule entries', len(self._unread))
        elif changes is not None and changes.last is not None:
            self._apply(changes.rows)
            self._since = changes.last
        # The web interface, too, deletes a document without a body: only its id tells what it was.
        self._follower.follow(self._since, {'_id': {'$regex': f'^{self._names.entries}'}})
        self._plan()
        self._send()
        self._clean_up()
        return self.next_in()

    def close(self) -> None:
        """Release the lead to another process, and end the thread of the follower."""
        self._follower.close()
        super().close()

    def next_in(self) -> float:
        """Return the seconds until the next round is useful; infinite if nothing will be due."""
        if self._unread:
            return 0.0
        due = min((state['due'] for state in self._states.values() if state['due'] is not None), default=None)
        return float('inf') if due is None else max(0.0, due - self._client.clock.now())

    def _read_all(self) -> None:
        """Read all documents, and write those of the code's entries that have changed."""
        self._since = self._client.sequence()
        docs, states = (self._read(prefix) for prefix in (self._names.entries, self._names.states))
        self._sync(self._code.values(), docs)
        left = self._find_states([name for name in docs if name not in states])
        just_now, self._unread = self._just_now(), {}
        for name, doc in docs.items():
            state = states.pop(name, None) or left[name]
            self._unread[name] = _Unread(doc, state, 0.0 if tells_dates(state) else just_now)
        self._entries, self._states = {}, {}
        self._delete([*states.values()])

    def _apply(self, rows: Iterable[Row]) -> None:
        """Take over changes of entries."""
        prefix = self._names.entries
        changed = sorted({row['id'].removeprefix(prefix) for row in rows if row['id'].startswith(prefix)})
        docs = self._client.find([prefix + name for name in changed])
        stored = {name: self._unread[name].state for name in changed if name in self._unread}
        stored |= self._find_states([name for name in changed if name not in self._states and not stored.get(name)])
        deleted, lost = list[Document](), list[CodeEntry]()
        for name, doc in zip(changed, docs, strict=True):
            known = self._unread.get(name) or self._entries.get(name)
            if doc is None:
                states = (self._states.pop(name, None), stored.get(name))
                deleted += [dict(state) for state in states if state and '_rev' in state and '_deleted' not in state]
                self._unread.pop(name, None)
                self._entries.pop(name, None)
                if name in self._code and self._code[name].error is None:
                    logger.warning(
                        'schedule entry %s was deleted and is written again, because it is in the code of the app; '
                        'disable it if it should not be sent',
                        name,
                    )
                    lost.append(self._code[name])
            elif known is None or known.doc['_rev'] != doc['_rev']:
                self._unread[name] = _Unread(doc, stored.get(name), self._just_now())
        self._delete(deleted)
        if lost:
            self._sync(lost, {})

    # -- rounds

    def _plan(self) -> None:
        """Take over entries that were read, and store the states of those whose schedules are new."""
        now, until, fresh = self._client.clock.now(), time.monotonic() + _ROUND_SECONDS, dict[str, ScheduleState]()
        for name, unread in list(islice(self._unread.items(), _ROUND_ENTRIES)):
            state = self._states.get(name) or state_of(unread.state)
            entry = Entry.of(name, unread.doc, self._app, self._code.get(name))
            wanted = planned(entry, state, new_state(self._names.states + name, unread.state), now, unread.earliest)
            self._entries[name] = entry
            if wanted is state and '_rev' in state:
                self._set_state(name, state)
            else:
                fresh[name] = wanted
                if wanted['error']:
                    logger.error('schedule entry %s is not sent: %s', name, wanted['error'])
            if time.monotonic() >= until:
                break
        self.check_term()
        self._store(fresh)

    def _send(self) -> None:
        """Send tasks that are due and note that; first those of entries whose turn was longest ago."""
        now, until = self._client.clock.now(), time.monotonic() + _ROUND_SECONDS
        names = [
            name
            for name, state in self._states.items()
            if state['due'] is not None and state['due'] <= now and name not in self._unread
        ]
        decisions, calls = dict[str, Decision](), list[DueCall]()
        for name in names[:_ROUND_ENTRIES]:
            entry, state = self._entries[name], self._states[name]
            decisions[name] = decision = decide(entry, state, now, max(1, _ROUND_ENTRIES // len(names)))
            calls += [DueCall(entry, due, task_id_of(state, due)) for due in decision.send]
            if time.monotonic() >= until:
                break
        self.check_term()
        results = iter(self._messages.send(calls, _ROUND_SECONDS) if calls else ())
        sent, fresh = self._client.clock.now(), dict[str, ScheduleState]()
        for name, decision in decisions.items():
            answers = dict(zip(decision.send, results, strict=False))  # there may have been no time for the last ones
            if decision.send and not answers:
                break
            errors = {due: f'the due date {due:.3f} was not sent: {error}' for due, error in answers.items() if error}
            fresh[name] = noted(self._states[name], decision.first(len(answers)), errors, sent)
            self._log(name, decision, answers)
        self._store(fresh)

    def _log(self, name: str, decision: Decision, answers: Mapping[float, str | None]) -> None:
        for due, error in answers.items():
            if error is None:
                task, task_id = self._entries[name].task, task_id_of(self._states[name], due)
                logger.info('schedule entry %s: sent task %s with id %s', name, task, task_id)
            else:
                logger.error('a due date of schedule entry %s was not sent: %s', name, error)
        if decision.skipped:
            logger.warning('schedule entry %s: %d due dates were missed and are not sent', name, decision.skipped)
        if decision.error:
            logger.error('schedule entry %s is not sent: %s', name, decision.error)

    def _clean_up(self) -> None:
        """Delete entries that were done long ago, such as those of one date: the feed reports them, as any deletion."""
        if self._unread or (now := self._client.clock.now()) < self._clean_up_at:
            return
        done = [
            deletion(entry.doc)
            for name, entry in self._entries.items()
            if name in self._states
            and entry.doc.get('source') != 'app'
            and (since := done_since(entry, self._states[name])) is not None
            and now - since > _DONE_SECONDS
        ]
        self._clean_up_at = now + (_CLEAN_UP_SECONDS if len(done) <= _ROUND_ENTRIES else 0.0)
        if done:
            count = sum(result.is_stored for result in self._client.bulk(done[:_ROUND_ENTRIES]))
            logger.info('%d schedule entries that were done a week ago are deleted', count)

    # -- documents

    def _read(self, prefix: str) -> dict[str, Document]:
        """Return all documents whose ids have a prefix, by the rest of the id."""
        found: dict[str, Document] = {}
        start = prefix
        while rows := self._client.id_range(start, to=prefix, limit=_READ_DOCS):
            docs = self._client.fetch([row['id'] for row in rows])
            found.update((doc['_id'].removeprefix(prefix), doc) for doc in docs if doc)
            self.renew()
            if len(rows) < _READ_DOCS:
                break
            start = rows[-1]['id'] + '\0'
        return found

    def _sync(self, code: Iterable[CodeEntry], docs: dict[str, Document]) -> None:
        """Write the documents of entries in the code that are not in `docs` as the code has them, and update `docs`."""
        changed, replaced = to_write(code, docs, self._names.entries, self._client.clock.now())
        for name in replaced:
            logger.warning('schedule entry %s of the app is not used: an entry of this name is in the database', name)
        for doc, result in zip(changed, self._client.bulk(changed), strict=True):
            name = doc['_id'].removeprefix(self._names.entries)
            if result.is_stored:
                docs[name] = {**doc, '_rev': result.rev}
                logger.info('schedule entry %s was %s', name, 'removed' if doc.get('removed') else 'updated')
            elif result.is_refused:
                logger.error('schedule entry %s of the app cannot be stored: %s', name, result.reason)
            # After a conflict, the changes feed reports the document.

    def _just_now(self) -> float:
        """Return the earliest time at which the change that was just reported can have been made."""
        return self._client.clock.now() - LEASE_SECONDS

    def _find_states(self, names: Sequence[str]) -> dict[str, Document | None]:
        """Return the states of entries by name; of a deleted one what is left of it."""
        found = dict[str, Document | None]()
        for part in chunks(names, _READ_DOCS):
            ids = sorted(self._client.known([self._names.states + name for name in part]))
            found |= {
                doc_id: winning(leaves) for doc_id, leaves in zip(ids, self._client.fetch_leaves(ids), strict=True)
            }
            self.renew()
        return {name: found.get(self._names.states + name) for name in names}

    def _set_state(self, name: str, state: ScheduleState) -> None:
        self._unread.pop(name, None)
        self._states.pop(name, None)
        self._states[name] = state

    def _delete(self, states: Sequence[Document]) -> None:
        """Delete the states of deleted entries: a new entry of the same name must not continue them."""
        for part in chunks(states, _READ_DOCS):
            self._client.bulk([deleted_state(state, self._client.clock.now()) for state in part])

    def _store(self, states: Mapping[str, ScheduleState]) -> None:
        """Store states, and take over those that another process has changed instead.

        If somebody has deleted or damaged a state, what this process knows is written again.
        """
        conflicts = []
        for name, result in zip(states, self._client.bulk([*states.values()]) if states else (), strict=True):
            if result.is_stored:
                self._set_state(name, {**states[name], '_rev': result.rev})
            elif result.is_conflict:
                self._states.pop(name, None)
                self._unread.setdefault(name, _Unread(self._entries[name].doc, None, self._just_now()))
                conflicts.append(name)
            elif result.is_refused:
                logger.error('schedule entry %s is not sent, because its state is refused: %s', name, result.reason)
                self._unread.pop(name, None)
                self._states.pop(name, None)
            else:
                raise result.exception(self._client.address.url)
        if conflicts:
            logger.debug('the states of %d schedule entries were changed by another process', len(conflicts))
            for name, doc in self._find_states(conflicts).items():
                if state_of(doc) is None:
                    known = {key: value for key, value in states[name].items() if key != '_rev'}
                    doc = {**known, **({} if doc is None or doc.get('_deleted') else {'_rev': doc['_rev']})}
                self._unread[name] = self._unread[name]._replace(state=doc)


# -- messages


class DueCall(NamedTuple):
    """A task to send: one due date of an entry."""

    entry: Entry
    due: float
    task_id: str


def send(app: Any, entry: Entry, producer: Any = None, **options: Any) -> Any:
    """Send the task of an entry as `celery beat` does, and return its result."""
    given = {**entry.options, **options}
    given['headers'] = {**(given.get('headers') or {}), 'celery_beat_task': True}
    args = [_called(value) for value in entry.args or ()]
    kwargs = {name: _called(value) for name, value in (entry.kwargs or {}).items()}
    task = app.tasks.get(entry.task)
    if task is not None:
        return task.apply_async(args, kwargs, producer=producer, **given)
    return app.send_task(entry.task, args, kwargs, producer=producer, **given)


def _called(value: Any) -> Any:
    return value() if isinstance(value, BeatLazyFunc) else value


class Messages:
    """Sends tasks through one connection."""

    def __init__(self, app: Any, connection: Any) -> None:
        self._app, self._connection = app, connection
        self._producer: Any = None

    def send(self, calls: Sequence[DueCall], seconds: float) -> list[str | None]:
        """Send tasks for about `seconds`, and at least one of them.

        Return for each task, of the first ones, why it can never be sent, or None if it was. *Raises* the errors of the
        client; then some of the tasks may have been sent. Call it again with the same tasks.
        """
        if self._producer is None:
            self._producer = self._app.amqp.Producer(self._connection, auto_declare=False)
        with idempotent('beat'):
            producer, until = CollectingProducer(self._producer), time.monotonic() + seconds
            try:
                errors = self._send_until(calls, producer, until, CouchDBError)
                producer.flush()
                return errors
            except RETRIED:
                raise
            except CouchDBError:  # CouchDB refuses one of the messages: find out which
                return self._send_until(calls, self._producer, time.monotonic() + seconds, RETRIED)

    def _send_until(self, calls: Sequence[DueCall], producer: Any, until: float, raised: Any) -> list[str | None]:
        errors: list[str | None] = []
        for call in calls:
            errors.append(self._try(call, producer, raised))
            if time.monotonic() >= until:
                break
        return errors

    def _try(self, call: DueCall, producer: Any, raised: Any) -> str | None:
        """Send one task and return an error that concerns it alone; raise the errors in `raised`."""
        try:
            # The caller repeats what fails: a retry here could outlast the lease.
            send(self._app, call.entry, producer, task_id=call.task_id, retry=False)
        except raised:
            raise
        except OperationalError as exc:
            if isinstance(exc.__cause__, RETRIED):
                raise exc.__cause__ from exc
            return f'{exc!r:.300}'
        except CouchDBError as exc:
            return str(exc)
        except Exception as exc:  # queues, serializers, signals and classes of tasks may raise anything
            return f'{exc!r:.300}'
        return None
