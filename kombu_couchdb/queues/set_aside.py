"""Makes dead letters of items that cannot be read or written back, so that nobody meets them any more.

Such a letter is written as CouchDB has the item, unread, with what is said of it put behind that: of two members of one name
CouchDB keeps the last.
"""

from __future__ import annotations

from ..couchdb.client import Client
from ..documents import dead_letter
from ..documents.ids import BROKER
from ..documents.reasons import malformed
from ..errors import Conflict, DocumentTooLarge, NotFound, RequestRefused
from ..log import get_logger

__all__ = ['set_aside']

logger = get_logger(__name__)

#: How CouchDB writes the type of an item.
_ITEM = b'"type":"WorkItem"'


def set_aside(client: Client) -> None:
    """Make dead letters of the items that were found to be unusable since the last call; *raises* the errors of `Client`."""
    for doc_id, reason in client.unusable.take():
        if doc_id.startswith(BROKER):
            continue  # of another type
        try:
            text = client.raw(doc_id)
            if _ITEM in text:
                client.extend(
                    doc_id, text, {'claimed': None, **dead_letter.members(malformed(reason), client.clock.now())}
                )
                logger.error('message %s was set aside as a dead letter: %s', doc_id, reason)
        except (Conflict, NotFound):
            pass  # somebody else was faster
        except (DocumentTooLarge, RequestRefused) as exc:
            logger.error('message %s cannot be set aside either: %s', doc_id, exc)
