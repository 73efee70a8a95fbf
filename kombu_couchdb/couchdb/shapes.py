"""Shapes of CouchDB's responses: each request checks that its response has the right one.

A proxy's page, an answer that was meant for somebody else, and that of a server in trouble can all be JSON with status 200. So
each request says which shape it expects, and `http` looks in one place whether it came. A shape is a function that tells whether
a value has it; those below are made of one another.
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
    """Any value but null."""
    return value is not None


def text(value: Any) -> bool:
    """Text."""
    return isinstance(value, str)


def number(value: Any) -> bool:
    """A number that is finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def flag(value: Any) -> bool:
    """True or false."""
    return isinstance(value, bool)


def sequence(value: Any) -> bool:
    """A point in the history of a database: the number of the last change in it, alone or with more behind it."""
    return str(value).partition('-')[0].isdecimal()


def revision(value: Any) -> bool:
    """A document's revision: how often it was written, and a hash."""
    return isinstance(value, str) and sequence(value)


def equal(wanted: Any) -> Shape:
    """This value."""
    return lambda value: bool(value == wanted)


def maybe(shape: Shape) -> Shape:
    """Null, or missing, or of this shape."""
    return lambda value: value is None or shape(value)


def both(one: Shape, other: Shape) -> Shape:
    """Of this shape, and of that."""
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
    """A list, all of whose items have this shape."""
    return lambda value: isinstance(value, list) and all(map(shape, value))


def exactly(*shapes: Shape) -> Shape:
    """A list of just these, in this order."""

    def check(value: Any) -> bool:
        if not isinstance(value, list) or len(value) != len(shapes):
            return False
        for shape, one in zip(shapes, value, strict=True):  # noqa: SIM110
            if not shape(one):
                return False
        return True

    return check


def rows(**shapes: Shape) -> Shape:
    """An answer with rows that have these members."""
    return members(rows=items(members(**shapes)))


def document(doc_id: Any) -> Shape:
    """The document with this id."""
    return members(_id=equal(doc_id), _rev=revision)


#: That something was done.
DONE = members(ok=equal(True))

#: Any document.
DOCUMENT = members(_id=text, _rev=revision)
