"""Shapes of CouchDB's responses: each request validates that its response has the expected structure.

The page of a proxy, the response to another request, or the response of a server with a problem may be JSON with status
200. Therefore each request names the shape that it expects, and `http` validates the response. A shape is a function
that returns whether a value matches; complex shapes are composed of simple ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = [
    'DOCUMENT',
    'DONE',
    'Shape',
    'anything',
    'both',
    'document',
    'equal',
    'exactly',
    'flag',
    'items',
    'maybe',
    'members',
    'number',
    'revision',
    'rows',
    'sequence',
    'text',
]

Shape = Callable[[Any], bool]


def anything(value: Any) -> bool:
    """Any value except null."""
    return value is not None


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def number(value: Any) -> bool:
    """A finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def sequence(value: Any) -> bool:
    """An update sequence of a database: the number of a change, alone or with a dash and a suffix."""
    return str(value).partition('-')[0].isdecimal()


def revision(value: Any) -> bool:
    """A revision of a document: its generation and a hash."""
    return isinstance(value, str) and sequence(value)


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
    return members(_id=equal(doc_id), _rev=revision)


#: The response `{'ok': true}`.
DONE = members(ok=equal(True))

#: Any document.
DOCUMENT = members(_id=text, _rev=revision)
