"""The leader's duty: it reads all entries once, follows their changes, and sends what is due.

While nothing is due and nobody changes an entry, this causes no requests, however many entries there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Document, Row, chunks
from kombu_couchdb.log import get_logger

from . import code as code_of_app
from .agenda import Agenda
from .due import Decision, decide, noted, planned
from .entries import Entry, Names, ScheduleState, state_of, task_id_of
from .messages import Call, Messages

__all__ = ['Duty']

logger = get_logger(__name__)

#: The most documents in one read, entries in one round, and due dates of an entry in one round.
_READ_DOCS, _ROUND_ENTRIES, _ROUND_DATES = 1000, 500, 500


class Duty:
    """The work of one leader, from when it takes the lead until it loses it. *Every* method raises client errors.

    After an error this object must not be used any more: a new one reads what was stored.
    """

    def __init__(
        self,
        app: Any,
        client: Client,
        names: Names,
        code: Mapping[str, Any],
        messages: Messages,
        leads: Callable[[], bool],
    ) -> None:
        """`code` has Celery's entries in the code of the app; `leads()` tells whether this process leads now."""
        self._app, self._client, self._names, self._code = app, client, names, code
        self._messages, self._leads = messages, leads
        self._agenda = Agenda()

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The entries by name."""
        return self._agenda.entries

    def start(self) -> Any:
        """Read all documents, and write those of the code's entries that have changed.

        Return the update sequence from which on changes of entries must be given to `apply`.
        """
        since = self._client.sequence()
        docs, states = (self._read(prefix) for prefix in (self._names.entries, self._names.states))
        self._sync(docs)
        self._agenda.entries = {
            name: Entry.of(name, doc, self._app, self._code.get(name)) for name, doc in docs.items()
        }
        self._plan(docs, states)
        self._delete([doc for name, doc in states.items() if name not in docs])
        return since

    def apply(self, rows: Iterable[Row]) -> None:
        """Take over changes of entries, as the changes feed reports them with their documents."""
        changed = dict.fromkeys(
            row['id'].removeprefix(self._names.entries) for row in rows if row['id'].startswith(self._names.entries)
        )
        # A row may be older than the document, and has none if the document cannot be decoded.
        docs = self._client.find([self._names.entries + name for name in changed])
        deleted = []
        for name, doc in zip(changed, docs, strict=True):
            known = self._agenda.entries.get(name)
            if doc is None:
                deleted.append(self._agenda.states.get(name))
                self._agenda.remove(name)
            elif known is None or known.doc['_rev'] != doc['_rev']:
                self._agenda.entries[name] = Entry.of(name, doc, self._app, self._code.get(name))
        names = [name for name in changed if name in self._agenda.entries]
        unknown = [name for name in names if name not in self._agenda.states]
        self._plan(names, self._find_states(unknown))
        self._delete([state for state in deleted if state])

    def send_due(self) -> None:
        """Send all tasks that are due, while this process leads."""
        while self._leads():
            now = self._client.clock.now()
            names = list(dict.fromkeys(self._agenda.pop_due(now, _ROUND_ENTRIES)))
            if not names:
                return
            self._send_round(names, now)

    def next_due(self) -> float:
        """Return the seconds until the next due date; infinite if there is none."""
        due = self._agenda.next_due()
        return float('inf') if due is None else max(0.0, due - self._client.clock.now())

    # -- rounds

    def _send_round(self, names: Sequence[str], now: float) -> None:
        decisions: dict[str, tuple[Decision, str | None]] = {name: self._decide(name, now) for name in names}
        calls: list[tuple[str, Call]] = []
        for name, (decision, _) in decisions.items():
            entry, state = self._agenda.entries[name], self._agenda.states[name]
            calls += [(name, Call(entry, due, task_id_of(state, due))) for due in decision.send]
        if calls and not self._leads():
            return
        failed = self._messages.send([call for _, call in calls]) if calls else {}
        errors: dict[str, dict[float, str]] = {name: {} for name in names}
        for name, call in calls:
            if call.task_id in failed:
                errors[name][call.due] = f'the due date {call.due:.3f} was not sent: {failed[call.task_id]}'
                logger.error('a due date of schedule entry %s was not sent: %s', name, failed[call.task_id])
            else:
                logger.info('schedule entry %s: sent task %s with id %s', name, call.entry.task, call.task_id)
        for name, (decision, _) in decisions.items():
            if decision.skipped:
                logger.warning('schedule entry %s: %d due dates were missed and are not sent', name, decision.skipped)
        sent = self._client.clock.now()
        self._store(
            {
                name: noted(self._agenda.states[name], decision, errors[name], sent, error)
                for name, (decision, error) in decisions.items()
            }
        )

    def _decide(self, name: str, now: float) -> tuple[Decision, str | None]:
        entry, state = self._agenda.entries[name], self._agenda.states[name]
        try:
            return decide(entry, state, now, _ROUND_DATES), None
        except Exception as exc:  # schedules in the code of the app may raise anything
            assert state['due'] is not None
            return Decision([state['due']], 0, None), f'its next due date cannot be computed: {exc!r:.300}'

    # -- documents

    def _read(self, prefix: str) -> dict[str, Document]:
        """Return all documents whose ids have a prefix, by the rest of the id."""
        found: dict[str, Document] = {}
        start = prefix
        while rows := self._client.id_range(start, to=prefix, limit=_READ_DOCS):
            docs = self._client.fetch([row['id'] for row in rows])
            found.update((doc['_id'].removeprefix(prefix), doc) for doc in docs if doc)
            if len(rows) < _READ_DOCS:
                break
            start = rows[-1]['id'] + '\0'
        return found

    def _sync(self, docs: dict[str, Document]) -> None:
        """Write the documents of the code's entries that have changed, and update `docs`."""
        changed, replaced = code_of_app.to_write(
            self._code.values(), docs, self._names.entries, self._client.clock.now()
        )
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

    def _find_states(self, names: Sequence[str]) -> dict[str, Document]:
        ids = [self._names.states + name for name in names]
        return {name: doc for name, doc in zip(names, self._client.find(ids), strict=True) if doc}

    def _plan(self, names: Iterable[str], stored: Mapping[str, Document]) -> None:
        """Set the states of entries that were read, and store those whose schedules are new.

        `stored` has the states that are not known yet.
        """
        now, fresh = self._client.clock.now(), dict[str, ScheduleState]()
        for name in names:
            doc = stored.get(name)
            state = self._agenda.states.get(name) or state_of(doc)
            entry = self._agenda.entries[name]
            wanted = planned(entry, state, self._names.states + name, doc['_rev'] if doc else None, now)
            if wanted is state:
                self._agenda.set_state(name, state)
                continue
            fresh[name] = wanted
            if wanted['error']:
                logger.error('schedule entry %s is not sent: %s', name, wanted['error'])
        self._store(fresh)

    def _delete(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Delete the states of deleted entries: a new entry of the same name must not continue them."""
        for part in chunks(states, _READ_DOCS):
            self._client.bulk([deletion(state) for state in part])

    def _store(self, states: Mapping[str, ScheduleState]) -> None:
        """Store states, and take over those that another process has changed instead."""
        conflicts = []
        for names in chunks(list(states), _READ_DOCS):
            results = self._client.bulk([states[name] for name in names])
            for name, result in zip(names, results, strict=True):
                if result.is_stored:
                    self._agenda.set_state(name, {**states[name], '_rev': result.rev})
                elif result.is_conflict:
                    self._agenda.states.pop(name, None)
                    conflicts.append(name)
                else:
                    raise result.exception(self._client.address.url)
        if conflicts:
            logger.debug('the states of %d schedule entries were changed by another process', len(conflicts))
            self._plan(conflicts, self._find_states(conflicts))
