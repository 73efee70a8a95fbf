"""Schemas: what the members of a kind of documents must be, declared once as a `TypedDict`.

Everybody with write access to a database can write any document. `Schema.of` makes the check from the types that mypy
reads anyway. A document is checked where it enters: `problem` says in one sentence what is wrong with it, and `clean`
leaves out what is wrong, where the rest is still of use. Members that are not declared are never touched.

`Annotated` narrows a type by a `Kind`: `Annotated[float, Kind('a date', is_date)]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from .values import is_number

#: In the place of a value of which nothing is left.
_NOTHING: Any = object()


class Kind:
    """The values that a member may have: `accepts` tells them from others, `words` describe them in errors."""

    def __init__(self, words: str, accepts: Callable[[Any], bool], types: Iterable[type] = ()) -> None:
        """All values of exactly the `types` are accepted: most values are checked without a call."""
        self.words, self.accepts, self.types = words, accepts, frozenset(types)

    def problem(self, name: str, value: Any) -> str | None:
        """Return what is wrong with the value of the member `name`; None if nothing is."""
        return None if type(value) in self.types or self.accepts(value) else f'{name} must be {self.words}'

    def clean(self, value: Any) -> Any:
        """Return `value` without what is wrong in it; `_NOTHING` if that is all."""
        return value if self.accepts(value) else _NOTHING

    def or_null(self) -> Kind:
        """Return the kind that accepts null, too."""
        return _OrNull(self)


class _OrNull(Kind):
    def __init__(self, kind: Kind) -> None:
        super().__init__(
            f'{kind.words}, or null', lambda value: value is None or kind.accepts(value), {*kind.types, NoneType}
        )
        self._kind = kind

    def problem(self, name: str, value: Any) -> str | None:
        if value is None or not (found := self._kind.problem(name, value)):
            return None
        return f'{name} must be {self.words}' if found == f'{name} must be {self._kind.words}' else found

    def clean(self, value: Any) -> Any:
        return None if value is None else self._kind.clean(value)


class _List(Kind):
    def __init__(self, item: Kind) -> None:
        super().__init__('a list', lambda value: isinstance(value, list) and all(map(item.accepts, value)))
        self._item = item

    def clean(self, value: Any) -> Any:
        if not isinstance(value, list):
            return _NOTHING
        return [item for item in value if self._item.accepts(item)]


class _Object(Kind):
    def __init__(self, member: Kind) -> None:
        super().__init__(
            'an object', lambda value: isinstance(value, dict) and all(map(member.accepts, value.values()))
        )
        self._member = member

    def clean(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return _NOTHING
        return {name: member for name, member in value.items() if self._member.accepts(member)}


class Schema(Kind):
    """What the members of a kind of documents, or of an object in one, must be."""

    def __init__(self, kinds: Mapping[str, Kind], required: Collection[str] = ()) -> None:
        """A member that is not `required`, or that may be null, may be missing."""
        super().__init__('an object', lambda value: self.problem('', value) is None)
        self.kinds, self.required = kinds, frozenset(required)
        needed = {name for name in required if not kinds[name].accepts(None)}
        self._members = tuple((name, kind, kind.types, name in needed) for name, kind in kinds.items())

    @classmethod
    def of(cls, declared: Any, *names: str) -> Schema:
        """Return the schema that a `TypedDict` declares; with `names`, only what it says about these members."""
        hints = get_type_hints(declared, include_extras=True)
        kinds = {name: _kind_of(hints[name]) for name in names or hints if not name.startswith('_')}
        return cls(kinds, kinds.keys() & declared.__required_keys__)

    def problem(self, name: str, value: Any) -> str | None:
        """Return what is wrong with an object; `name` is its own, empty for a document."""
        if not isinstance(value, dict):
            return f'{name} must be an object'
        for member, kind, types, is_needed in self._members:
            found = value.get(member, _NOTHING)
            if type(found) in types or (found is _NOTHING and not is_needed):
                continue
            path = f'{name}.{member}' if name else member
            if found is _NOTHING:
                return f'{path} is missing'
            if problem := kind.problem(path, found):
                return problem
        return None

    def clean(self, value: Any) -> Any:
        """Return an object without the members that are wrong; those that are not declared stay.

        An item of a list or of a mapping that is not right as a whole is left out.
        """
        if not isinstance(value, dict):
            return _NOTHING
        cleaned = (
            (name, self.kinds[name].clean(member) if name in self.kinds else member) for name, member in value.items()
        )
        return {name: member for name, member in cleaned if member is not _NOTHING}


def list_of(item: Kind) -> Kind:
    """Return the kind of lists with items of one kind."""
    return _List(item)


ANYTHING = Kind('anything', lambda value: True)
TEXT = Kind('text', lambda value: isinstance(value, str), {str})
FLAG = Kind('true or false', lambda value: isinstance(value, bool), {bool})
NUMBER = Kind('a number', is_number, {int})
WHOLE = Kind('a whole number', lambda value: isinstance(value, int) and not isinstance(value, bool), {int})
LIST = Kind('a list', lambda value: isinstance(value, list), {list})
OBJECT = Kind('an object', lambda value: isinstance(value, dict), {dict})
_PLAIN: dict[Any, Kind] = {
    Any: ANYTHING,
    str: TEXT,
    bool: FLAG,
    float: NUMBER,
    int: WHOLE,
    list: LIST,
    dict: OBJECT,
    Mapping: OBJECT,
    NoneType: Kind('null', lambda value: value is None, {NoneType}),
}


def _kind_of(hint: Any) -> Kind:
    """Return the kind of the values of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        return Schema.of(hint)
    if origin is Annotated:
        return next(kind for kind in inner if isinstance(kind, Kind))
    if origin is Literal:
        return Kind(' or '.join(map(json.dumps, inner)), lambda value: type(value) in (str, bool) and value in inner)
    if origin in (Union, UnionType):
        [kind] = [_kind_of(part) for part in inner if part is not NoneType]
        return kind.or_null()
    if origin is None or inner[-1] is Any:
        return _PLAIN[origin or hint]
    return _List(_kind_of(inner[0])) if origin is list else _Object(_kind_of(inner[1]))
