"""Runs: in a long queue, messages that follow each other have the same first consumer. No I/O.

CouchDB keeps documents and rows of views in B-trees. To claim and to delete messages that lie side by side costs the
server a fifth less than messages scattered over the whole queue (0.79 and 0.98 ms each with eight consumers, measured
on CouchDB 3.5). So the messages of a long page are divided into runs, and the claim order of all messages of a run is
that of the message at its end.

Which messages end a run follows from their ids. Consumers claim a run from its beginning, so that its end stays known
until the last message of the run is claimed: consumers that read the queue at different times see the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from ..design.rows import WaitingRow

__all__ = ['Runs']

#: The average length of a run. Runs of 8 to 64 messages cost the server the same. With shorter ones the shares of the
#: consumers are more equal.
_RUN = 8

#: A queue becomes long if a page has at least this number of messages for each consumer. Below that, the order of a
#: message is that of its own id, so that a few messages are spread over all consumers.
_LONG = 32

#: A long queue stays long until a page has fewer messages than this for each consumer: consumers that read the end of
#: the queue at different times should agree on the runs.
_SHORT = 8


class Runs:
    """The runs of one queue; for the I/O thread alone."""

    def __init__(self) -> None:
        self._is_long = False
        # Of the last two pages: messages of the page before may still be claimed after a page is read.
        self._keys: dict[str, str] = {}
        self._former: dict[str, str] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._is_long, self._keys, self._former = False, {}, {}

    def read(self, rows: Sequence[WaitingRow], consumers: int) -> None:
        """Divide the rows of a page, in the order of delivery, into runs."""
        self._is_long = len(rows) >= (_SHORT if self._is_long else _LONG) * consumers
        # Without a known end, the order of a message is that of its own id.
        self._former, self._keys = self._keys, {row.id: row.id for row in rows}
        run: list[str] = []
        for row in rows if self._is_long else ():
            run.append(row.id)
            if crc32(row.id.encode()) >> 16 & _RUN - 1 == 0:
                self._keys.update(dict.fromkeys(run, row.id))
                run = []

    def key(self, doc_id: str) -> str:
        """Return the id that decides which consumer may claim this message first."""
        return self._keys.get(doc_id) or self._former.get(doc_id, doc_id)
