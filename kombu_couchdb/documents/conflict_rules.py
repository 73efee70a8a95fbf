"""Leaves of WorkItems that nobody works on, and what makes one item of them again.

When consumers claim the same item on different nodes of a cluster at once, each node keeps the claim it was given, and the
document has several leaves. One consumer at the most was told a clean `ok`: it holds the item, and its ack deletes its own
leaf. Every other leaf is *void*, and it may be the one that readers see (measured: a void leaf wins in 19 to 39 of 100 such
documents).

The consumer of a void claim decides about its own leaf, some seconds later, when the nodes have told each other:

* another leaf is done (deleted, or what follows a unique job) or a dead letter: delete ours;
* ours is not the one that readers see: delete it, marked as void, so that nobody takes that for done;
* ours is seen, and a living consumer has another leaf: wait;
* ours is seen, and nobody else has one: release it.

Other leaves, of consumers that are gone or of a network that was cut in two, are healed by whoever sweeps:

* what is done is deleted, for done wins over whatever else;
* while a living consumer has one of them, nothing else is decided;
* else one stays: a dead letter, or the leaf that readers see, which is released. The others are deleted as void. Of unique jobs
  the messages in them go behind the one that stays.

No leaf is deleted but for another one that is of a higher order, and no order ever falls; and so no item is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from . import workitem
from .unique_merge import apart_from, gather

__all__ = ['decide', 'heal', 'keep_seen']

Document = dict[str, Any]


def decide(
    leaves: Iterable[Document], seen: str | None, void: str, living: Collection[str], now: float
) -> list[Document] | None:
    """Return what is to be written about a void claim, in this order, or None to wait.

    `leaves` are all leaves of the document, deleted ones too; `seen` is the revision that readers see, `void` that of the
    void claim, and `living` the ids of the living consumers.
    """
    leaves = list(leaves)
    ours = next((leaf for leaf in leaves if leaf['_rev'] == void and not leaf.get('_deleted')), None)
    if ours is None:
        return []
    others = [leaf for leaf in leaves if leaf is not ours]
    if _is_done(ours, others):
        return [_done(ours, others, now)]
    rivals = [leaf for leaf in others if not leaf.get('_deleted')]
    if seen != void or any(_order(leaf) > _order(ours) for leaf in rivals):
        return [_withdrawn(ours)]
    if any(workitem.claimant(leaf) in living for leaf in rivals):
        return None
    return _only(ours, rivals, leaves, delivered=False)


def heal(leaves: list[Document], living: Collection[str], now: float) -> list[Document] | None:
    """Return what is to be written, in this order, about an item with several leaves, or None to look again later."""
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    held = [leaf for leaf in live if workitem.claimant(leaf) in living]
    free = [leaf for leaf in live if leaf not in held]
    done = [_done(leaf, others, now) for leaf in free if _is_done(leaf, others := [o for o in leaves if o is not leaf])]
    if done:
        return done
    if held:
        return None  # who holds it decides: one of them may have been told that it was the only one
    kept = max(free, key=_order, default=None)
    return _only(kept, [leaf for leaf in free if leaf is not kept], leaves, delivered=True) if kept else []


def keep_seen(leaves: list[Document]) -> list[Document]:
    """Return what leaves of a document only the one that readers see: where all say the same, or the last is as good as any."""
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    return [_withdrawn(leaf) for leaf in sorted(live, key=_order)[:-1]]


def _only(kept: Document, others: list[Document], leaves: list[Document], *, delivered: bool) -> list[Document]:
    """Return what makes one leaf the only one, and what waits of it if it was claimed."""
    merged = gather(kept, others, _tags_done(leaves)) if 'key' in kept else kept
    if workitem.claimant(kept):
        merged = workitem.release(merged, delivered=delivered)
    return [*([merged] if merged is not kept else []), *(_withdrawn(leaf) for leaf in others)]


def _tags_done(leaves: list[Document]) -> set[str]:
    return {tag for leaf in leaves if isinstance(tag := leaf.get('done'), str)}


def _done(leaf: Document, others: list[Document], now: float) -> Document:
    """Return what is to be written about a leaf whose message is done: of a unique job what only this leaf has behind it."""
    return workitem.acked(apart_from(leaf, others) if 'key' in leaf else leaf, now)


def _withdrawn(leaf: Document) -> Document:
    return {**workitem.deleted(leaf), 'void': True}


def _order(leaf: Document) -> tuple[bool, int, str]:
    """A dead letter is above whatever runs or waits; the rest is CouchDB's order of what readers see."""
    generation, _, text = leaf['_rev'].partition('-')
    return bool(leaf.get('status')), int(generation), text


def _is_done(leaf: Document, others: list[Document]) -> bool:
    """Tell whether the message of a leaf was done with by who had another one."""
    if 'key' not in leaf:
        return any(other.get('_deleted') and not other.get('void') for other in others)
    # The job may have been there before, and be there again: only what names this very message was said of it.
    tag = workitem.tag(leaf)
    return tag is not None and any(other.get('done') == tag and not other.get('void') for other in others)
