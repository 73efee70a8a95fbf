"""The record of what operators did: who, what, to which targets, when, why, and how it ended.

Each action of the page, and each command that changes jobs, failures, queues or schedules, leaves one document in the
broker's database. One that takes longer is recorded when it begins, so that a kill of its process does not hide it. It
is deleted after 90 days, by whoever writes the next one.
"""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, cast

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.shapes import Shape, exactly, maybe, members, number, rows, text
from kombu_couchdb.documents.ids import AUDIT
from kombu_couchdb.documents.workitem import new_id
from kombu_couchdb.values import storable

#: How long the documents are kept, in seconds.
KEPT_SECONDS = 90 * 86400.0

#: The outcome of an action that has begun.
UNDER_WAY = 'It goes on, or ended with its process: nobody has recorded its end.'

#: The maximum number of targets in a document, and the maximum length of each text in it.
_MAX_TARGETS, _MAX_CHARACTERS = 20, 500

#: The maximum number of old documents that one action deletes.
_MAX_DELETED = 100


def _each(of: Shape) -> Shape:
    """An object all of whose members have a shape."""
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


#: The members of a document that are read.
_AUDIT = members(
    **dict.fromkeys(('user', 'action', 'outcome'), text),
    **dict.fromkeys(('date', 'count'), number),
    changes=maybe(_each(_each(exactly(maybe(text), maybe(text))))),
)


#: By member: its value before and after, as JSON text; None if there was none.
Changes = dict[str, list[str | None]]


class _AuditOptions(TypedDict, total=False):
    _rev: str
    #: What was changed in each target; of the first of them if there are many.
    changes: dict[str, Changes]


class Audit(_AuditOptions):
    """One action."""

    _id: str
    type: str
    #: Who acted: a CouchDB user, a name from a proxy, or `user@machine`.
    user: str
    #: What was done, such as `purge queues`.
    action: str
    #: The names or ids of what it was done to; the first of them if there are many.
    targets: list[str]
    #: The number of targets.
    count: int
    #: One sentence: what came of it.
    outcome: str
    reason: str | None
    #: When, in seconds since the epoch.
    date: float


def who_runs_this() -> str:
    """Return the user who runs this process, as `user@machine`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = '?'
    return f'{user}@{socket.gethostname()}'


def changes_of(former: Document, new: Document, members: Collection[str]) -> Changes:
    """Return which of these members of a document have changed, and how."""
    return {
        member: [_shown(former, member), _shown(new, member)]
        for member in sorted(members)
        if former.get(member) != new.get(member)
    }


def _shown(doc: Document, member: str) -> str | None:
    """Return a value as JSON text; arguments as the options of a task want them to be shown."""
    options = doc.get('options')
    shown = options.get(f'{member}repr') if isinstance(options, dict) else None
    if member in doc and isinstance(shown, str):
        return storable(shown, _MAX_CHARACTERS)
    return storable(json.dumps(doc[member], ensure_ascii=False), _MAX_CHARACTERS) if member in doc else None


def record(
    client: Client,
    user: str,
    action: str,
    targets: Sequence[str],
    outcome: str,
    reason: str | None,
    changes: Mapping[str, Changes] | None = None,
) -> Audit:
    """Store what a user did, delete what is older than 90 days, and return the document; two requests, or three."""
    now = client.clock.now()
    doc: Audit = {
        '_id': AUDIT + new_id(now),
        'type': 'Audit',
        'user': user[:_MAX_CHARACTERS],
        'action': action,
        'targets': [target[:_MAX_CHARACTERS] for target in targets[:_MAX_TARGETS]],
        'count': len(targets),
        'outcome': outcome[:_MAX_CHARACTERS],
        'reason': reason[:_MAX_CHARACTERS] if reason else None,
        'date': now,
    }
    if changes:
        doc['changes'] = {target[:_MAX_CHARACTERS]: changes[target] for target in [*changes][:_MAX_TARGETS]}
    doc['_rev'] = client.put(doc)
    last = AUDIT + new_id(now - KEPT_SECONDS)
    old = [row for row in client.id_range(AUDIT, limit=_MAX_DELETED) if row['id'] < last]
    if old:
        client.bulk([deletion({'_id': row['id'], '_rev': row['value']['rev']}) for row in old])
    return doc


def begin(
    client: Client, user: str, action: str, targets: Sequence[str], reason: str | None
) -> Callable[[str], object]:
    """Store that a user begins to do something, and return the function that stores how it ended; one request more."""
    begun = record(client, user, action, targets, UNDER_WAY, reason)
    return lambda outcome: client.put({**begun, 'outcome': outcome[:_MAX_CHARACTERS]})


def newest(client: Client, limit: int) -> list[Audit]:
    """Return the newest actions first, at most `limit`; one request. What is malformed is left out."""
    params = {
        'startkey': json.dumps(AUDIT + '\uffff'),
        'endkey': json.dumps(AUDIT),
        'descending': True,
        'include_docs': True,
        'limit': limit,
    }
    found = client.request('GET', '/_all_docs', params, repeat=True, shape=rows(id=text))['rows']
    return [cast(Audit, row['doc']) for row in found if _is_audit(row.get('doc'))]


def _is_audit(doc: Document | None) -> Any:
    return _AUDIT(doc) and isinstance(doc, dict) and isinstance(doc.get('targets'), list)
