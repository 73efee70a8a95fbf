"""Requests about the slots of concurrency keys, and about the messages that wait for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .. import design
from ..couchdb.bulk import deletion
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import members, text
from ..documents import concurrency, workitem
from ..documents.ids import RATE
from . import waiting

__all__ = ['Slots']

_IDS = members(id=text)

#: The most keys whose waiting messages one request reads, and the most rate keys that it lists.
_MAX_KEYS, _MAX_RATES = 50, 1000

#: How many waiting messages of a key are read for its free slots at least: first, and then if none of those has a limit
#: that is high enough.
_DEPTHS = (1, 40, 500)


class Slots:
    """The slots of one database. *Every* method raises the errors of `Client`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def taken(self, key: str) -> set[int]:
        """Return the numbers of a key's slots that are taken; one request."""
        start = concurrency.prefix(key)
        numbers = (row['id'].removeprefix(start) for row in self.client.id_range(start))
        return {int(number) for number in numbers if number.isdecimal()}

    def first_parked(self, counts: Mapping[str, int]) -> list[tuple[str, Document | None]]:
        """Return the first messages that wait for slots of these keys: as many of each key as `counts` says.

        The highest priority is first, then the oldest message. Each comes with its key; it is None if it was changed
        since the view read it, and does not wait any more. Two requests for each 50 keys.
        """
        keys, found = list(counts), list[tuple[str, str]]()
        for start in range(0, len(keys), _MAX_KEYS):
            queries = [
                {**_rows_of(key), 'limit': counts[key], 'reduce': False} for key in keys[start : start + _MAX_KEYS]
            ]
            results = waiting.query(self.client, queries, _IDS, view='leases')
            found += [(key, row['id']) for key, rows in zip(keys[start:], results, strict=False) for row in rows]
        docs = self.client.fetch([doc_id for _, doc_id in found]) if found else []
        return [
            (key, doc if doc and workitem.is_waiting(doc) and concurrency.parked_key(doc) == key else None)
            for (key, _), doc in zip(found, docs, strict=True)
        ]

    def parked_for_slots(self, free: Mapping[str, Collection[int]]) -> list[tuple[str, int | None, Document | None]]:
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
            for key, doc in self.first_parked(counts):
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

    def parked_keys(self, limit: int, after: str | None) -> list[str]:
        """Return up to `limit` keys that messages wait for, those that come after the key `after` first."""
        start: list[Any] = ['parked', None, *([] if after is None else [design.key_of(after), LAST])]
        # In the body of a request: in a URL, an encoded key could be too long.
        found = {'startkey': start, 'endkey': ['parked', None, LAST], 'group_level': 3, 'limit': limit}
        [rows] = waiting.query(self.client, [found], members(), view='leases')
        return [key for row in rows if (key := design.queue_of(row['key'][2])) is not None]

    def parked_for_rates(self) -> list[str]:
        """Return the keys under which messages wait for starts of rate keys, up to 1,000; see `documents.rates`."""
        first = design.key_of(RATE)
        rows = self.client.view(
            design.NAME,
            'leases',
            members(),
            startkey=['parked', None, first],
            endkey=['parked', None, f'{first}\ufff0'],
            group_level=3,
            limit=_MAX_RATES,
        )
        return [key for row in rows if (key := design.queue_of(row['key'][2])) is not None]

    def of(self, consumer: str) -> list[Document]:
        """Return the slots that a consumer has taken."""
        rows = self.client.view(
            design.NAME, 'leases', _IDS, startkey=['slot', consumer], endkey=['slot', consumer], reduce=False
        )
        docs = self.client.fetch([row['id'] for row in rows]) if rows else []
        return [doc for doc in docs if doc and doc.get('type') == 'Slot' and doc.get('by') == consumer]

    def free(self, slots: Iterable[Document]) -> int:
        """Free these slots, if they are unchanged; return how many were freed."""
        deletions = [deletion(doc) for doc in slots]
        return sum(result.is_stored for result in self.client.bulk(deletions)) if deletions else 0

    def unpark(self, docs: Sequence[Document]) -> int:
        """Let consumers claim these messages again; return how many were unchanged and can now be claimed."""
        return sum(result.is_stored for result in self.client.bulk([concurrency.unpark(doc) for doc in docs]))


def _rows_of(key: str) -> Document:
    name = design.key_of(key)
    return {'startkey': ['parked', None, name], 'endkey': ['parked', None, name, {}]}
