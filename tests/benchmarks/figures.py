"""Medians, percentiles and ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

__all__ = ['median_of', 'number', 'percentile', 'ratio', 'times']


def median_of(values: Sequence[float]) -> float | None:
    """Return the median, or None if there are no values."""
    return float(median(values)) if values else None


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed.

    >>> percentile([1, 2, 3, 4], 0.5), percentile([1, 2, 3, 4], 0.99)
    (2, 4)
    """
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def ratio(value: float | None, base: float | None) -> float | None:
    """Return `value / base`, or None if either is missing or `base` is 0."""
    return None if value is None or not base else value / base


def number(value: float | None) -> str:
    """Return a value with three significant digits, or a dash.

    >>> number(12345.6), number(123.4), number(1.234), number(0.0123), number(0), number(None)
    ('12,300', '123', '1.23', '0.0123', '0', '–')
    """
    if value is None:
        return '–'
    return _rounded(value, 3)


def times(value: float | None) -> str:
    """Return a ratio with two significant digits, or a dash.

    >>> times(12.34), times(0.456), times(123.4), times(None)
    ('×12', '×0.46', '×120', '–')
    """
    if value is None:
        return '–'
    return f'×{_rounded(value, 2)}'


def _rounded(value: float, digits: int) -> str:
    places = digits - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f'{round(value, places):,.{max(0, places)}f}'
