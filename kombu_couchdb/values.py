"""Values in documents and arguments: numbers, dates, units of durations, texts and lists of names, revisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, TypeGuard

#: The units of durations, such as `90s` or `2h`, in seconds.
SECONDS_OF_UNIT = {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}

#: The largest number that an option or a document may have. As seconds, it is about 31 years: Python cannot wait much
#: longer.
MAX_NUMBER = 10**9

#: A later date is no Unix time in seconds. Python cannot calculate with an integer of hundreds of digits.
MAX_DATE = 10**12


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether a value is a finite number, and neither true nor false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_whole(value: Any, least: int, most: float) -> TypeGuard[int]:
    """Tell whether a value is a whole number in this range, and neither true nor false."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def nesting(value: Any) -> tuple[int, int]:
    """Return how many levels a JSON value has, and how many lists and objects; without recursion, for any depth."""
    levels = containers = 0
    level = [value] if isinstance(value, (dict, list)) else []
    while level:
        levels, containers = levels + 1, containers + len(level)
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return levels, containers


def date_of(text: str) -> datetime:
    """Return an ISO date; *raises* `ValueError`. Python 3.10 does not know the Z for UTC."""
    return datetime.fromisoformat(text[:-1] + '+00:00' if text.endswith(('Z', 'z')) else text)


def storable(text: str, length: int) -> str:
    """Return text that CouchDB can store, with at most `length` characters; an ellipsis ends a text that was longer."""
    text = text.encode('utf-8', 'replace').decode('utf-8')
    return text if len(text) <= length else f'{text[: length - 1]}…'


def revision_parts(rev: Any) -> tuple[int, str]:
    """Return the generation of a revision and its hash: the newer of two has the larger generation.

    For anything else the generation is 0. CouchDB shows the leaf revision with the largest parts.
    """
    generation, _, text = str(rev).partition('-')
    return (int(generation), text) if generation.isdecimal() else (0, '')


def enumerated(names: Sequence[str], most: int = 10) -> str:
    """Return the first `most` names, and how many more there are: `a, b and 1,200 more`."""
    return ', '.join(names[:most]) + (f' and {len(names) - most:,} more' if len(names) > most else '')


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Yield `items` in slices of at most `size`."""
    return (items[i : i + size] for i in range(0, len(items), size))
