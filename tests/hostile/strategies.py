"""Hypothesis strategies: odd text, JSON, and malformed documents."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kombu_couchdb.schema import Kind, Schema

from .worst import HARD_TO_STORE, LARGEST

__all__ = ['ODD', 'any_text', 'found', 'json_values', 'retyped', 'spoilt', 'valid']

#: Text with a special meaning somewhere. The first ones cannot be stored.
ODD = [
    *('\ud800', 'half \udfff of it', '', '\0', 'a\0b', '\u2028', '\ufeff', '\uffff', '\ufffe', '😀'),
    *('\U0010ffff', 'e\u0301', 'é', 'a\u200bb', '_design/x', '_all_docs', '_local/x', '../..', 'a/b', 'a:b'),
    *('%', '%2F', '%00', '+', ' ', 'a b', '"', '\\', '\\u0000', "'", '#', '?', '&', '=', '[]', '{}', 'null'),
    *('NaN', '0', '-1', '*', '.', '.*', '(', '\n', '\r\n', '\x7f', '\x85', '__proto__', 'constructor', '_id'),
    *('_rev', '_deleted', 'broker:', 'job:', 'x' * 500, 'x' * 501, 'ß' * 251, '\u212a', '١'),
]


def any_text(max_size: int = 20) -> st.SearchStrategy[str]:
    """Any text, including single surrogates."""
    return st.sampled_from(ODD) | st.text(st.characters(exclude_categories=()), max_size=max_size)


def _numbers(exact: bool) -> st.SearchStrategy[Any]:
    """Numbers; without `exact` only those that JavaScript does not round."""
    odd = [
        *(0, -0.0, 1.0, 1e308, 5e-324, 2.2250738585072014e-308, math.nan, math.inf, -math.inf, 10**308),
        *(10**309, -(10**400)),
    ]
    ints = st.integers() if exact else st.integers(-(2**53), 2**53)
    return ints | st.floats() | st.sampled_from(odd if exact else [n for n in odd if n != 10**308])


def json_values(names: st.SearchStrategy[str] | None = None, *, exact: bool = True) -> st.SearchStrategy[Any]:
    """Any value that Python encodes as JSON, including NaN and single surrogates."""
    names = any_text() if names is None else names
    plain = st.none() | st.booleans() | _numbers(exact) | any_text()
    deep = st.integers(50, 900).map(_nested)
    return (
        st.recursive(
            plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
        )
        | deep
    )


def _nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


#: Replacements for a member of a document: each type of JSON, and values that look right.
_OTHER: list[Any] = [
    *(None, True, False, 0, -1, 5, 2**53, 1e300, -1e300),
    *LARGEST,
    *(0.5, '', _nested(150), _nested(600), [HARD_TO_STORE], HARD_TO_STORE, 'x', 'q', '5', 'null', [], [[]]),
    *(['q'], [None], [5], {}, {'by': 5}, {'by': 'x'}, {'q': 5}, {'_deleted': True}, [{}], [{'message': 5}]),
    *('broker:consumer:x', '2026-11-21', '\0', '(', '*'),
]


def retyped(document: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A document with one to three members, at any depth, removed or retyped; not `_id`, `type` and attachments."""
    paths = [path for path in _paths(document) if path[0] not in ('_id', 'type', '_attachments')]
    change = st.tuples(st.sampled_from(paths), st.sampled_from([_MISSING, *_OTHER]))
    return st.lists(change, min_size=1, max_size=3).map(lambda changes: _changed(document, changes))


def valid(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    """A document that is as its schema says; each of the values that the schema accepts, of those known here."""
    members = {name: _accepted(kind) for name, kind in schema.kinds.items()}
    return st.fixed_dictionaries(
        {name: member for name, member in members.items() if name in schema.required},
        optional={name: member for name, member in members.items() if name not in schema.required},
    )


def _accepted(kind: Kind) -> st.SearchStrategy[Any]:
    if isinstance(kind, Schema):
        return valid(kind)
    known = [value for value in [*_OTHER, *_RIGHT] if kind.accepts(value)]
    return st.sampled_from(known).map(deepcopy)


def spoilt(schema: Schema, document: dict[str, Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """The name of a member, and a copy of a document in which this member is wrong: missing, or of another type."""

    def changed(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
        kind = schema.kinds[name]
        wrong = [value for value in _OTHER if not kind.accepts(value)]
        without = {other: value for other, value in document.items() if other != name}
        docs = [{**document, name: value} for value in wrong]
        if name in schema.required and not kind.accepts(None):
            docs.append(without)
        return st.sampled_from(docs).map(lambda doc: (name, deepcopy(doc)))

    return st.sampled_from([name for name, kind in schema.kinds.items() if _can_be_wrong(kind)]).flatmap(changed)


def _can_be_wrong(kind: Kind) -> bool:
    return any(not kind.accepts(value) for value in _OTHER)


def found(strategy: st.SearchStrategy[Any], count: int | None = None) -> list[Any]:
    """Return so many values of a strategy, by default as many as the profile tries."""
    values: list[Any] = []

    @settings(max_examples=count or settings().max_examples)
    @given(strategy)
    def each(value: Any) -> None:
        values.append(value)

    each()
    return values


_MISSING = object()

#: Values that only few members accept.
_RIGHT: list[Any] = [
    *('WorkItem', 'DoneItem', 'Schedule', 'ScheduleState', 'Consumer', 'Slot', 'Rate', 'Queue', 'Pause', 'Binding'),
    *(
        'Exchange',
        'Notice',
        'Bell',
        'Leader',
        'Broadcast',
        'History',
        'fail',
        'done',
        'fanout',
        'once',
        'app',
        '0' * 32,
    ),
    *({'by': 'x', 'date': 1.5}, {'key': 'k', 'date': 5}, {'every': 5}, {'queues': {'q': [1, 1]}, 'tasks': []}),
    'once',
    {'body': None, 'headers': {}, 'properties': {}, 'content-type': 'x', 'content-encoding': 'utf-8'},
    {'5': {'tasks': {'t': {'failed': 1}}, 'queues': {'q': {'ready': 1}}}},
]


def _paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    members: Iterable[Any] = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path for name, member in members for path in [(*before, name), *_paths(member, (*before, name))]]


def _changed(value: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Return a copy of `value` with these changes."""
    here = {path[0]: new for path, new in changes if len(path) == 1}

    def member(name: Any, old: Any) -> Any:
        inner = [(path[1:], new) for path, new in changes if path[0] == name and path[1:]]
        return here[name] if name in here else _changed(old, inner)

    if isinstance(value, dict):
        return {name: new for name, old in value.items() if (new := member(name, old)) is not _MISSING}
    if isinstance(value, list):
        return [new for place, old in enumerate(value) if (new := member(place, old)) is not _MISSING]
    return value
