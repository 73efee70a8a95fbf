"""Receipts: how the tasks of parcels ended, in the documents that their publishers have written.

The worker that ends a task writes so (`complete`). What no worker has ended, the process that moves parcels finds out:
now and then it looks up the messages of the receipts that are open. It also deletes receipts whose time is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.conflicts import delete_leaves
from kombu_couchdb.couchdb.write_result import DOCUMENT_TOO_LARGE, UNSTORABLE, WriteResult
from kombu_couchdb.log import get_logger
from kombu_couchdb.values import is_number

from .inbox import Inbox
from .look_ups import ends_of_messages, is_old, pause

logger = get_logger(__name__)

#: No waiting parcel becomes a receipt.
_NO_REVISIONS: Mapping[str, str] = {}

#: How often a receipt is written if it changes at the same time.
_ATTEMPTS = 5


def process(broker: Client, inbox: Inbox, receipts: Sequence[Document], keep: float) -> None:
    """Delete the receipts of an inbox whose time is over, and end those whose messages no worker has ended.

    The others come again when they are due. Open ones are kept for `keep` seconds. *Raises* the errors of
    `kombu_couchdb.errors`.
    """
    now = broker.clock.now()
    # With all leaf revisions: no other one may become a parcel again.
    delete_leaves(inbox.client, [doc for doc in receipts if _over_at(doc) <= now])
    left = [doc for doc in receipts if _over_at(doc) > now]
    for doc in left:
        seconds = _over_at(doc) - now
        inbox.put_back([doc['_id']], min(seconds, pause(_moved(doc, now), now)) if parcel.is_open(doc) else seconds)
    _look_up(broker, inbox.client, [doc for doc in left if parcel.is_open(doc) and is_old(_moved(doc, now), now)], keep)


def _look_up(broker: Client, client: Client, receipts: Sequence[Document], keep: float) -> None:
    """Write into open receipts how their messages ended.

    Those of unknown messages are deleted in time, whatever their publishers have written into `kept_until`.
    """
    database, now = client.address.database, broker.clock.now()
    found = ends_of_messages(broker, [(database, doc['_id']) for doc in receipts])
    unknown = [doc for doc in receipts if found.get((database, doc['_id']), doc) is None]
    write(client, [{**doc, 'kept_until': now + keep} for doc in unknown if now + keep < _over_at(doc) < inf])
    ends = {doc_id: (end.state, parcel.error_outcome(end.reason)) for (_, doc_id), end in found.items() if end}
    complete(client, {doc_id: parcel.end_of(*end, now, keep) for doc_id, end in ends.items()})


def _over_at(receipt: Mapping[str, Any]) -> float:
    """Return when a receipt is deleted: never if its publisher has written something else."""
    return until if is_number(until := receipt.get('kept_until')) else inf


def _moved(receipt: Mapping[str, Any], now: float) -> float:
    """Return when the parcel was moved; long ago if its publisher has written something else."""
    return date if is_number(date := receipt.get('moved')) and date <= now else 0.0


def complete(client: Client, ends: Mapping[str, Document], revs: Mapping[str, str] = _NO_REVISIONS) -> None:
    """Write how tasks have ended into their receipts, by document id: see `parcel.end_of`.

    If it comes late or twice, nothing is written: the first end counts. A parcel becomes its receipt, if the process
    that has moved it was killed, or is slower than the task; but only in the revision that was moved, one of `revs`.
    Of a receipt that its publisher has deleted nothing is written. *Raises* the errors of `kombu_couchdb.errors`.
    """
    left = [*ends]
    for _ in range(_ATTEMPTS if ends else 0):
        docs = [
            doc for doc in client.find(left) if doc and (parcel.is_open(doc) or revs.get(doc['_id']) == doc['_rev'])
        ]
        results = write(client, [parcel.ended(doc, ends[doc['_id']]) for doc in docs]) if docs else []
        for result in results:
            if result.is_refused:
                logger.warning('the receipt of parcel %s cannot be written: %s', result.id, result.reason)
        left = [result.id for result in results if result.is_conflict or result.is_unproven]
        if not left:
            return


def write(client: Client, docs: Sequence[Document]) -> list[WriteResult]:
    """Write documents and return the result for each; those that are too large without what their publishers wrote.

    A publisher may write a parcel of exactly the size that CouchDB accepts. With a reason, or as a receipt, it is
    larger. If it could not be written, it would wait for ever, and the parcels behind it, too. *Raises* what
    `Client.bulk` raises.
    """
    results = client.bulk(docs)
    refused = [index for index, result in enumerate(results) if result.error in (DOCUMENT_TOO_LARGE, UNSTORABLE)]
    if refused:
        again = client.bulk([parcel.shortened(docs[index]) for index in refused])
        for index, result in zip(refused, again, strict=True):
            results[index] = result
    return results
