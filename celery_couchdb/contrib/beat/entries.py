"""The documents of beat: an entry says what to send and when, its state says what was sent.

People and programs write entries, also with CouchDB's web interface. Only the leader writes states, so that an edit
never conflicts with a run.

::

    {"_id": "beat:entry:close the books", "type": "Schedule",
     "task": "shop.close_the_books", "schedule": {"crontab": "30 3 * * *"}}

    {"_id": "beat:state:close the books", "type": "ScheduleState",
     "due": 1763782200.0, "sent": 1763695800.02, "task_id": "…", "count": 7, …}

The entries in the code of the app (`beat_schedule`, `add_periodic_task`) have documents, too. Such a document is
written only if the code has changed since it was written last, as its digest tells. So an operator's edits and
`enabled: false` stay, until somebody changes the entry in the code; `enabled` stays even then. If the code has an entry
no more, its document is kept and marked as `removed`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeGuard, cast, final
from uuid import UUID, uuid4, uuid5

from celery import Celery, Task
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab
from kombu import Producer
from kombu.utils.json import dumps, loads

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.documents.types import Document
from kombu_couchdb.documents.validation import check_value
from kombu_couchdb.errors import ConfigurationError, Unstorable
from kombu_couchdb.schema import NUMBER, OBJECT, TEXT, Kind, Schema
from kombu_couchdb.values import date_of, is_number, is_whole

from .schedules import LATEST, Asked, Malformed, Rule, described, digest_of, rule_of

#: What is sent after an interruption of more than `grace` seconds: the latest due date, or none.
MISSED = ('once', 'skip')

#: An interruption of at most this length changes nothing: all due dates are sent.
DEFAULT_GRACE_SECONDS = 60.0

#: Beat itself may send a due date this late, in seconds: a shorter `grace` means that nothing else may delay it.
LEAST_GRACE_SECONDS = 10.0

#: The members whose values can be in the code of the app instead of the document.
CODE_MEMBERS = ('args', 'kwargs', 'options')

#: The plans of entries of which nothing is sent; see `Entry.plan`.
DISABLED, MALFORMED = 'disabled', 'error'

#: The longest name of an entry.
MAX_NAME_CHARACTERS = 200

#: Options of an entry that are not options of a task. They can be used in `beat_schedule` and `add_periodic_task`.
_ENTRY_OPTIONS = ('missed', 'grace')

#: How much of a name that is too long is kept, in characters; its digest follows.
_KEPT_CHARACTERS = 160

#: How much of the name of an option is like that of another one if it is misspelt.
_ALIKE = 0.8

#: Options of a task that the leader itself sets.
_OWN_OPTIONS = frozenset({'task_id', 'producer', 'connection', 'publisher', 'retry', 'args', 'kwargs'})


#: The largest number that every program reads from JSON as it is.
_MOST_COUNT = (1 << 53) - 1


def is_date(value: Any) -> TypeGuard[float]:
    """Tell whether a value is a date as in documents."""
    return is_number(value) and 0 <= value <= LATEST


def _is_moment(value: Any) -> bool:
    """Tell whether a value is a duration in seconds or a date, as in Celery's `expires`."""
    try:
        return is_number(value) or isinstance(value, datetime) or bool(date_of(value))
    except (TypeError, ValueError, AttributeError):
        return False


_Seconds = Annotated[float, Kind('a number of seconds', is_date)]
_Date = Annotated[float, Kind('a date in seconds since the epoch', is_date)]
_Count = Annotated[int, Kind('a whole number', lambda value: is_whole(value, 0, _MOST_COUNT))]
_Times = Annotated[int, Kind('a number from 1', lambda value: is_whole(value, 1, _MOST_COUNT))]
_TaskName = Annotated[str, Kind('the name of a task', lambda value: TEXT.accepts(value) and value != '')]
_Key = Annotated[str, Kind('32 digits', lambda value: re.fullmatch('[0-9a-f]{32}', str(value)) is not None)]
_Rule = Annotated[dict[str, Any], Kind('an object such as {"every": 30}', OBJECT.accepts)]


class _ScheduleOptions(TypedDict, total=False):
    args: list[Any]
    kwargs: dict[str, Any]
    #: Options of `apply_async`, such as `queue`, `priority`, `expires`, `job_key`.
    options: dict[str, Any]
    #: False: nothing is sent.
    enabled: bool
    missed: Literal['once', 'skip']
    grace: _Seconds
    #: Only due dates after this date are sent. Intervals count from here. Missing: when the leader first reads it.
    start: _Date | None
    #: No due date after this date is sent.
    until: _Date | None
    #: So many due dates are sent at most.
    times: _Times | None
    #: `app`: from the code of the app. `database` or missing: somebody has added it.
    source: Literal['app', 'database']
    #: The digest of the app's entry from which this document was written last.
    digest: str
    #: True: the code of the app has no such entry any more. Nothing is sent.
    removed: bool
    #: Those of `args`, `kwargs` and `options` that are taken from the code, because JSON cannot hold their values.
    code: list[str]
    _rev: str


