"""The broker's database: make sure that it is there, with its design documents."""

from __future__ import annotations

from typing import NamedTuple

from .. import design
from ..couchdb.client import Client, Row
from ..documents.ids import QUEUE
from ..errors import AccessDenied, BrokenAnswer, CouchDBError, DatabaseMissing, NotFound, may_not
from ..log import get_logger

__all__ = ['REVISIONS', 'SEEN', 'Found', 'ensure']

logger = get_logger(__name__)

#: So many rows are read when a connection is established.
SEEN = 200
#: How many revisions of a document are remembered: heartbeats and broadcasts are written again and again, and each would keep
#: 1,000 without a limit.
REVISIONS = 20


class Found(NamedTuple):
    """What a database has, as far as it was read when a connection was established."""

    #: The exchanges, bindings and queues: rows of `_all_docs` without documents, of a large database the first ones.
    rows: list[Row]
    #: Whether it is a database of parcels (see `documents.parcel`).
    takes_parcels: bool


def ensure(client: Client, create: bool) -> Found:
    """Make sure that database and design documents are there; with `create`, make them. One request where all is well.

    *Raises* `AccessDenied`, `DatabaseMissing`, `NotCouchDB`, `ServerUnavailable`.
    """
    wanted = f'_design/{design.NAME}'
    rows, missing = list[Row](), None
    try:
        rows = client.id_range(wanted, to=QUEUE, limit=SEEN)
        takes_parcels = any(row['id'] == f'_design/{design.PARCELS}' for row in rows)
        if takes_parcels or (rows and rows[0]['id'] == wanted):
            return Found(rows, takes_parcels)
    except BrokenAnswer:
        client.welcome()
        raise
    except (NotFound, DatabaseMissing) as exc:
        missing = exc
    client.welcome()
    if not create:
        raise DatabaseMissing(
            f'{client.address.url}: the database is not set up, and the transport option create_database is off'
        ) from missing
    try:
        client.create()
    except AccessDenied as exc:
        # A member may not ask; the database may exist all the same.
        if isinstance(exc.__context__, DatabaseMissing):
            raise
    try:
        for document in design.documents():
            client.create_if_missing(document)  # another process may create the same one at the same time
    except (AccessDenied, DatabaseMissing) as exc:
        raise may_not(
            client.address.url,
            client.user,
            'set up the database',
            'let an administrator run "celery -A your_app couchdb setup" once',
        ) from exc
    try:
        client.request('PUT', '/_revs_limit', body=REVISIONS)
    except CouchDBError as exc:
        logger.debug('revs_limit is left as it is: %s', exc)
    return Found(rows, False)
