"""Requests about parked messages: those that wait for a slot of a concurrency key, or for a start of a rate key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .. import design
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import members, text
from ..documents import concurrency, workitem
from ..documents.ids import RATE
from ..queues import waiting

_IDS = members(id=text)

#: The most keys whose parked messages one request reads, and the most rate keys that it lists.
_MAX_KEYS, _MAX_RATES = 50, 1000

#: How many parked messages of a key are read for its free slots at least: first, and then if none of those has a limit
#: that is high enough.
_DEPTHS = (1, 40, 500)


class ParkedMessages:
    """The parked messages of one database. *Every* method raises the errors of `Client`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def keys(self, limit: int, after: str | None) -> list[str]:
        """Return up to `limit` keys that messages wait for, those that come after the key `after` first."""
        return self._keys(limit, *([] if after is None else [design.key_of(after), LAST]))

    def rate_keys(self) -> list[str]:
        """Return the keys under which messages wait for starts of rate keys, up to 1,000; see `documents.rates`."""
        first = design.key_of(RATE)
        return self._keys(_MAX_RATES, first, end=f'{first}\ufff0')

    def _keys(self, limit: int, *start: Any, end: Any = LAST) -> list[str]:
        # In the body of a request: in a URL, an encoded key could be too long.
        keys = {'startkey': ['parked', None, *start], 'endkey': ['parked', None, end], 'group_level': 3, 'limit': limit}
        [rows] = waiting.query(self._client, [keys], members(), view='leases')
        return [key for row in rows if (key := design.queue_of(row['key'][2])) is not None]

    def first(self, counts: Mapping[str, int]) -> list[tuple[str, Document | None]]:
        """Return the first messages that are parked under these keys: as many of each key as `counts` says.

        The highest priority is first, then the oldest message. Each comes with its key; it is None if it was changed
        since the view read it, and does not wait any more. Two requests for each 50 keys.
        """
        keys, found = list(counts), list[tuple[str, str]]()
        for start in range(0, len(keys), _MAX_KEYS):
            queries = [
                {**_rows_of(key), 'limit': counts[key], 'reduce': False} for key in keys[start : start + _MAX_KEYS]
            ]
            results = waiting.query(self._client, queries, _IDS, view='leases')
            found += [(key, row['id']) for key, rows in zip(keys[start:], results, strict=False) for row in rows]
        docs = self._client.fetch([doc_id for _, doc_id in found]) if found else []
        return [
            (key, doc if doc and workitem.is_waiting(doc) and concurrency.parked_key(doc) == key else None)
            for (key, _), doc in zip(found, docs, strict=True)
        ]

    def for_slots(self, free: Mapping[str, Collection[int]]) -> list[tuple[str, int | None, Document | None]]:
        """Return the messages that may go on with these free slots, by key: see `concurrency.assign`.

        Each comes with its key and its slot. (key, slot, None) says that other consumers changed messages of the key
        meanwhile: look again for one for this slot. Two requests for each 50 keys, and up to four more if the messages
        of a key have different limits.
        """
        found = list[tuple[str, int | None, Document | None]]()
        left = {key: set(numbers) for key, numbers in free.items()}
        for depth in _DEPTHS:
            counts = {key: max(depth, len(numbers)) for key, numbers in left.items()}
            read: dict[str, list[Document | None]] = {key: [] for key in left}
            for key, doc in self.first(counts):
                read[key].append(doc)
            for key, docs in read.items():
                given = concurrency.assign([doc for doc in docs if doc], left[key])
                idle = left[key] - {number for number, _ in given}
                if idle and len(docs) == counts[key] and depth != _DEPTHS[-1]:
                    continue
                found += [(key, number, doc) for number, doc in given]
                found += [(key, number, None) for number in idle if None in docs]
                del left[key]
            if not left:
                break
        return found


def _rows_of(key: str) -> Document:
    name = design.key_of(key)
    return {'startkey': ['parked', None, name], 'endkey': ['parked', None, name, {}]}
