"""Conflict rules of the result database: which of several leaf revisions is kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.conflicts import Rule
from kombu_couchdb.values import revision_parts

from .documents import Document, precedence

__all__ = ['RULES', 'keep_best']


def keep_best(leaves: list[Document], living: Collection[str] = ()) -> list[Document]:
    """Return the deletions of all leaf revisions of a document but one.

    The revision that is kept is the result with the highest `precedence`, the chord that has progressed furthest, or
    else CouchDB's winner. Every `Rule` has the argument `living`, the living consumers; this one does not use it.
    """
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    return [deletion(leaf) for leaf in sorted(live, key=_rank)[:-1]]


def _rank(leaf: Mapping[str, Any]) -> tuple[Any, ...]:
    added = leaf.get('added')
    return (
        *precedence(leaf),
        bool(leaf.get('sent')),
        bool(leaf.get('claimed')),
        bool(leaf.get('size')),
        len(added) if isinstance(added, list) else 0,
        *revision_parts(leaf['_rev']),
    )


RULES: Mapping[str, Rule] = dict.fromkeys(('Result', 'Group', 'Value', 'Chord', 'Part'), keep_best)
