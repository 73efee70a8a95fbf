"""The design document: the `.js` files beside this one, one view each.

Its name carries the version of its views. A change to a view makes a new name, and so workers of both versions run
side by side, each with its own index.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

__all__ = ['NAME', 'document']

NAME = 'celery-v1'

_REDUCE = {'waiting': '_count', 'scheduled': '_count', 'leases': '_stats', 'dead': '_count'}


def document() -> dict[str, Any]:
    """Return the design document, without a revision."""
    def source(view: str) -> str:
        lines = files(__package__).joinpath(f'{view}.js').read_text('utf-8').splitlines()
        # CouchDB takes one function expression: no comment may stand before it.
        return '\n'.join(line for line in lines if not line.startswith('//'))

    return {
        '_id': f'_design/{NAME}',
        'language': 'javascript',
        'views': {view: {'map': source(view), 'reduce': reduce} for view, reduce in _REDUCE.items()},
    }
