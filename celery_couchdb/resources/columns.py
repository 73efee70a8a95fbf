"""Columns, cells and the texts in them: numbers, dates, durations and sizes for people, and JSON.

A cell has a tone, which says what a value means. The commands show tones as colours, and the page as classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from kombu.utils.json import JSONEncoder

from kombu_couchdb.log import printable
from kombu_couchdb.values import is_number

#: Shown in place of a missing value.
NO_VALUE = '-'

#: What a value means to its reader.
Tone = Literal['', 'good', 'warning', 'bad', 'info', 'dim', 'strong']


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    tone: Tone = ''


class Lines(tuple[str, ...]):
    """A text of several lines in the details of something, such as a traceback."""


#: What a line of a table, or an object of JSON, describes: names and values.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, what it shows of a row, its alignment, and how narrow it may become."""

    title: str
    #: The member of a row that is shown; None for a format of the whole row.
    member: str | None
    #: Returns the cell for a value of this member, or for a row.
    format: Callable[[Any], Cell | str] = lambda value: NO_VALUE if value is None else str(value)
    #: Align the cells to the right, as for numbers.
    right: bool = False
    #: The minimum width in characters, if the column may be shortened; None if it may not.
    min_width: int | None = None

    def cell(self, row: Row) -> Cell:
        """Return the cell for a row, without control characters."""
        found = self.format(row if self.member is None else row.get(self.member))
        cell = found if isinstance(found, Cell) else Cell(found)
        return Cell(printable(cell.text), cell.tone)


# -- values


def count_cell(number: int | None, tone: Tone = '') -> Cell:
    """Return a cell with a number and thousands separators. `tone` applies to numbers above 0; 0 is dim."""
    if number is None:
        return Cell(NO_VALUE, 'dim')
    return Cell(f'{number:,}', tone if number else 'dim')


def rate_cell(per_second: float) -> Cell:
    """Return a cell with a rate to one decimal place; 0 is dim."""
    if not per_second:
        return Cell('0', 'dim')
    return Cell(f'{per_second:,.1f}' if per_second >= 0.05 else '<0.1')


def format_size(octets: int | None) -> str:
    """Return a number of bytes, such as `4.2 MB`."""
    if octets is None:
        return NO_VALUE
    if octets < 1000:
        return f'{octets} B'
    value = octets / 1000
    for unit in ('kB', 'MB', 'GB'):
        if value < 999.95:
            return f'{value:.1f} {unit}'
        value /= 1000
    return f'{value:,.1f} TB'


def format_duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: `12 s`, `3 m 12 s`, `2 h 5 m`, `4 d 3 h`."""
    if seconds is None:
        return NO_VALUE
    total = max(0, int(seconds))
    for unit, length, lesser, part in (('d', 86400, 'h', 3600), ('h', 3600, 'm', 60), ('m', 60, 's', 1)):
        if total >= length:
            return f'{total // length:,} {unit} {total % length // part} {lesser}'
    return f'{total} s'


def format_mean(seconds: float | None) -> str:
    """Return a mean of short durations: `12 ms`, `1.2 s`, `3 m 12 s`."""
    if seconds is None or seconds >= 60:
        return format_duration(seconds)
    return f'{seconds:.1f} s' if seconds >= 1 else f'{1000 * seconds:.0f} ms'


def format_ago(date: Any, now: float) -> str:
    """Return how long ago a date is; that of a document may be anything."""
    return format_duration(now - date) if isinstance(date, (int, float)) else NO_VALUE


def format_date(seconds: Any) -> str:
    """Return a date, such as `2026-11-22 14:31:07 UTC`; that of a document may be anything."""
    try:
        return NO_VALUE if seconds is None else f'{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC'
    except (TypeError, ValueError, OverflowError, OSError):
        return json_line(seconds)


def format_dated(seconds: Any, now: float) -> str:
    """Return a date with its distance: `2026-11-22 14:31:07 UTC (23 s ago)`; that of a document may be anything."""
    if not is_number(seconds):
        return format_date(seconds)
    distance = f'{format_ago(seconds, now)} ago' if seconds <= now else f'in {format_duration(seconds - now)}'
    return f'{format_date(seconds)} ({distance})'


# -- JSON


def json_line(value: Any) -> str:
    """Return JSON in one line. Values that JSON cannot hold become text; unprintable characters become `\\u009b`."""
    text = json.dumps(value, cls=_Encoder, ensure_ascii=False)
    return (
        text if text.isprintable() else ''.join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
    )


class _Encoder(JSONEncoder):
    def default(self, o: Any) -> Any:
        try:
            return super().default(o)
        except TypeError:
            return repr(o)