@final
class Schedule(_ScheduleOptions):
    """An entry."""

    _id: str
    type: Literal['Schedule']
    task: _TaskName
    #: See `schedules`.
    schedule: _Rule


class _StateOptions(TypedDict, total=False):
    _rev: str


@final
class ScheduleState(_StateOptions):
    """The state of an entry. Only the leader writes it."""

    _id: str
    type: Literal['ScheduleState']
    #: A part of the ids of the tasks, so that an entry of the same name in another database has other ids.
    key: _Key
    #: The digest of the schedule and the start from which `due` was computed.
    plan: str
    #: Where the schedule begins.
    anchor: _Date
    #: The next due date; None: nothing will be sent. No due date is sent before it was stored here.
    due: _Date | None
    #: The due date that was sent last, when it was sent, and the id of the task.
    last: _Date | None
    sent: _Date | None
    task_id: str | None
    #: How many due dates were sent, and how many were left out, see `missed`.
    count: _Count
    skipped: _Count
    #: Why nothing is sent, or why the last due date was not sent.
    error: str | None


#: What the documents must be, and the options of an entry. Other options are checked when the task is sent.
_SCHEDULE, _STATE = Schema.of(Schedule), Schema.of(ScheduleState)
_OPTIONS: dict[str, Kind] = {
    'expires': Kind('a number of seconds or a date', _is_moment),
    'countdown': NUMBER,
    'eta': Kind('a date', lambda value: _is_moment(value) and not is_number(value)),
    'priority': Kind('a whole number', lambda value: is_whole(value, 0, _MOST_COUNT)),
    **dict.fromkeys(('time_limit', 'soft_time_limit'), NUMBER),
}

#: The members of an entry that the code describes.
_DESCRIBED = frozenset({'task', 'schedule', *CODE_MEMBERS, *_ENTRY_OPTIONS, 'until', 'times', 'code'})


class Names(NamedTuple):
    """The ids of the documents of one schedule, and the name of its leader."""

    leader: str

    @classmethod
    def of(cls, option: str | None) -> Names:
        """Return the names for the transport option `schedule_name`; *raises* `ConfigurationError`."""
        if option is not None and not re.fullmatch('[a-z0-9-]{1,40}', option):
            raise ConfigurationError(
                f'transport option schedule_name must be 1 to 40 lower-case letters, digits and "-", not {option!r:.80}'
            )
        return cls(f'beat-{option}' if option else 'beat')

    @property
    def entries(self) -> str:
        """The prefix of the ids of entries."""
        return f'{self.leader}:entry:'

    @property
    def states(self) -> str:
        """The prefix of the ids of states."""
        return f'{self.leader}:state:'


@dataclass(frozen=True)
class CodeEntry:
    """An entry in the code of the app."""

    name: str
    #: Celery's `ScheduleEntry`, the members of its document, and the rule of its schedule; None if there is an error.
    entry: Any = None
    description: Document | None = None
    rule: Rule | None = None
    #: What is wrong with it.
    error: str | None = None

    def document(self, old: Document | None, prefix: str, now: float) -> Document:
        """Return the document to write instead of `old`; `prefix` is that of its id. There must be no error."""
        assert self.description is not None
        kept = {name: value for name, value in (old or {}).items() if name in ('_rev', 'enabled', 'start')}
        doc: Document = {'_id': prefix + self.name, 'type': 'Schedule', 'enabled': True, 'start': now, **kept}
        if old is not None and (old.get('removed') or old.get('schedule') != self.description['schedule']):
            doc['start'] = now
        return {**doc, **self.description, 'source': 'app', 'digest': digest_of(self.description)}


