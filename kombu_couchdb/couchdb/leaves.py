"""Deletion of documents with all their leaf revisions: CouchDB would show another one instead of the deleted one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import CouchDBError
from .client import Client, Document
from .shapes import revision

__all__ = ['delete_leaves', 'delete_revisions']


def delete_leaves(client: Client, docs: Sequence[Document]) -> int:
    """Delete documents with all their leaf revisions, the given one last. Return how many documents were deleted.

    So a document does not change into another one if the process is killed before all its leaf revisions are deleted.
    A request for each document, and two more.
    """
    delete_revisions(client, [(doc['_id'], rev) for doc in docs for rev in _conflicts(client, doc['_id'])])
    return delete_revisions(client, [(doc['_id'], doc['_rev']) for doc in docs])


def delete_revisions(client: Client, revisions: Iterable[tuple[str, str]]) -> int:
    """Delete leaf revisions, each a document's id and a revision, and return how many were deleted."""
    docs = [{'_id': doc_id, '_rev': rev, '_deleted': True} for doc_id, rev in revisions]
    return sum(result.is_stored for result in client.bulk(docs))


def _conflicts(client: Client, doc_id: str) -> list[str]:
    """Return the leaf revisions of a document beside the one that CouchDB shows."""
    try:
        found = client.get(doc_id, conflicts=True).get('_conflicts')
    except CouchDBError:
        return []  # it was deleted meanwhile, or cannot be read
    return [rev for rev in found if revision(rev)] if isinstance(found, list) else []
