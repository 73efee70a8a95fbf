"""Conflict rules of WorkItems: which of several leaf revisions stays.

When consumers claim the same item at once on different nodes of a cluster, each node stores the claim that it received.
The document then has several leaves. CouchDB answers a write with 201 if a quorum of the nodes stored it, and with 202
if fewer nodes did: such a write is *unproven*. At most one consumer gets a proven answer (201) to its claim. It holds
the item, and its ack deletes its own leaf. Every other claim is an *unproven claim*. CouchDB may show it as the winner
(measured: an unproven claim wins in 19 to 39 of 100 such documents).

A leaf is *done* if its message was acknowledged or dropped: the leaf is deleted or kept as a DoneItem, or,
in a unique job, the next message has taken its place. A deletion that is marked with `void` does not mean that the
message is done. Of several leaves that are DoneItems, the one that ranks highest stays.

The consumer that made an unproven claim decides about its own leaf (`decide`). It does so some seconds later, when the
nodes have replicated to each other:

* If another leaf is done, it acknowledges its leaf, too. A unique job then goes on with the messages that only this
  leaf has in `next`; any other item is deleted, without `void`.
* If another leaf ranks higher, it deletes its leaf with `void`.
* If its leaf ranks highest and a living consumer has claimed another leaf, or CouchDB does not show its leaf yet, it
  waits. It does not wait for other claims of its own, unless it holds the message.
* Otherwise it releases its leaf, and deletes the other leaves with `void`.

Sweepers resolve the other conflicts (`resolve_item`), which are left by consumers whose lease has expired and by a
network that was cut in two. A sweeper never touches a leaf that another living consumer has claimed. Its own claims
that it does not know of count as nobody's: their responses were lost, and the leaf of another consumer hides them. So
of two living consumers that wait for each other the one with the lower leaf gives way.

* If one leaf is done, sweepers acknowledge the leaves that no living consumer has claimed, in the same way.
* Otherwise the leaf that ranks highest stays: a dead letter, or else the winner. The others that no living consumer has
  claimed are deleted with `void`. If the item is a unique job, their messages are added to `next` of the leaf that
  stays.
* The leaf that stays is released, unless a living consumer has claimed it or another leaf.

A leaf may also be a LentItem (see the room `regions`). It ranks as a dead letter does, so an unproven claim gives way
to it. The mover of the region continues with it only if its write was proven, or if no other leaf remains.

Invariant: a leaf is deleted only if its message is done or a leaf that ranks higher remains, and no rule lowers the
rank of a leaf. So no message is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..values import revision_parts
from . import workitem
from .types import Document, Tombstone
from .unique_merge import add_missing, without_known


def decide(
    leaves: Iterable[Document], winner: str | None, unproven: str, living: Collection[str], now: float
) -> list[Mapping[str, Any]] | None:
    """Return the documents to write about an unproven claim, in this order, or None to look again later.

    `leaves` are all leaves of the document, deleted ones included. `winner` is the revision that CouchDB shows,
    `unproven` is the revision of the claim, and `living` contains the ids of the consumers whose lease is valid.
    """
    leaves = list(leaves)
    ours = next((leaf for leaf in leaves if leaf['_rev'] == unproven and not leaf.get('_deleted')), None)
    if ours is None:
        return []
    others = [leaf for leaf in leaves if leaf is not ours]
    if _is_done(ours, others):
        return [_done(ours, others, now)]
    rivals = [leaf for leaf in others if not leaf.get('_deleted')]
    if any(_order(leaf) > _order(ours) for leaf in rivals):
        return [_withdrawn(ours)]
    # A node that has not copied our leaf yet may show a lower one, whose claimant gives way to ours.
    if winner != unproven or any(workitem.claimant(leaf) in living for leaf in rivals):
        return None
    return _keep_one(ours, _released(_merged(ours, rivals, leaves), delivered=False), rivals)


def resolve_item(leaves: list[Document], living: Collection[str], now: float) -> list[Mapping[str, Any]] | None:
    """Return the documents to write about an item with several leaves, in this order, or None to look again later.

    `living` contains the ids of the consumers whose lease is valid.
    """
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    held = [leaf for leaf in live if workitem.claimant(leaf) in living]
    free = [leaf for leaf in live if leaf not in held]
    done = [_done(leaf, others, now) for leaf in free if _is_done(leaf, others := [o for o in leaves if o is not leaf])]
    if done:
        return done
    kept = max(live, key=_order, default=None)
    lower = [leaf for leaf in free if leaf is not kept]
    if kept is None:
        return []
    if held and not lower:
        return None  # the consumers decide about their own leaves: one of their claims may be proven
    merged = _merged(kept, lower, leaves)
    return _keep_one(kept, merged if held else _released(merged, delivered=True), lower)


def keep_winner(leaves: list[Document], order: Callable[[Document], Any] | None = None) -> list[Tombstone]:
    """Return the deletions of all leaves but the last by `order`, or else the one that CouchDB shows."""
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    return [_withdrawn(leaf) for leaf in sorted(live, key=order or _order)[:-1]]


def _merged(kept: Document, others: list[Document], leaves: list[Document]) -> Document:
    """Return `kept`; if it is a unique job, with the messages that only `others` have."""
    return add_missing(kept, others, _tags_done(leaves)) if 'key' in kept else kept


def _released(leaf: Document, *, delivered: bool) -> Document:
    return workitem.release(leaf, delivered=delivered) if workitem.claimant(leaf) else leaf


def _keep_one(kept: Document, changed: Document, others: list[Document]) -> list[Mapping[str, Any]]:
    """Return the documents to write so that `kept` stays, as `changed`, and `others` do not."""
    return [*([changed] if changed is not kept else []), *(_withdrawn(leaf) for leaf in others)]


def _tags_done(leaves: list[Document]) -> set[str]:
    return {tag for leaf in leaves if isinstance(tag := leaf.get('done'), str)}


def _done(leaf: Document, others: list[Document], now: float) -> Mapping[str, Any]:
    """Return the document to write for a live leaf whose message is done according to another leaf.

    A unique job goes on with the messages that only this leaf has in `next`.
    """
    return workitem.acked(without_known(leaf, others) if 'key' in leaf else leaf, now)


def _withdrawn(leaf: Document) -> Tombstone:
    tombstone = workitem.deleted(leaf)
    tombstone['void'] = True
    return tombstone


def _order(leaf: Document) -> tuple[bool, int, str]:
    """Return the sort key of a leaf's rank. A dead letter, or a completed message, ranks above every other leaf.

    The others rank as CouchDB chooses its winner: the longer history first, then the larger revision.
    """
    return bool(leaf.get('status')), *revision_parts(leaf['_rev'])


def _is_done(leaf: Document, others: list[Document]) -> bool:
    """Tell whether another leaf says that the message of this one is done, so that this one is not needed."""
    if workitem.is_done(leaf):
        return any(workitem.is_done(other) and _order(other) > _order(leaf) for other in others)
    if 'key' not in leaf:
        return any((other.get('_deleted') and not other.get('void')) or workitem.is_done(other) for other in others)
    # A unique job may have been deleted before and sent again: only a leaf that names exactly this
    # message counts.
    tag = workitem.tag(leaf)
    return tag is not None and any(other.get('done') == tag and not other.get('void') for other in others)
