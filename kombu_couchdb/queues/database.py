"""Creation of the broker's database and its design documents, when a connection is established."""

from __future__ import annotations

from .. import design
from ..couchdb.client import Client, Row
from ..documents.ids import QUEUE
from ..errors import AccessDenied, BrokenAnswer, CouchDBError, DatabaseMissing, NotFound, access_denied
from ..log import get_logger

logger = get_logger(__name__)

#: The most rows that are read when a connection is established.
MAX_SEEN_ROWS = 200
#: CouchDB's `_revs_limit`: how many revisions of a document it remembers. Heartbeats and broadcasts are written
#: repeatedly, and each would have 1,000 revisions without this.
REVS_LIMIT = 20


def ensure(client: Client, create: bool, other: str | None = None) -> tuple[list[Row], bool]:
    """Check that the database and its design document exist, in one request; if not, create them if `create` is true.

    Return exchanges, bindings and queues, the first `MAX_SEEN_ROWS` rows of `_all_docs` without documents; and whether
    it is a database of another kind: one that has the design document `other`. The name must sort after `design.NAME`.

    *Raises* `AccessDenied`, `DatabaseMissing`, `NotCouchDB`, `ServerUnavailable`.
    """
    wanted = f'_design/{design.NAME}'
    rows, missing = list[Row](), None
    try:
        rows = client.id_range(wanted, to=QUEUE, limit=MAX_SEEN_ROWS)
        is_other = any(row['id'] == f'_design/{other}' for row in rows)
        if is_other or (rows and rows[0]['id'] == wanted):
            return rows, is_other
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
        # A member of the database may not create databases, but the database may exist.
        if isinstance(exc.__context__, DatabaseMissing):
            raise
    try:
        for document in design.documents():
            client.try_put(document)  # in conflict, another process has stored the same
    except (AccessDenied, DatabaseMissing) as exc:
        raise access_denied(
            client.address.url,
            client.user,
            'set up the database',
            'let an administrator run "celery -A your_app couchdb setup" once',
        ) from exc
    try:
        client.request('PUT', '/_revs_limit', body=REVS_LIMIT)
    except CouchDBError as exc:
        logger.debug('the revisions limit of the database was not changed: %s', exc)
    return rows, False
