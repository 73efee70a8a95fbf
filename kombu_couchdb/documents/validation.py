"""Validation of names and values before they are sent: CouchDB would change or refuse others.

* A name is text of up to 500 bytes: three of them make the id of a document, and that has to stand in a URL.
* A number is one that CouchDB's JSON gives back: neither NaN nor infinite, and neither beyond 1e308 nor smaller than 1e-307.
* Nothing is nested in more than 100 levels, so that every reader can read it. That concerns headers; the body is text.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError, Unstorable

__all__ = ['check_names', 'check_value', 'is_deeper']

_LONGEST = 500
_DEEPEST = 100
_LARGEST, _SMALLEST = 10**308, 1e-307


def check_names(**names: Any) -> None:
    """Raise `ConfigurationError` if a `queue`, `exchange` or `routing_key` can be none; None is no name, and is let pass."""
    for what, name in names.items():
        try:
            fit = name is None or (isinstance(name, str) and len(name.encode('utf-8')) <= _LONGEST)
        except UnicodeEncodeError:
            fit = False  # half of a surrogate pair
        if not fit:
            raise ConfigurationError(
                f'{what.replace("_", " ")} must be text of at most {_LONGEST} bytes in UTF-8, not {name!a:.80}'
            )


def is_deeper(value: Any, levels: int = _DEEPEST) -> bool:
    """Tell whether lists and objects in `value` are nested in more than so many levels, however many there are."""
    layer = [value] if isinstance(value, (dict, list)) else []
    for _ in range(levels):
        if not layer:
            return False
        layer = [
            member
            for outer in layer
            for member in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(member, (dict, list))
        ]
    return bool(layer)


def check_value(what: str, value: Any, levels: int = _DEEPEST) -> None:
    """Raise `Unstorable` if anything in `value` would not come back as it is; `what` says in the error where it stands."""
    if isinstance(value, dict):
        if any(not isinstance(name, str) for name in value):
            raise Unstorable(f'{what} cannot be stored: the names of members must be text')
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        if isinstance(value, (int, float)) and not (value == 0 or _SMALLEST <= abs(value) <= _LARGEST):
            raise Unstorable(f'{what} cannot be stored: CouchDB cannot hold the number {value!r:.40}')
        return
    if not levels:
        raise Unstorable(f'{what} cannot be stored: it is nested in more than {_DEEPEST} levels')
    for member in value:
        check_value(what, member, levels - 1)
