"""Conflict rules of results: which of several leaves stays, where a cluster or replication left more than one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.conflicts import Rule

from .documents import Document, precedence

__all__ = ['RULES', 'keep_best']


def keep_best(leaves: list[Document], living: Collection[str] = ()) -> list[Document]:
    """Return the deletions of all leaves but one.

    That is the result of the highest `precedence`, the chord that is furthest, else what readers see.
    """
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    return [deletion(leaf) for leaf in sorted(live, key=_rank)[:-1]]


def _rank(leaf: Mapping[str, Any]) -> tuple[Any, ...]:
    generation, _, text = leaf['_rev'].partition('-')
    added = leaf.get('added')
    return (
        *precedence(leaf),
        bool(leaf.get('sent')),
        bool(leaf.get('claimed')),
        bool(leaf.get('size')),
        len(added) if isinstance(added, list) else 0,
        int(generation),
        text,
    )


RULES: Mapping[str, Rule] = dict.fromkeys(('Result', 'Group', 'Value', 'Chord', 'Part'), keep_best)
