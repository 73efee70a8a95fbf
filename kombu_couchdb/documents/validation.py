"""Validation of names and values before they are sent: CouchDB would change or refuse invalid ones.

* A name is text of at most 500 bytes: three names make the id of a document, which is part of a URL.
* A number is one that CouchDB returns unchanged: not NaN, not infinite, and of a size from 1e-307 to 1e308.
* Values are nested in at most 100 levels, so that every reader can read them. This concerns headers; the body is text.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError, Unstorable

__all__ = ['check_names', 'check_value', 'is_deeper']

_MAX_NAME_BYTES = 500
_MAX_LEVELS = 100
_MAX_NUMBER, _MIN_NUMBER = 10**308, 1e-307


def check_names(**names: Any) -> None:
    """Raise `ConfigurationError` for an invalid `queue`, `exchange` or `routing_key`; None is accepted."""
    for what, name in names.items():
        try:
            fit = name is None or (isinstance(name, str) and len(name.encode('utf-8')) <= _MAX_NAME_BYTES)
        except UnicodeEncodeError:
            fit = False  # half of a surrogate pair
        if not fit:
            raise ConfigurationError(
                f'{what.replace("_", " ")} must be text of at most {_MAX_NAME_BYTES} bytes in UTF-8, not {name!a:.80}'
            )


def is_deeper(value: Any, levels: int = _MAX_LEVELS) -> bool:
    """Tell whether lists and objects are nested in more than `levels` levels; without recursion, for any depth."""
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


def check_value(what: str, value: Any, levels: int = _MAX_LEVELS) -> None:
    """Raise `Unstorable` if CouchDB would not return `value` unchanged; `what` names the value in the error."""
    if isinstance(value, dict):
        if any(not isinstance(name, str) for name in value):
            raise Unstorable(f'{what} cannot be stored: the names of members must be text')
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        if isinstance(value, (int, float)) and not (value == 0 or _MIN_NUMBER <= abs(value) <= _MAX_NUMBER):
            raise Unstorable(f'{what} cannot be stored: CouchDB cannot hold the number {value!r:.40}')
        return
    if not levels:
        raise Unstorable(f'{what} cannot be stored: it is nested in more than {_MAX_LEVELS} levels')
    for member in value:
        check_value(what, member, levels - 1)
