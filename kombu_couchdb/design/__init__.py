"""The broker's design documents: the `.js` files beside this one, one view each. `rows` reads the rows of the views.

The name of a design document has the version of its views. A change of a view in a released version needs a new name,
so that workers of both versions run side by side, each with its own index. Workers read the views of `NAME`. The views
of `JOBS` are for people and for programs that look for a job by its task. The view of `CONFLICTED` is for sweepers that
resolve conflicts. The indexes of the last two are updated only when they are read, and cost nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import quote, unquote

__all__ = [
    'CONFLICTED',
    'JOBS',
    'NAME',
    'PARCELS',
    'PLANNED',
    'conflicted',
    'documents',
    'key_of',
    'load',
    'parcels',
    'queue_of',
    'rows_of',
]

NAME, JOBS, CONFLICTED = 'celery-v5', 'celery-jobs-v1', 'celery-conflicted-v1'

#: The design document of a database of parcels: a publisher recognises the database by it. Its name sorts behind
#: `NAME`, see `queues.database`.
PARCELS = 'parcels-v1'

#: In the view `waiting`, planned items have this in place of a rank (0 to 9), and are sorted by due date.
PLANNED = 10

_REDUCE = {'waiting': '_count', 'leases': '_stats', 'dead': '_count', 'expiring': ''}


def documents() -> list[dict[str, Any]]:
    """Return the design documents, without revisions. `NAME` is the last: a database that has it has all."""
    jobs = {**load(__name__, JOBS, {'by_task': ''}), 'autoupdate': False}
    return [jobs, conflicted(), load(__name__, NAME, _REDUCE)]


def conflicted() -> dict[str, Any]:
    """Return the design document `CONFLICTED`, which result databases have, too."""
    return {**load(__name__, CONFLICTED, {'conflicted': ''}), 'autoupdate': False}


def parcels() -> dict[str, Any]:
    """Return the design document of a database of parcels, without a revision."""
    return load(__name__, PARCELS, {'parcels': '_count'})


def key_of(queue: str) -> str:
    """Return a queue's name as it is in the keys of views: as `encodeURIComponent` in JavaScript writes it.

    CouchDB compares keys as people sort words. Without the encoding, `é` would be the same queue as `e` with an accent
    after it, `1` the same as an Arabic one, and a name the same with and without invisible characters such as a
    zero-width space.
    """
    return quote(queue, safe="!~*'()")


def queue_of(key: Any) -> str | None:
    """Return the name of a queue in the key of a view; None if the item's queue is not text."""
    return unquote(key) if isinstance(key, str) else None


def rows_of(queue: str, *after: float) -> dict[str, Any]:
    """Return `startkey` and `endkey` for the rows of a queue; with `after`, for keys that go on with these values or more."""
    name = key_of(queue)
    return {'startkey': [name, *after], 'endkey': [name, {}]}  # an object sorts after every number


def load(package: str, name: str, views: Mapping[str, str]) -> dict[str, Any]:
    """Return the design document `name`, made of a package's `.js` files; `views` has their names and reductions."""

    def source(view: str) -> str:
        lines = files(package).joinpath(f'{view}.js').read_text('utf-8').splitlines()
        # CouchDB takes one function expression: no comment may stand before it.
        return '\n'.join(line for line in lines if not line.startswith('//'))

    return {
        '_id': f'_design/{name}',
        'language': 'javascript',
        'views': {
            view: {'map': source(view), **({'reduce': reduce} if reduce else {})} for view, reduce in views.items()
        },
    }
