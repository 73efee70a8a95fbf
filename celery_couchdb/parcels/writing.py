"""Writing refused parcels and receipts, also those that do not fit into a document any more.

A publisher may write a parcel of exactly the size that CouchDB accepts. With a reason, or as a receipt, it is larger.
If it could not be written, it would wait for ever, and the parcels behind it, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import DOCUMENT_TOO_LARGE, UNSTORABLE, WriteResult
from kombu_couchdb.documents import parcel

__all__ = ['write']


def write(client: Client, docs: Sequence[Document]) -> list[WriteResult]:
    """Write documents and return the result for each; those that are too large without what their publishers wrote.

    *Raises* what `Client.bulk` raises.
    """
    results = client.bulk(docs)
    refused = [index for index, result in enumerate(results) if result.error in (DOCUMENT_TOO_LARGE, UNSTORABLE)]
    if refused:
        again = client.bulk([parcel.shortened(docs[index]) for index in refused])
        for index, result in zip(refused, again, strict=True):
            results[index] = result
    return results