@dataclass(frozen=True)
class Entry:
    """An entry that was read and checked. If `error` is not None, nothing is sent."""

    name: str
    doc: Document
    error: str | None = None
    rule: Rule | None = None
    task: str = ''
    args: Any = ()
    kwargs: Any = None
    options: Any = None
    missed: str = 'once'
    grace: float = DEFAULT_GRACE_SECONDS
    start: float | None = None
    #: The date after which nothing is due, and how many due dates are sent at most.
    until: float = LATEST
    times: int = _MOST_COUNT
    enabled: bool = False
    #: What the due dates depend on: if it changes, they are computed anew.
    plan: str = MALFORMED
    #: Whether it is in the code of the app, and somebody has changed more than `enabled` and `start` since.
    edited: bool = False

    @classmethod
    def of(cls, name: str, doc: Document, app: Any, code: CodeEntry | None = None) -> Entry:
        """Check a document. `code` is the entry of this name in the code of the app, if there is one."""
        try:
            _check(name, doc)
            if code is not None and code.error is not None and doc.get('source') == 'app':
                raise Malformed(f'in the code of the app: {code.error}')
            rule = rule_of(doc['schedule'], app, code.rule if code else None)
            args, kwargs, options = (_value(member, doc, code) for member in CODE_MEMBERS)
            for option in options.keys() & _OPTIONS.keys():
                value = options[option]
                if value is not None and (problem := _OPTIONS[option].problem(f'options.{option}', value)):
                    raise Malformed(f'{problem}, not {value!r:.80}')
            if 'id' in (options.get('headers') or ()):
                raise Malformed('options.headers must not contain "id": all messages would have it')
            enabled = doc.get('enabled', True) and not doc.get('removed', False)
            return cls(
                name,
                doc,
                None,
                rule,
                doc['task'],
                args,
                kwargs,
                options,
                doc.get('missed', 'once'),
                float(doc.get('grace', DEFAULT_GRACE_SECONDS)),
                doc.get('start'),
                min(LATEST, _given(doc, 'until', LATEST)),
                _given(doc, 'times', _MOST_COUNT),
                enabled,
                digest_of(
                    [
                        doc['schedule'],
                        doc.get('start'),
                        rule.basis,
                        *[doc[end] for end in ('until', 'times') if end in doc],
                    ]
                )
                if enabled
                else DISABLED,
                doc.get('source') == 'app'
                and doc.get('digest') != digest_of({k: doc[k] for k in _DESCRIBED & doc.keys()}),
            )
        except Exception as exc:  # a document, and what the code of the app makes of it, may contain anything
            return cls(name, doc, error_of(exc))


def error_of(exc: Exception) -> str:
    """Return the text for what is wrong with an entry."""
    return str(exc) if isinstance(exc, Malformed) else f'{exc!r:.300}'


def _check(name: str, doc: Mapping[str, Any]) -> None:
    """Raise `Malformed` for a document that is not an entry."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise Malformed(f'the name of an entry must have 1 to {MAX_NAME_CHARACTERS} characters')
    unknown = sorted(member for member in doc if member not in _SCHEDULE.kinds and not member.startswith('_'))
    if unknown:
        raise Malformed(f'{unknown[0]!r:.80} is not a member of an entry')
    if problem := _SCHEDULE.problem('', doc):
        raise Malformed(problem)
    if own := sorted(_OWN_OPTIONS & doc.get('options', {}).keys()):
        raise Malformed(f'options must not contain {own[0]!r}')


def _given(doc: Mapping[str, Any], member: str, default: Any) -> Any:
    value = doc.get(member)
    return default if value is None else value


def check_names(options: Mapping[str, Any]) -> None:
    """Raise `Malformed` for an option whose name is probably misspelt. A class of tasks may have options of its own."""
    known = {
        *inspect.signature(Celery.send_task).parameters,
        *inspect.signature(Task.apply_async).parameters,
        *inspect.signature(Producer.publish).parameters,
        *('queue', 'job_key'),
    }
    for name in options.keys() - known:
        if close := get_close_matches(name, known, 1, _ALIKE):
            raise Malformed(f'options has {name!r:.80}, which is not an option of apply_async: is it {close[0]!r}?')


def _value(member: str, doc: Mapping[str, Any], code: CodeEntry | None) -> Any:
    """Return the value of `args`, `kwargs` or `options`, from the document or from the code of the app."""
    if member in doc.get('code', ()):
        if code is None or code.error is not None:
            raise Malformed(f'its {member} are in the code of the app, which has no entry of this name')
        return getattr(code.entry, member)
    value = doc.get(member, [] if member == 'args' else {})
    text = json.dumps(value)
    if '"__type__"' not in text:
        return value
    try:
        return loads(text)  # dates, decimal numbers and the like, as in messages
    except Exception as exc:
        raise Malformed(f'{member} cannot be decoded: {exc}') from exc


def state_of(doc: Document | None) -> ScheduleState | None:
    """Return a document as a state; None if there is none, or it was deleted, or somebody's edit made it malformed."""
    if doc is None or doc.get('_deleted') or not doc.keys() >= _STATE.required or _STATE.problem('', doc):
        return None
    return cast(ScheduleState, doc)


def deleted_state(doc: Document, now: float) -> Document:
    """Return the deletion of a state. It tells what was sent: an entry that is added anew must not send it again."""
    state, deleted = state_of(doc), deletion(doc)
    if state is None:
        return deleted
    until = now if state['due'] is None else min(now, state['due'] - 0.001)
    return {**deleted, 'key': state['key'], 'until': max(until, state['last'] or 0.0)}


