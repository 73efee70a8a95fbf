"""The broker's design documents: the `.js` files beside this one, one view each.

The name of a design document carries the version of its views. A change to a view makes a new name, and so workers of both
versions run side by side, each with its own index. Workers read the views of `NAME`. Those of `JOBS` are for people and
for who asks for a job by its task, and `CONFLICTED` is for who heals what a cluster left behind: their indexes are brought up
to date when they are read, and cost who does not ask nothing.
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

NAME, JOBS, CONFLICTED = 'celery-v4', 'celery-jobs-v1', 'celery-conflicted-v1'

#: That of a database of parcels: by it a publisher tells that it is one. Its name sorts behind `NAME`, see `queues.database`.
PARCELS = 'parcels-v1'

#: Behind the ranks of the priorities, 0 to 9, the view `waiting` has what is planned, by its due date.
PLANNED = 10

_REDUCE = {'waiting': '_count', 'leases': '_stats', 'dead': '_count', 'expiring': ''}


def documents() -> list[dict[str, Any]]:
    """Return the design documents, without revisions; that of `NAME` is the last, so that where it is, all are."""
    jobs = {**load(__name__, JOBS, {'by_task': ''}), 'autoupdate': False}
    return [jobs, conflicted(), load(__name__, NAME, _REDUCE)]


def conflicted() -> dict[str, Any]:
    """Return the design document `CONFLICTED`, which databases of results have, too."""
    return {**load(__name__, CONFLICTED, {'conflicted': ''}), 'autoupdate': False}


def parcels() -> dict[str, Any]:
    """Return the design document of a database of parcels, without a revision."""
    return load(__name__, PARCELS, {'parcels': '_count'})


def key_of(queue: str) -> str:
    """Return how a queue's name stands in the views: as `encodeURIComponent` writes it.

    CouchDB compares keys as people sort words: without that `é` would be the same queue as `e` with an accent after it, and `1`
    the same as an Arabic one, and a name the same with and without what nobody sees, such as a zero-width space.
    """
    return quote(queue, safe="!~*'()")


def queue_of(key: Any) -> str | None:
    """Return the queue's name that stands in a view, None for a spoilt item's, which is none."""
    return unquote(key) if isinstance(key, str) else None


def rows_of(queue: str, *after: float) -> dict[str, Any]:
    """Return `startkey` and `endkey` for the rows of one queue, or for those of them from what comes `after` its name on."""
    name = key_of(queue)
    return {'startkey': [name, *after], 'endkey': [name, {}]}  # an object sorts after every number


def load(package: str, name: str, views: Mapping[str, str]) -> dict[str, Any]:
    """Return the design document `name`, made of a package's `.js` files; `views` names them and their reductions, if any."""

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
