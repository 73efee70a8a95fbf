"""Tables of results in reStructuredText."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .cases import Row
from .figures import median_of, number, ratio, times

__all__ = ['OURS', 'RAW', 'cell', 'simple_table', 'table_of']

#: The systems that all others are compared with.
OURS, RAW = 'couchdb', 'raw'


def table_of(rows: Mapping[Row, Mapping[str, Sequence[float]]], systems: Sequence[str]) -> str:
    """Return a table of medians, with a line for each row and a column for each system.

    After a median follow its ratio to ours, such as `×2.0`, and in brackets its ratio to raw.
    """
    lines = [['', 'Unit', *systems]]
    for row, values in rows.items():
        medians = {system: median_of(values.get(system, ())) for system in systems}
        lines.append([row.label, row.unit, *(cell(system, medians) for system in systems)])
    return simple_table(lines)


def cell(system: str, medians: Mapping[str, float | None]) -> str:
    """Return the median of a system with its ratio to ours and, in brackets, to raw, if these are known."""
    value = medians[system]
    parts = [number(value)]
    if system != OURS and (found := ratio(value, medians.get(OURS))) is not None:
        parts.append(times(found))
    if system != RAW and (found := ratio(value, medians.get(RAW))) is not None:
        parts.append(f'({times(found)})')
    return ' '.join(parts)


def simple_table(lines: Sequence[Sequence[str]]) -> str:
    """Return a simple table; the first of `lines` is the header."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    border = ' '.join('=' * max(1, width) for width in widths)
    head, *body = [
        ' '.join(_filled(text, width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return '\n'.join([border, head, border, *body, border])


def _filled(text: str, width: int) -> str:
    # An empty first cell would make the line a continuation of the one before.
    return (text or '\\').ljust(max(1, width))
