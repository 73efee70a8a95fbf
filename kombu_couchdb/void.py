"""Claims that a cluster accepted on too few nodes to prove anything: nobody runs them, and they must not stay for ever.

When consumers claim the same item on different nodes at once, each node keeps the claim it was given, and the document has
several leaves. One consumer at the most was told a clean `ok`: it holds the item, and its ack deletes its own leaf. Every
other leaf is *void*, and it may be the one that readers see (measured: a void leaf wins in 19 to 39 of 100 such documents).

The consumer of a void claim decides about its own leaf, some seconds later, when the nodes have told each other:

* another leaf was deleted as done, or is already what follows a unique job: delete ours;
* ours is not the one that readers see: delete it, marked as void, so that nobody takes that for done;
* ours is seen, and a living consumer has another leaf: wait;
* ours is seen, and nobody else has one: release it.

The leaf that readers see is never deleted unless the item is done, and so no item is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from . import workitem

__all__ = ['decide']

Document = dict[str, Any]


def decide(leaves: Iterable[Document], seen: str | None, void: str, living: Collection[str]) -> list[Document] | None:
    """Return what is to be written about a void claim, or None to wait.

    `leaves` are all leaves of the document, deleted ones too; `seen` is the revision that readers see, `void` that of the
    void claim, and `living` the ids of the living consumers.
    """
    leaves = list(leaves)
    ours = next((leaf for leaf in leaves if leaf['_rev'] == void and not leaf.get('_deleted')), None)
    if ours is None:
        return []
    others = [leaf for leaf in leaves if leaf is not ours]
    if any((leaf.get('_deleted') and not leaf.get('void')) or _is_next(leaf, ours) for leaf in others):
        return [workitem.deleted(ours)]
    if seen != void:
        return [_voided(ours)]
    rivals = [leaf for leaf in others if not leaf.get('_deleted')]
    if any(workitem.claimant(leaf) in living for leaf in rivals):
        return None
    return [workitem.release(ours, delivered=False), *(_voided(leaf) for leaf in rivals)]


def _voided(leaf: Document) -> Document:
    return {**workitem.deleted(leaf), 'void': True}


def _is_next(leaf: Document, ours: Document) -> bool:
    """Tell whether a leaf is what came after ours was done: of a unique job that is no deletion."""
    return 'key' in ours and not leaf.get('_deleted') and workitem.task_id(leaf) != workitem.task_id(ours)
