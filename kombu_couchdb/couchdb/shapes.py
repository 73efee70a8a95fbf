"""Shapes of CouchDB's responses: each request validates that its response has the expected structure.

The page of a proxy, the response to another request, or the response of a server with a problem may be JSON with status
200. Therefore each request names the shape that it expects, and `http` validates the response. A shape is a function
that returns whether a value matches; complex shapes are composed of simple ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..values import is_number

Shape = Callable[[Any], bool]

#: A document or a part of one.
Document = dict[str, Any]

#: A row of a view or of `_all_docs`: `id`, `key`, `value`, and `doc` if the request includes documents.
Row = dict[str, Any]


def anything(value: Any) -> bool:
    """Any value except null."""
    return value is not None


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def number(value: Any) -> bool:
    """A finite number."""
    return is_number(value)


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def sequence(value: Any) -> bool:
    """An update sequence of a database: the number of a change, alone or with a dash and a suffix."""
    return str(value).partition('-')[0].isdecimal()


def revision(value: Any) -> bool:
    """A revision of a document: its generation and a hash."""
    return isinstance(value, str) and value.partition('-')[0].isdecimal()


def equal(wanted: Any) -> Shape:
    """The value `wanted`."""
    return lambda value: bool(value == wanted)


def maybe(shape: Shape) -> Shape:
    """Null, a missing member, or a value of this shape."""
    return lambda value: value is None or shape(value)


def both(one: Shape, other: Shape) -> Shape:
    """A value that has both shapes."""
    return lambda value: one(value) and other(value)


def members(**shapes: Shape) -> Shape:
    """An object with at least these members."""
    known = tuple(shapes.items())

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        for name, shape in known:  # noqa: SIM110 - a generator would be twice as slow, for thousands of rows
            if not shape(value.get(name)):
                return False
        return True

    return check


def items(shape: Shape) -> Shape:
    """A list whose items all have this shape."""
    return lambda value: isinstance(value, list) and all(map(shape, value))


def exactly(*shapes: Shape) -> Shape:
    """A list with one item of each of these shapes, in this order."""

    def check(value: Any) -> bool:
        if not isinstance(value, list) or len(value) != len(shapes):
            return False
        for shape, one in zip(shapes, value, strict=True):  # noqa: SIM110
            if not shape(one):
                return False
        return True

    return check


def rows(**shapes: Shape) -> Shape:
    """A response with `rows` whose items have these members."""
    return members(rows=items(members(**shapes)))


def document(doc_id: Any) -> Shape:
    """The document with this id."""
    return lambda value: DOCUMENT(value) and bool(value['_id'] == doc_id)


def winner_row(doc_id: str) -> Shape:
    """The row of `_all_docs` for this id, with its document."""
    return members(key=equal(doc_id), doc=maybe(document(doc_id)))


#: The response `{'ok': true}`.
DONE = members(ok=equal(True))

#: Any document.
DOCUMENT = members(_id=text, _rev=revision)

#: The shape of the response to `_changes`.
CHANGES = members(
    results=items(members(id=text, changes=exactly(members(rev=revision)), doc=maybe(DOCUMENT))), last_seq=sequence
)

#: The shape of CouchDB's information about an index.
INDEX = members(view_index=members(updater_running=flag, updates_pending=members(total=number)))

_result = members(id=text, docs=items(members()))

_row = members(id=text, value=members(rev=revision))


def ranged_row(row: Any) -> bool:
    """A row of `_all_docs`; a document in it has the id of the row."""
    return _row(row) and maybe(document(row['id']))(row.get('doc'))


def found_leaves(result: Any) -> bool:
    """The result for a document of `_bulk_get`: leaf revisions, an error, or (embedded server) neither."""

    def leaf(found: Any) -> bool:
        return has_id(found) if isinstance(found, dict) and 'ok' in found else is_missing(found)

    if not _result(result):
        return False
    has_id, is_missing = members(ok=maybe(document(result['id']))), members(error=maybe(members()))
    return bool(result['docs']) and all(map(leaf, result['docs']))
