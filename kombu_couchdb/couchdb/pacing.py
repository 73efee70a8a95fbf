"""The pace of requests to a CouchDB that limits how many it serves in a second, as IBM Cloudant does.

Such a service counts units of three kinds: reads, writes and queries.
"""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """What a service counts, each with a limit of its own."""

    #: A document by its id, with its revisions and attachments.
    READ = 'read'
    #: A document that is created, changed or deleted.
    WRITE = 'write'
    #: A question to an index: `_all_docs`, a view, `_find`; and `_bulk_get`.
    QUERY = 'query'
    #: A request to `_changes`.
    FEED = 'feed'
    #: All else: the server, the database, an index's state, a session.
    OTHER = 'other'


#: The kinds of the requests whose path below the database begins or ends with these names.
_KINDS = {
    '_bulk_docs': Kind.WRITE,
    '_bulk_get': Kind.QUERY,
    '_all_docs': Kind.QUERY,
    '_design_docs': Kind.QUERY,
    '_local_docs': Kind.QUERY,
    '_find': Kind.QUERY,
    '_changes': Kind.FEED,
}


def units_of(method: str, path: str | None, size: int = 1) -> tuple[Kind, int]:
    """Return the kind of a request and how many units it costs.

    `path` is relative to the URL of the database, with or without a query; None means the root of the server. `size` is
    the number of documents in the body of a `_bulk_docs`, and of the `queries` in a request with several.
    """
    names = (path or '').partition('?')[0].strip('/').split('/')
    if path is None or not names[0]:
        return Kind.OTHER, 1
    if kind := _KINDS.get(names[0]):
        return kind, size
    if names[0] == '_design' and '_view' in names[2:]:
        return Kind.QUERY, size
    if names[0] in ('_design', '_local'):
        names = names[2:] or ['']  # a document, and what is below it
    if names[0].startswith('_'):
        return Kind.OTHER, 1
    return (Kind.READ if method in ('GET', 'HEAD') else Kind.WRITE), 1
