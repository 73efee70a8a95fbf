"""The duty of the beat that leads: it reads all entries once, follows their changes, and sends the tasks that are due.

While nothing is due and nobody changes an entry, this causes no requests, however many entries there are. The work is
done in rounds of a few seconds: between them the leader renews its lease and looks for edits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.changes import Follower
from kombu_couchdb.couchdb.client import Client, Document, Row, chunks
from kombu_couchdb.documents.ids import LEADER
from kombu_couchdb.leases.leader import LEASE_SECONDS, Duty, LeaderLease
from kombu_couchdb.log import get_logger

from .due_dates import Decision, decide, noted, planned
from .entries import CodeEntry, Entry, Names, ScheduleState, state_of, task_id_of, to_write
from .messages import DueCall, Messages

logger = get_logger(__name__)

#: The most documents in one read.
_READ_DOCS = 1000

#: The most entries and the most tasks in one round, and how long it computes, and then sends, in seconds. The requests
#: come in addition; all together should take a third of the lease at most.
_ROUND_ENTRIES, _ROUND_SECONDS = 250, 1.0


class _Unread(NamedTuple):
    """A document that was not taken over yet, and the date before which it has no due date."""

    doc: Document
    earliest: float


class DueTasks(Duty):
    """Sends the tasks that are due. Use it in one thread. *Every* method raises client errors."""

    process = 'this beat'

    def __init__(self, app: Any, connection: Any, code: Mapping[str, CodeEntry], wake: Callable[[], None]) -> None:
        """`code` has the entries in the code of the app. Another thread calls `wake()` when an entry has changed."""
        transport = connection.connection
        self._app, self._code = app, code
        self._client: Client = transport.couchdb
        self._names = Names.of(transport.options.schedule)
        super().__init__(LeaderLease(self._client, self._names.leader))
        self._messages = Messages(app, connection)
        self._follower = Follower(self._client, 'celery-couchdb-beat-feed', wake)
        self._since: Any = None  # the update sequence up to which the entries are known
        self._unread: dict[str, _Unread] = {}
        self._stored: dict[str, Document] = {}  # the states of entries that were not taken over yet
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
        docs, self._stored = (self._read(prefix) for prefix in (self._names.entries, self._names.states))
        self._sync(docs)
        self._unread = {name: _Unread(doc, 0.0) for name, doc in docs.items()}
        self._entries, self._states = {}, {}
        self._delete([self._stored.pop(name) for name in [*self._stored] if name not in docs])

    def _apply(self, rows: Iterable[Row]) -> None:
        """Take over changes of entries."""
        changed = dict.fromkeys(
            row['id'].removeprefix(self._names.entries) for row in rows if row['id'].startswith(self._names.entries)
        )
        docs = self._client.find([self._names.entries + name for name in changed])
        self._find_states([name for name in changed if name not in self._states and name not in self._stored])
        deleted = list[Mapping[str, Any]]()
        for name, doc in zip(changed, docs, strict=True):
            known = self._unread.get(name) or self._entries.get(name)
            if doc is None:
                deleted += [state for state in (self._states.pop(name, None), self._stored.pop(name, None)) if state]
                self._unread.pop(name, None)
                self._entries.pop(name, None)
            elif known is None or known.doc['_rev'] != doc['_rev']:
                self._unread[name] = _Unread(doc, self._just_now())
        self._delete(deleted)

    # -- rounds

    def _plan(self) -> None:
        """Take over entries that were read, and store the states of those whose schedules are new."""
        now, until, fresh = self._client.clock.now(), time.monotonic() + _ROUND_SECONDS, dict[str, ScheduleState]()
        for name, unread in list(islice(self._unread.items(), _ROUND_ENTRIES)):
            doc = self._stored.get(name)
            state = self._states.get(name) or state_of(doc)
            entry = Entry.of(name, unread.doc, self._app, self._code.get(name))
            rev = doc['_rev'] if doc else None
            wanted = planned(entry, state, self._names.states + name, rev, now, unread.earliest)
            self._entries[name] = entry
            if wanted is state:
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

    def _sync(self, docs: dict[str, Document]) -> None:
        """Write the documents of the code's entries that have changed, and update `docs`."""
        changed, replaced = to_write(self._code.values(), docs, self._names.entries, self._client.clock.now())
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

    def _find_states(self, names: Sequence[str]) -> None:
        docs = self._client.find([self._names.states + name for name in names])
        self._stored.update((name, doc) for name, doc in zip(names, docs, strict=True) if doc)

    def _set_state(self, name: str, state: ScheduleState) -> None:
        self._unread.pop(name, None)
        self._stored.pop(name, None)
        self._states.pop(name, None)
        self._states[name] = state

    def _delete(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Delete the states of deleted entries: a new entry of the same name must not continue them."""
        for part in chunks(states, _READ_DOCS):
            self._client.bulk([deletion(state) for state in part])

    def _store(self, states: Mapping[str, ScheduleState]) -> None:
        """Store states, and take over those that another process has changed instead."""
        conflicts = []
        for name, result in zip(states, self._client.bulk([*states.values()]) if states else (), strict=True):
            if result.is_stored:
                self._set_state(name, {**states[name], '_rev': result.rev})
            elif result.is_conflict:
                self._states.pop(name, None)
                self._unread.setdefault(name, _Unread(self._entries[name].doc, self._just_now()))
                conflicts.append(name)
            elif result.is_refused:
                logger.error('schedule entry %s is not sent, because its state is refused: %s', name, result.reason)
                self._unread.pop(name, None)
                self._states.pop(name, None)
            else:
                raise result.exception(self._client.address.url)
        if conflicts:
            logger.debug('the states of %d schedule entries were changed by another process', len(conflicts))
            self._find_states(conflicts)
