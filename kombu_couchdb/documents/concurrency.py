"""Concurrency limits: of all messages with one key, at most so many run at the same time, over all workers.

Two headers of a message give its key and its limit. A consumer claims such a message only while it holds one of the
key's slots, `slot:<key>:0` to `slot:<key>:<limit - 1>`. A slot is a document: to create it is to take the slot, to
delete it in its revision is to free it. CouchDB confirms only one creation until that document is deleted, also in a
cluster: two majorities of nodes share a node, and that node refuses the second creation as a conflict.

A message that finds no free slot is *parked*: its member `parked` keeps it out of the candidates of the consumers.
Whoever frees a slot of the key removes that member again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple
from urllib.parse import quote

from ..values import is_whole
from .ids import RATE, SLOT, key_problem
from .shared_documents import Slot
from .task_message import headers_of
from .types import Document, Tombstone

#: The names of the headers.
CONCURRENCY_KEY, CONCURRENCY_LIMIT = 'concurrency_key', 'concurrency_limit'

#: The highest limit.
_MAX_LIMIT = 1000

#: A longer encoded key is hashed in the ids of its slots: CouchDB accepts URLs of up to about 8,000 bytes.
_MAX_ENCODED_LENGTH = 500


class Concurrency(NamedTuple):
    """The limit of a message: at most `limit` messages with this key run at the same time."""

    key: str
    limit: int


# -- headers


def limit_problem(headers: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the headers of a message; None if they have a valid limit, or none at all."""
    key, limit = headers.get(CONCURRENCY_KEY), headers.get(CONCURRENCY_LIMIT)
    if key is None:
        return None if limit is None else f'the header {CONCURRENCY_LIMIT} needs the header {CONCURRENCY_KEY}'
    if reason := key_problem(CONCURRENCY_KEY, key):
        return reason
    if key.startswith(RATE):
        return f'the header {CONCURRENCY_KEY} must not begin with {RATE!r}, which is for rate keys'
    if not is_whole(limit, 1, _MAX_LIMIT):
        return f'the header {CONCURRENCY_LIMIT} must be a whole number from 1 to {_MAX_LIMIT}, not {limit!r:.80}'
    return None


def limit_of(doc: Mapping[str, Any]) -> Concurrency | None:
    """Return the limit of an item, or None if it has none. It may be malformed: it is then a dead letter soon."""
    headers = headers_of(doc)
    if headers.get(CONCURRENCY_KEY) is None or limit_problem(headers):
        return None
    return Concurrency(headers[CONCURRENCY_KEY], headers[CONCURRENCY_LIMIT])


# -- slots


def prefix(key: str) -> str:
    """Return the beginning of the ids of a key's slots; their numbers follow."""
    encoded = quote(key, safe='')
    # No encoded key contains `=`.
    name = encoded if len(encoded) <= _MAX_ENCODED_LENGTH else f'={sha256(key.encode()).hexdigest()}'
    return f'{SLOT}{name}:'


def slot(key: str, number: int, by: str, now: float) -> Slot:
    """Return the document that takes a slot for the Consumer `by`. Like a claim, it differs from every other one."""
    return {'_id': f'{prefix(key)}{number}', 'type': 'Slot', 'key': key, 'by': by, 'date': now}


def resolve_slot(leaves: list[Document], living: Collection[str]) -> list[Tombstone] | None:
    """Return the deletions of those leaves of a slot whose consumers are not `living`; None to look again later.

    A living consumer deletes its leaves itself: one of them may be proven.
    """
    live = [leaf for leaf in leaves if not leaf.get('_deleted')]
    gone = [leaf for leaf in live if leaf.get('by') not in living]
    if len(live) - len(gone) > 1 and not gone:
        return None
    return [{'_id': leaf['_id'], '_rev': leaf['_rev'], '_deleted': True} for leaf in gone]


# -- parked messages


def is_parked(doc: Mapping[str, Any]) -> bool:
    """Tell whether an item waits for a slot, as the views do."""
    return parked_key(doc) is not None


def parked_key(doc: Mapping[str, Any]) -> str | None:
    """Return the key for whose slots an item waits; None if it does not wait for any."""
    parked = doc.get('parked')
    key = parked.get('key') if isinstance(parked, dict) else None
    return key if isinstance(key, str) else None


def park(doc: Mapping[str, Any], key: str, now: float) -> Document:
    """Return an item as parked: no consumer claims it until the member `parked` is removed."""
    return {**doc, 'parked': {'key': key, 'date': now}}


def assign(docs: Iterable[Document], free: Collection[int]) -> list[tuple[int | None, Document]]:
    """Return which of these waiting messages, in this order, may go on with which of the free slots of their key.

    A message gets the highest slot below its limit: the lower ones are left for lower limits. A message that does not
    need a slot of the key any more, because somebody has changed it, goes on without one.
    """
    left, found = sorted(free), list[tuple[int | None, Document]]()
    for doc in docs:
        limit = limit_of(doc)
        if limit is None or limit.key != parked_key(doc):
            found.append((None, doc))
        elif fitting := bisect_left(left, limit.limit):
            found.append((left.pop(fitting - 1), doc))
    return found


def unpark(doc: Mapping[str, Any]) -> Document:
    """Return an item that consumers may claim again, at its old position in the queue."""
    return {name: value for name, value in doc.items() if name != 'parked'}
