"""Reads the rows of a view in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..couchdb.client import Client
from ..couchdb.shapes import Shape
from ..design.rows import Row

__all__ = ['BATCH_ROWS', 'paged']

#: The rows that one request reads.
BATCH_ROWS = 200


def paged(client: Client, design: str, view: str, row: Shape, **where: Any) -> Iterator[Row]:
    """Yield the rows of a view, each document once. You may change or delete the documents while you iterate."""
    seen = set[str]()
    while rows := client.view(design, view, row, **where, limit=BATCH_ROWS + 1):
        new = [row for row in rows if row['id'] not in seen]
        seen.update(row['id'] for row in new)
        yield from new
        if len(rows) <= BATCH_ROWS or not new:
            # `new` is empty if more rows than a page have the same key: the embedded server ignores startkey_docid.
            return
        # After the last row that was read, not from the next one: the embedded server returns some fractions in keys a
        # little larger than they are, and would leave out the row with such a key.
        where = {**where, 'startkey': rows[-1]['key'], 'startkey_docid': rows[-1]['id']}
