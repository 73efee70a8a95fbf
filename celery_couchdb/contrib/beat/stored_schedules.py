"""`Schedules`: reads and changes the entries of a schedule, from any program. No beat has to run meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from functools import cached_property
from typing import Any

from celery.schedules import BaseSchedule
from kombu.utils.json import dumps

from kombu_couchdb.couchdb.bulk import ATTEMPTS, deletion
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client, Document, winning
from kombu_couchdb.documents.validation import check_value
from kombu_couchdb.errors import ConfigurationError, Conflict, CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.log import get_logger
from kombu_couchdb.queues.databases import ensure
from kombu_couchdb.transport import Transport
from kombu_couchdb.values import date_of, is_number

from ... import audit
from ...connections import REQUEST_SECONDS, producer_as
from .due_dates import has_date, upcoming
from .entries import (
    CODE_MEMBERS,
    MALFORMED,
    Entry,
    Names,
    Schedule,
    ScheduleState,
    check_names,
    code_entries,
    deleted_state,
    error_of,
    state_of,
)
from .scheduler import send
from .schedules import Malformed, described

logger = get_logger(__name__)


#: The members of an entry whose changes are recorded.
_RECORDED = frozenset(Schedule.__required_keys__ | Schedule.__optional_keys__) - {'_id', '_rev', 'type', 'digest'}


class NoSuchEntry(NotFound):
    """There is no entry of this name. (The database is set up, unlike with other errors of this kind.)"""


@dataclass(frozen=True)
class Item:
    """An entry with its state."""

    entry: Entry
    #: None if no leader has read the entry yet.
    state: ScheduleState | None

    @property
    def name(self) -> str:
        """The name of the entry."""
        return self.entry.name

    @property
    def error(self) -> str | None:
        """Why nothing is sent, or why the last due date was not sent; None if all is well."""
        if self.entry.error is not None:
            return self.entry.error
        if self.state and self.state['error'] and self.state['plan'] in (self.entry.plan, MALFORMED):
            return self.state['error']
        try:
            upcoming(self.entry, self.state, 0.0, 1)
        except Exception as exc:  # schedules in the code of the app may raise anything
            return f'its next due date cannot be computed: {error_of(exc)}'
        return None

    def upcoming(self, now: float, count: int = 1) -> list[float]:
        """Return the next due dates, in seconds since the epoch; `now` is the server's time.

        They may be fewer than `count`; none if they cannot be computed, see `error`.
        """
        try:
            return upcoming(self.entry, self.state, now, count)
        except Exception:  # as above
            return []


class Schedules:
    """The entries of an app's schedule. *Every* method raises the errors of `kombu_couchdb.errors`."""

    def __init__(self, app: Any, client: Client | None = None, *, records: bool = True) -> None:
        """Use `client`, or create one for the database of the app's broker.

        Each change leaves a record of who did what, see `audit`. If `records` is false, the caller writes it.

        *Raises* `ConfigurationError` if the app's broker is not CouchDB.
        """
        self.app = app
        with app.connection_for_write() as connection:
            if not issubclass(connection.get_transport_cls(), Transport):
                raise ConfigurationError('schedules are in the broker, and the broker of this app is not CouchDB')
            #: The ids of the documents, and the name of the leader.
            self.names = Names.of(connection.transport.options.schedule_name)
            self._may_create: bool = connection.transport.options.create_database
            self.client = client or Client(connection.transport.address, HTTPOptions(REQUEST_SECONDS))
        self._records = records
        #: By name, what was changed in entries.
        self.changes: dict[str, audit.Changes] = {}

    def list(self) -> list[Item]:
        """Return all entries, by name."""
        docs, states = (
            {row['id'].removeprefix(prefix): row['doc'] for row in self.client.id_range(prefix, docs=True)}
            for prefix in (self.names.entries, self.names.states)
        )
        code = code_entries(self.app, {})
        return [
            Item(Entry.of(name, doc, self.app, code.get(name)), state_of(states.get(name)))
            for name, doc in docs.items()
        ]

    def get(self, name: str) -> Item:
        """Return one entry; *raises* `NotFound` if there is none of this name."""
        doc, state = self._find(name)
        return Item(self._entry(name, doc), state_of(state))

    def add(self, name: str, task: str, schedule: Any, **members: Any) -> Item:
        """Add an entry and return it.

        `schedule` is one of Celery's schedules, a number of seconds, a `timedelta`, or a dictionary as in documents.
        `members` are other members of the document: `args`, `kwargs`, `options`, `enabled`, `missed`, `grace`, `start`,
        `until`, `times`. The two dates may also be a `datetime`, or text such as `2027-01-01T09:00`, in the app's time
        zone. A missing database is created, unless the transport option `create_database` is off.

        *Raises* `Conflict` if the name is taken, `ConfigurationError` if a member is wrong or nothing would be sent.
        """
        doc = self._new(name) | {'task': task} | self._members({**members, 'schedule': schedule})
        try:
            item = self._written(name, doc, doc.keys())
        except Conflict as exc:
            raise Conflict(f'there is a schedule entry {name!r:.220} already') from exc
        self._record('add', name, 'added', new=item.entry.doc)
        return item

    def draft(self, name: str, former: Document, **members: Any) -> Item:
        """Return the entry that would come of `former` members of a document, or none, and new ones; nothing is stored.

        *Raises* `ConfigurationError` if a member is wrong.
        """
        entry = Entry.of(name, self._new(name) | former | self._members(members), self.app)
        if entry.error is not None:
            raise ConfigurationError(entry.error)
        return Item(entry, None)

    def edit(self, name: str, *, rev: str | None = None, **members: Any) -> Item:
        """Change members of an entry, see `add`, and return it. A new schedule begins now, unless `start` is given.

        *Raises* `NotFound`, `ConfigurationError`; `Conflict` if the entry has another revision than `rev`.
        """
        members = self._members(members)

        def change(doc: Document) -> Document:
            if rev not in (None, doc['_rev']):
                raise Conflict(f'somebody else has changed the schedule entry {name!r:.220} since you read it')
            in_code = [member for member in doc.get('code') or [] if member not in members]
            return {**doc, **members, **({'code': in_code} if 'code' in doc else {})}

        return self._change(name, change, ('edit', 'changed'), members.keys())

    def enable(self, name: str) -> Item:
        """Enable an entry, and return it; nothing is sent for the time in which it was disabled.

        An entry that was removed from the code of the app belongs to the database from now on. *Raises* `NotFound`.
        """

        def change(doc: Document) -> Document:
            if doc.get('removed'):
                doc = {**doc, 'source': 'database', 'removed': False}
            elif doc.get('enabled', True) is True:
                return doc
            return {**doc, 'enabled': True, 'start': self.client.clock.now()}

        return self._change(name, change, ('enable', 'enabled'))

    def disable(self, name: str) -> Item:
        """Disable an entry, and return it. *Raises* `NotFound`."""
        return self._change(name, lambda doc: {**doc, 'enabled': False}, ('disable', 'disabled'))

    def reset(self, name: str) -> Item:
        """Return an entry to what the code of the app says; whether it is enabled stays as it is.

        An entry of the database that replaces the code's belongs to the code from now on. *Raises* `NotFound`;
        `ConfigurationError` if `beat_schedule` has no entry of this name, or if that is malformed.
        """
        code = code_entries(self.app, {}).get(name)
        if code is None or code.error is not None:
            why = f'is malformed: {code.error}' if code else 'does not exist'
            raise ConfigurationError(f'the schedule entry {name!r:.220} of beat_schedule {why}')

        def change(doc: Document) -> Document:
            return code.document(doc, self.names.entries, self.client.clock.now())

        return self._change(name, change, ('reset', 'as in the code'))

    def delete(self, name: str) -> None:
        """Delete an entry and its state.

        *Raises* `NotFound`; `ConfigurationError` for an entry in the code of the app, which would be written again.
        """
        doc, state = self._find(name)
        if doc.get('source') == 'app' and not doc.get('removed'):
            raise ConfigurationError(
                f'schedule entry {name!r:.220} is in the code of the app: remove it there, or disable it'
            )
        [result] = self.client.bulk([deletion(doc)])
        if not result.is_stored:
            raise result.exception(self.client.address.url)
        if state is not None:
            self.client.bulk([deleted_state(state, self.client.clock.now())])
        self._record('delete', name, 'deleted', former=doc)

    def run(self, name: str) -> Any:
        """Send the task of an entry now, and return its result. The due dates of the entry do not change.

        Its state tells it as the task that was sent last.

        *Raises* `NotFound`; `ConfigurationError` if the entry is malformed; what `apply_async` raises.
        """
        entry = self.get(name).entry
        if entry.error is not None:
            raise ConfigurationError(f'schedule entry {name!r:.220} is malformed: {entry.error}')
        self.knows(entry.task)  # what its class says, such as its queue, counts, as when beat sends it
        with producer_as(self.app, self.client) as producer:
            result = send(self.app, entry, producer)
        for _ in range(ATTEMPTS):  # the leader takes over a state that it did not write
            state = state_of(self._find(name)[1])
            sent = {'sent': self.client.clock.now(), 'task_id': result.id}
            if state is None or self.client.try_put({**state, **sent}) is not None:
                break
        self._record('run now', name, f'sent as {result.id}')
        return result

    def knows(self, task: Any) -> bool:
        """Tell whether the app has a task of this name. A program may lack modules that workers import.

        The first call imports the modules that the app itself names, in `imports`, `include` or `autodiscover_tasks`.
        """
        return isinstance(task, str) and task in self._tasks

    @cached_property
    def _tasks(self) -> Mapping[str, Any]:
        try:
            self.app.loader.import_default_modules()
        except Exception as exc:  # modules of the app may raise anything
            logger.warning('not all modules of the app can be imported: %s', f'{exc!r:.300}')
        tasks: Mapping[str, Any] = self.app.tasks
        return tasks

    # -- documents

    def _new(self, name: str) -> Document:
        """Return what every entry that is added has."""
        return {'_id': self.names.entries + name, 'type': 'Schedule', 'enabled': True, 'source': 'database'}

    def _members(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """Return members as a document has them, see `_plain`. A new schedule begins now, unless `start` is given."""
        if 'schedule' in members:
            now = self.client.clock.now()
            members = {'start': now, **members, 'schedule': _schedule(members['schedule'])}
        return _plain(members, self.app.timezone)

    def _find(self, name: str) -> tuple[Document, Document | None]:
        """Return an entry and its state."""
        doc, state = self.client.find([self.names.entries + name, self.names.states + name])
        if doc is None:
            raise NoSuchEntry(f'there is no schedule entry {name!r:.220}')
        return doc, state

    def _entry(self, name: str, doc: Document) -> Entry:
        return Entry.of(name, doc, self.app, code_entries(self.app, {}).get(name))

    def _record(
        self, action: str, name: str, outcome: str, former: Document | None = None, new: Document | None = None
    ) -> None:
        """Record a change that has been made. If that fails, the change stays, and the log says it."""
        self.changes[name] = audit.changes_of(former or {}, new or {}, _RECORDED)
        if self._records:
            user, done = audit.who_runs_this(), f'{name}: {outcome}.'
            try:
                audit.record(self.client, user, f'{action} schedule', [name], done, None, self.changes)
            except CouchDBError as exc:
                logger.warning('the record of a change of schedule entry %s could not be stored: %s', name, exc)
            self.changes = {}

    def _change(
        self, name: str, change: Callable[[Document], Document], action: tuple[str, str], members: Collection[str] = ()
    ) -> Item:
        """Change an entry; `action` has the words for what is done and for what was done."""
        for _ in range(ATTEMPTS):
            doc, _ = self._find(name)
            changed = change(doc)
            if changed == doc:
                return self.get(name)
            try:
                item = self._written(name, changed, members)
            except Conflict:
                continue
            self._record(action[0], name, action[1], doc, changed)
            return item
        raise Conflict(f'others changed schedule entry {name!r:.220} at each of {ATTEMPTS} attempts')

    def _written(self, name: str, doc: Document, members: Collection[str] = ()) -> Item:
        """Write a document, unless it is malformed. An entry may be disabled whatever is wrong with it.

        `members` were given: misspelt options and a schedule that is over are refused, too.
        """
        entry = self._entry(name, doc)
        if entry.error is not None and doc.get('enabled', True) is not False:
            raise ConfigurationError(f'schedule entry {name!r:.220}: {entry.error}')
        try:
            if 'options' in members and entry.error is None:
                check_names(entry.options)
            if not {'schedule', 'start', 'until'}.isdisjoint(members) and not has_date(entry, self.client.clock.now()):
                raise Malformed('nothing would be sent: its schedule has no date from now on')
        except Malformed as exc:
            raise ConfigurationError(f'schedule entry {name!r:.220}: {exc}') from exc
        if '_rev' in doc:
            self.client.put(doc)
            return self.get(name)
        try:
            self._add(name, doc)
        except DatabaseMissing:
            ensure(self.client, self._may_create)
            self._add(name, doc)
        return self.get(name)

    def _add(self, name: str, doc: Document) -> None:
        """Write a new entry; *raises* `Conflict` if there is one, or if another process adds another one just now."""
        leaf = winning(self.client.known_leaves(doc['_id']))
        if leaf is not None and not leaf.get('_deleted'):
            raise Conflict(doc['_id'])
        rev = self.client.write_anew(doc, leaf)
        if self._find(name)[0]['_rev'] != rev:
            [withdrawn] = self.client.bulk([deletion({**doc, '_rev': rev})])
            if withdrawn.is_stored:  # otherwise it was changed since, and this is its new revision
                raise Conflict(doc['_id'])


def _schedule(value: Any) -> Any:
    """Return a schedule as it is in a document; *raises* `ConfigurationError`."""
    if isinstance(value, timedelta):
        return {'every': value.total_seconds()}
    if is_number(value):
        return {'every': value}
    if not isinstance(value, BaseSchedule):
        return value
    found = described(value)
    if 'code' in found:
        raise ConfigurationError(f'a schedule of class {found["code"]} can only be used in the code of the app')
    return found


def _plain(members: Mapping[str, Any], zone: tzinfo) -> dict[str, Any]:
    """Return members as JSON holds them; *raises* `ConfigurationError` or `Unstorable`. Dates are in the time zone."""
    found = dict(members)
    for name in ('start', 'until'):
        date = found.get(name)
        if isinstance(date, (str, datetime)):
            try:
                date = date_of(date) if isinstance(date, str) else date
                found[name] = (date if date.tzinfo else date.replace(tzinfo=zone)).timestamp()
            except (ValueError, OverflowError) as exc:
                raise ConfigurationError(f'{name} must be a date such as 2027-01-01T09:00, not {date!r:.80}') from exc
    for name in CODE_MEMBERS:
        if isinstance(found.get(name), (Sequence, Mapping)) and not isinstance(found[name], str):
            try:
                found[name] = json.loads(dumps(found[name]))
            except (TypeError, ValueError) as exc:
                raise ConfigurationError(
                    f'{name} of a schedule entry must be values that JSON can hold: {exc}'
                ) from exc
            check_value(name, found[name])
    return found