def tells_dates(former: Document | None) -> bool:
    """Tell whether it is known which due dates are past: there never was a state, or `deleted_state` tells it."""
    return former is None or (_STATE.kinds['key'].accepts(former.get('key')) and is_date(former.get('until')))


def new_state(doc_id: str, former: Document | None = None) -> ScheduleState:
    """Return the first state of an entry; `former` was deleted or is malformed, and what it tells is kept.

    Its `anchor` is the date until which due dates are past.
    """
    state: ScheduleState = {
        '_id': doc_id,
        'type': 'ScheduleState',
        'key': uuid4().hex,
        'plan': '',
        'anchor': 0.0,
        'due': None,
        'last': None,
        'sent': None,
        'task_id': None,
        'count': 0,
        'skipped': 0,
        'error': None,
    }
    if former is not None and tells_dates(former):
        state['key'], state['anchor'] = former['key'], float(former['until'])
    if former is not None and '_rev' in former and not former.get('_deleted'):
        state['_rev'] = former['_rev']
    return state


def task_id_of(state: ScheduleState, due: float) -> str:
    """Return the id of the task for a due date. All processes compute the same id."""
    return str(uuid5(UUID(state['key']), f'{state["_id"]} {due:.3f}'))


# -- the entries in the code of the app


def code_entries(app: Any, more: Mapping[Any, Any]) -> dict[str, CodeEntry]:
    """Return the entries in `beat_schedule`, and `more` in the same form, by name; those with errors, too."""
    found = {}
    for key, given in {**app.conf.beat_schedule, **more}.items():
        # Celery allows any object as a name; that of a task added without one is the text of its signature.
        name = str(key)
        if len(name) > MAX_NAME_CHARACTERS:
            digest = sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]
            name = f'{name[:_KEPT_CHARACTERS]}… {digest}'
        found[name] = _code_entry(app, name, given)
    return found


def _code_entry(app: Any, name: str, given: Any) -> CodeEntry:
    try:
        members = dict(vars(given) if isinstance(given, ScheduleEntry) else given)
        entry = ScheduleEntry(**{**members, 'name': name, 'app': app})
        description = description_of(entry)
        json.dumps([name, description], ensure_ascii=False, allow_nan=False).encode()
        return CodeEntry(name, entry, description, Asked(entry.schedule, app))
    except Exception as exc:  # the code can contain anything
        return CodeEntry(name, error=error_of(exc))


def description_of(entry: ScheduleEntry) -> Document:
    """Return the members of the document for an entry in the code, without those that the database decides."""
    options = {name: value for name, value in entry.options.items() if name not in _ENTRY_OPTIONS}
    more = {name: value for name, value in entry.options.items() if name in _ENTRY_OPTIONS}
    deadline = entry.app.conf.beat_cron_starting_deadline
    if deadline is not None and isinstance(entry.schedule, crontab):
        more = {'missed': 'skip', 'grace': deadline, **more}
    doc: Document = {'task': entry.task, 'schedule': described(entry.schedule), **more}
    in_code = []
    for name, value in zip(CODE_MEMBERS, (entry.args or (), entry.kwargs or {}, options), strict=True):
        try:
            doc[name] = _stored(value)
        except (TypeError, ValueError, Unstorable):
            in_code.append(name)
    return {**doc, **({'code': in_code} if in_code else {})}


def _stored(value: Any) -> Any:
    """Return a value as it is in a document; *raises* an error if JSON cannot hold it."""
    members = value.values() if isinstance(value, dict) else value
    if any(isinstance(member, BeatLazyFunc) for member in members):
        raise TypeError('a function gives this value when the task is sent')
    found = json.loads(dumps(list(value) if isinstance(value, (list, tuple)) else value))
    check_value('the value', found)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def to_write(
    code: Iterable[CodeEntry], docs: Mapping[str, Document], prefix: str, now: float
) -> tuple[list[Document], list[str]]:
    """Return the documents of entries to write, and the names of entries that an operator's entry replaces.

    `docs` has all documents of entries by name, and `prefix` is that of their ids.
    """
    found, replaced, names = list[Document](), list[str](), set[str]()
    for entry in code:
        names.add(entry.name)
        description, old = entry.description, docs.get(entry.name)
        if description is None:
            continue
        if old is not None and old.get('source') != 'app':
            replaced.append(entry.name)
        elif old is None or old.get('digest') != digest_of(description) or old.get('removed'):
            found.append(entry.document(old, prefix, now))
    for name, old in docs.items():
        if name not in names and old.get('source') == 'app' and not old.get('removed'):
            found.append({**old, 'removed': True})
    return found, replaced
