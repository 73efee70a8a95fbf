"""Uncertain writes: after a request that was not answered, find out which documents were stored.

To send all of it once more would tell, but a cluster answers that a write is in conflict only when every node has said so, or is
known to be down: while one is silent that takes a minute (measured with CouchDB 3.5). A read needs a majority, and no more.
"""

from __future__ import annotations

from ..couchdb.client import Client, Document
from .pending_writes import Change

__all__ = ['unwritten']


def unwritten(client: Client, changes: list[Change]) -> list[Change]:
    """Return those of `changes` that a try before did not store; the others are told that they are in conflict."""
    left: list[Change] = []
    all_leaves = client.fetch_leaves([doc['_id'] for doc, _ in changes])
    for (doc, react), leaves in zip(changes, all_leaves, strict=True):
        if _fits(doc, leaves):
            left.append((doc, react))
        else:
            react({'error': 'conflict'})
    return left


def _fits(doc: Document, leaves: list[Document]) -> bool:
    """Tell whether a document can be written over one of the leaves there are, seen or not; a new one over deleted ones."""
    if '_rev' not in doc:
        return all(leaf.get('_deleted') for leaf in leaves)
    return any(leaf['_rev'] == doc['_rev'] for leaf in leaves)
