"""The broker's design documents. Each `.js` file in this folder is the map function of one view.

The name of a design document ends in a version. A changed view gets a new version, so that workers of both versions can
run at the same time, each with its own index.

* `NAME` has the views that workers read.
* `JOBS` has views for finding jobs by task id, for listing them by task and time, and for dead letters.
* `CONFLICTED` has a view for resolving the conflicts that a cluster or a replication leaves.

The indexes of the last two are updated only when they are read: they cost nothing if nobody reads them. The optional
rooms have design documents, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import quote, unquote

from ..documents.dead_letter import KINDS
from ..documents.task_message import HIGHEST
from ..rooms import rooms

NAME, JOBS, CONFLICTED = 'celery-v8', 'celery-jobs-v4', 'celery-conflicted-v1'

#: The rank of scheduled messages in the view `waiting`, after those of the priorities, and that of messages that wait
#: for a slot of their concurrency key, after all others.
PLANNED, PARKED = HIGHEST + 1, HIGHEST + 2

#: What the map functions contain by name.
_CONSTANTS = {'HIGHEST': HIGHEST, 'PLANNED': PLANNED, 'PARKED': PARKED, 'KINDS': '|'.join(KINDS)}

#: The members of a design document with an index that has no rows, which CouchDB updates without JavaScript when it is
#: read. CouchDB keeps a note of each purge because of a design document without a view.
WITHOUT_ROWS = {
    'language': 'query',
    'views': {
        'none': {'map': {'fields': {'none': 'asc'}}, 'reduce': '_count', 'options': {'def': {'fields': ['none']}}}
    },
    'autoupdate': False,
}

_REDUCE = {'waiting': '_count', 'leases': '_stats', 'dead': '_count', 'expiring': ''}


def documents() -> list[dict[str, Any]]:
    """Return the broker's design documents, without revisions.

    `NAME` is the last one: they are written in this order, so where `NAME` exists, all exist.
    """
    jobs = {**load(__name__, JOBS, {'by_task': '', 'history': '', 'failures': '_stats'}), 'autoupdate': False}
    of_rooms = [doc for room in rooms() for doc in room.documents()]
    return [jobs, *of_rooms, conflicted(), load(__name__, NAME, _REDUCE)]


def conflicted() -> dict[str, Any]:
    """Return the design document `CONFLICTED`, without a revision. Databases of results have it, too."""
    return {**load(__name__, CONFLICTED, {'conflicted': ''}), 'autoupdate': False}


def key_of(queue: str) -> str:
    """Return the key of a queue in the views: its name as JavaScript's `encodeURIComponent` encodes it.

    CouchDB compares keys by Unicode collation. Without the encoding, `é` would equal `e` with a combining accent, `1`
    the Arabic digit one, and a name the same name with a zero-width space.
    """
    return quote(queue, safe="!~*'()")


def queue_of(key: Any) -> str | None:
    """Return the queue's name for a key in the views; None for the key of a malformed item, which has no queue."""
    return unquote(key) if isinstance(key, str) else None


def rows_of(queue: str, *after: float) -> dict[str, Any]:
    """Return `startkey` and `endkey` for the rows of one queue.

    `after` has the next parts of the start key, such as a rank and a date; without them, all rows of the queue match.
    """
    name = key_of(queue)
    return {'startkey': [name, *after], 'endkey': [name, {}]}  # CouchDB sorts an object after every number


def planned_rows(queue: str, *after: float) -> dict[str, Any]:
    """Return `startkey` and `endkey` for the rows of a queue's scheduled messages, from the due date `after` on."""
    name = key_of(queue)
    return {'startkey': [name, PLANNED, *after], 'endkey': [name, PLANNED, {}]}


def load(package: str, name: str, views: Mapping[str, str]) -> dict[str, Any]:
    """Return the design document `name`, without a revision.

    `views` maps the names of views to their reduce functions, or to '' for none. The map functions are the `.js` files
    in `package` with the names of the views.
    """

    def source(view: str) -> str:
        lines = files(package).joinpath(f'{view}.js').read_text('utf-8').splitlines()
        # CouchDB accepts one function expression only, without comments before it.
        code = '\n'.join(line for line in lines if not line.startswith('//'))
        return re.sub('|'.join(_CONSTANTS), lambda found: str(_CONSTANTS[found[0]]), code)

    return {
        '_id': f'_design/{name}',
        'language': 'javascript',
        'views': {
            view: {'map': source(view), **({'reduce': reduce} if reduce else {})} for view, reduce in views.items()
        },
    }
