"""The entries in the code of the app (`beat_schedule`, `add_periodic_task`), and their documents.

A document is written only if the code has changed since it was written last, as its digest tells. So an operator's
edits and `enabled: false` stay, until somebody changes the entry in the code; `enabled` stays even then. If the code
has an entry no more, its document is kept and marked as `removed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab
from kombu.utils.json import dumps

from kombu_couchdb.documents.types import Document
from kombu_couchdb.documents.validation import check_value
from kombu_couchdb.errors import Unstorable

from .entries import CODE_MEMBERS, digest_of
from .schedules import described

__all__ = ['description_of', 'split_options', 'to_write']

#: Options of an entry that are not options of a task. They can be used in `beat_schedule` and `add_periodic_task`.
_ENTRY_OPTIONS = ('missed', 'grace')


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
    return found


def to_write(
    code: Iterable[ScheduleEntry], docs: Mapping[str, Document], prefix: str, now: float
) -> tuple[list[Document], list[str]]:
    """Return the documents of entries to write, and the names of entries that an operator's entry replaces.

    `docs` has all documents of entries by name, and `prefix` is that of their ids.
    """
    found, replaced, names = list[Document](), list[str](), set[str]()
    for entry in code:
        names.add(entry.name)
        description, old = description_of(entry), docs.get(entry.name)
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
