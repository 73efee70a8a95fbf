"""The broker's design documents: the `.js` files beside this one, one view each.

The name of a design document carries the version of its views. A change to a view makes a new name, and so workers of both
versions run side by side, each with its own index. Workers read the views of `NAME`. Those of `JOBS` are for people and
for who asks for a job by its task: their index is brought up to date when it is read, and costs who does not ask nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

__all__ = ['JOBS', 'NAME', 'documents', 'load']

NAME, JOBS = 'celery-v2', 'celery-jobs-v1'

_REDUCE = {'waiting': '_count', 'scheduled': '_count', 'leases': '_stats', 'dead': '_count', 'expiring': ''}


def documents() -> list[dict[str, Any]]:
    """Return the design documents, without revisions; that of `NAME` is the last, so that where it is, all are."""
    return [{**load(__name__, JOBS, {'by_task': ''}), 'autoupdate': False}, load(__name__, NAME, _REDUCE)]


def load(package: str, name: str, views: Mapping[str, str]) -> dict[str, Any]:
    """Return the design document `name`, made of a package's `.js` files; `views` names them and their reductions, if any."""
    def source(view: str) -> str:
        lines = files(package).joinpath(f'{view}.js').read_text('utf-8').splitlines()
        # CouchDB takes one function expression: no comment may stand before it.
        return '\n'.join(line for line in lines if not line.startswith('//'))

    return {
        '_id': f'_design/{name}',
        'language': 'javascript',
        'views': {view: {'map': source(view), **({'reduce': reduce} if reduce else {})} for view, reduce in views.items()},
    }
