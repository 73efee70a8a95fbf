"""Dead letters from messages whose documents cannot be read or written back, so that consumers skip them.

Such a document is not decoded. The members of a dead letter are appended to its JSON text: if a name appears twice,
CouchDB keeps the last member.
"""

from __future__ import annotations

import json
import re

from ..couchdb.client import Client, Document
from ..documents import dead_letter
from ..documents.dead_letter import malformed
from ..documents.ids import BROKER
from ..errors import Conflict, DocumentTooLarge, NotFound, RequestRefused
from ..log import get_logger

__all__ = ['set_aside', 'stub']

logger = get_logger(__name__)

#: The type of a WorkItem in CouchDB's JSON.
_ITEM = b'"type":"WorkItem"'

#: The name of its queue.
_QUEUE = re.compile(rb'"queue":("(?:[^"\\]|\\.)*")')


def stub(text: bytes, reason: str, now: float) -> Document | None:
    """Return a dead letter without a message for a WorkItem whose JSON is `text`; None for another document."""
    if _ITEM not in text:
        return None
    queue = _QUEUE.search(text)
    return {
        'type': 'WorkItem',
        'queue': json.loads(queue[1]) if queue else None,
        'attempts': 0,
        'published': now,
        **dead_letter.members(malformed(reason), now),
    }


def set_aside(client: Client) -> None:
    """Make dead letters of the messages found unusable since the last call: up to two requests each.

    *Raises* the errors of `Client`; an error that only concerns one message is logged instead.
    """
    for doc_id, reason in client.unusable.take():
        if doc_id.startswith(BROKER):
            continue  # not a WorkItem
        try:
            text = client.raw(doc_id)
            if _ITEM in text:
                client.extend(
                    doc_id, text, {'claimed': None, **dead_letter.members(malformed(reason), client.clock.now())}
                )
                logger.error('message %s was made a dead letter: %s', doc_id, reason)
        except (Conflict, NotFound):
            pass  # another process has changed or deleted it
        except (DocumentTooLarge, RequestRefused) as exc:
            logger.error('message %s cannot be made a dead letter: %s', doc_id, exc)
