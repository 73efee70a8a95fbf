"""Uncertain writes: after a request without an answer, find out which of its documents CouchDB stored.

Sending all of them again would tell as well, by conflicts. But a cluster reports a conflict only when every node has reported
it or is known to be down: while one node does not respond, that takes a minute (measured with CouchDB 3.5). Reads need a
majority of nodes at most.

Three kinds of writers ask three questions:

- A publisher creates documents that others complete and delete at once: `never_stored`.
- A consumer changes documents, any of which may have several leaf revisions in a cluster: `still_writable`.
- The result backend writes over the revision that it remembers: `still_current`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .client import Client, Document

__all__ = ['never_stored', 'still_current', 'still_writable']


def never_stored(client: Client, docs: Sequence[Document]) -> list[Document]:
    """Return the new documents under whose ids there is no document and never was one, not even a deleted one."""
    known = client.known([doc['_id'] for doc in docs])
    return [doc for doc in docs if doc['_id'] not in known]


def still_writable(client: Client, docs: Sequence[Document]) -> list[bool]:
    """Tell of each document whether it still can be written: its revision is a leaf, or all leaves are deleted for a new one."""
    return [
        any(leaf['_rev'] == doc['_rev'] for leaf in leaves)
        if '_rev' in doc
        else all(leaf.get('_deleted') for leaf in leaves)
        for doc, leaves in zip(docs, client.fetch_leaves([doc['_id'] for doc in docs]), strict=True)
    ]


def still_current(client: Client, docs: Sequence[Document]) -> list[Document]:
    """Return the documents whose revision is the one that CouchDB shows; new ones if CouchDB shows none."""
    found = client.find([doc['_id'] for doc in docs])
    return [doc for doc, now in zip(docs, found, strict=True) if (now or {}).get('_rev') == doc.get('_rev')]
