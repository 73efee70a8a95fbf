"""Uncertain writes: after a request without a response, find out which of its documents CouchDB stored.

Sending all of them again would show it as well, by conflicts. But a cluster reports a conflict only after every node
has reported it or is known to be down: while one node does not respond, that takes a minute (measured with CouchDB
3.5). Reads need responses of a majority of nodes at most.

Each kind of writer needs another function:

- A publisher creates documents that others complete and delete at once: `never_stored`.
- A consumer changes documents, any of which may have several leaf revisions in a cluster: `still_writable`.
- The result backend writes over the revision that it remembers: `still_current`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .client import Client

__all__ = ['never_stored', 'still_current', 'still_writable']

_Doc = TypeVar('_Doc', bound=Mapping[str, Any])


def never_stored(client: Client, docs: Sequence[_Doc]) -> list[_Doc]:
    """Return the documents whose ids were never used, not even for a document that is deleted now."""
    known = client.known([doc['_id'] for doc in docs])
    return [doc for doc in docs if doc['_id'] not in known]


def still_writable(client: Client, docs: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each document whether it can still be written.

    A document with a revision can be written if the revision is a leaf; a new one if all leaf revisions are deleted.
    """
    return [
        any(leaf['_rev'] == doc['_rev'] for leaf in leaves)
        if '_rev' in doc
        else all(leaf.get('_deleted') for leaf in leaves)
        for doc, leaves in zip(docs, client.fetch_leaves([doc['_id'] for doc in docs]), strict=True)
    ]


def still_current(client: Client, docs: Sequence[_Doc]) -> list[_Doc]:
    """Return the documents whose revision is the one that CouchDB shows; new ones if CouchDB shows none."""
    found = client.find([doc['_id'] for doc in docs])
    return [doc for doc, now in zip(docs, found, strict=True) if (now or {}).get('_rev') == doc.get('_rev')]
