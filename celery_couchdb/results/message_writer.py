"""Message writer: stores the next tasks that were handed over in the database of the broker."""

from __future__ import annotations

from collections.abc import Sequence

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import AccessDenied, ConfigurationError, CouchDBError
from kombu_couchdb.log import get_logger

from .handed import Handed

__all__ = ['Refusal', 'write_messages']

logger = get_logger(__name__)

#: Something handed over that is not stored, and why.
Refusal = tuple[Handed, CouchDBError]


def write_messages(client: Client, batch: Sequence[Handed], *, uncertain: bool) -> list[Refusal]:
    """Store messages in the database of `client`, in one request, and return those that CouchDB refuses.

    With `uncertain`, an earlier attempt got no response. What it stored is not stored again: a worker may have run it,
    and deleted its message, meanwhile. *Raises* the errors of `kombu_couchdb.errors` for an outage.
    """
    by_id = {each.id: each for each in batch}
    heads = [each.head for each in batch]
    try:
        if uncertain:
            heads = client.never_stored(heads)
        results = client.bulk(heads, texts=[by_id[head['_id']].text for head in heads])
    except (AccessDenied, ConfigurationError) as exc:
        return [(each, exc) for each in batch]
    for result in results:
        if not result.is_refused:
            logger.debug('published message %s to queue %s', result.id, by_id[result.id].head['queue'])
    # A conflict means that an earlier attempt was stored.
    return [(by_id[result.id], result.exception(client.address.url)) for result in results if result.is_refused]
