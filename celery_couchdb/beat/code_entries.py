"""The entries in the code of the app (`beat_schedule`, `add_periodic_task`), and their documents.

A document is written only if the code has changed since it was written last, as its digest tells. So an operator's
edits and `enabled: false` stay, until somebody changes the entry in the code; `enabled` stays even then. If the code
has an entry no more, its document is kept and marked as `removed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab
from kombu.utils.json import dumps

from kombu_couchdb.documents.types import Document
from kombu_couchdb.documents.validation import check_value
from kombu_couchdb.errors import Unstorable

from .entries import CODE_MEMBERS, MAX_NAME_CHARACTERS, CodeEntry, error_of
from .schedules import Asked, described, digest_of

#: Options of an entry that are not options of a task. They can be used in `beat_schedule` and `add_periodic_task`.
_ENTRY_OPTIONS = ('missed', 'grace')

#: How much of a name that is too long is kept, in characters; its digest follows.
_KEPT_CHARACTERS = 160


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


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the task, and the members of the entry that are among them."""
    return (
        {name: value for name, value in options.items() if name not in _ENTRY_OPTIONS},
        {name: options[name] for name in _ENTRY_OPTIONS if name in options},
    )


def description_of(entry: ScheduleEntry) -> Document:
    """Return the members of the document for an entry in the code, without those that the database decides."""
    options, more = split_options(entry.options)
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
        digest = digest_of(description)
        if old is not None and old.get('source') != 'app':
            replaced.append(entry.name)
        elif old is None or old.get('digest') != digest or old.get('removed'):
            kept = {name: value for name, value in (old or {}).items() if name in ('_rev', 'enabled', 'start')}
            doc: Document = {'_id': prefix + entry.name, 'type': 'Schedule', 'enabled': True, 'start': now, **kept}
            if old is not None and (old.get('removed') or old.get('schedule') != description['schedule']):
                doc['start'] = now
            found.append({**doc, **description, 'source': 'app', 'digest': digest})
    for name, old in docs.items():
        if name not in names and old.get('source') == 'app' and not old.get('removed'):
            found.append({**old, 'removed': True})
    return found, replaced
