"""Input and output of the commands: numbers, durations and sizes for people, tables, JSON, and printing itself.

No other module prints. Names, ids and reasons in documents can contain any characters, and this module escapes those
that control a terminal: in lines, tables and JSON.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import click
from kombu.utils.json import JSONEncoder

from kombu_couchdb.log import printable
from kombu_couchdb.values import SECONDS_OF_UNIT, date_of

__all__ = [
    'NO_VALUE',
    'Age',
    'Cell',
    'Column',
    'Duration',
    'Json',
    'Row',
    'confirm',
    'count_cell',
    'echo',
    'echo_styled',
    'format_ago',
    'format_date',
    'format_duration',
    'format_size',
    'format_table',
    'json_line',
    'printable',
    'rate_cell',
    'redraw',
    'remove_unwanted_colours',
    'shorten',
    'terminal_width',
]

#: Printed in place of a missing value.
NO_VALUE = '-'

_GAP = '  '

#: The width of a file or a pipe, in characters: wider than any table.
_UNLIMITED_WIDTH = 1_000_000

#: Escape sequences: move the cursor to the upper left corner; clear the rest of the line; clear everything below.
_HOME, _CLEAR_LINE, _CLEAR_BELOW = '\x1b[H', '\x1b[K', '\x1b[J'


@dataclass(frozen=True)
class Cell:
    """One cell of a table; `style` has keyword arguments for `click.style`."""

    text: str
    style: Mapping[str, Any] = field(default_factory=dict)


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
        return Cell(printable(cell.text), cell.style)


# -- values


def count_cell(number: int | None, **style: Any) -> Cell:
    """Return a cell with a number and thousands separators. `style` applies to numbers above 0; 0 is dim."""
    if number is None:
        return Cell(NO_VALUE, {'dim': True})
    return Cell(f'{number:,}', style if number else {'dim': True})


def rate_cell(per_second: float) -> Cell:
    """Return a cell with a rate to one decimal place; 0 is dim."""
    if not per_second:
        return Cell('0', {'dim': True})
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


def format_ago(date: Any, now: float) -> str:
    """Return how long ago a date is; that of a document may be anything."""
    return format_duration(now - date) if isinstance(date, (int, float)) else NO_VALUE


def format_date(seconds: Any, zone: timezone | None = timezone.utc, form: str = '%Y-%m-%d %H:%M:%S') -> str:
    """Return a date, with a time zone of None in the local one; that of a malformed document may be anything."""
    try:
        return NO_VALUE if seconds is None else datetime.fromtimestamp(seconds, zone).astimezone(zone).strftime(form)
    except (TypeError, ValueError, OverflowError, OSError):
        return json_line(seconds)


def shorten(text: str, length: int) -> str:
    """Return text with at most `length` characters; an ellipsis replaces the middle of a longer text."""
    if len(text) <= length:
        return text
    head = length // 2
    return f'{text[:head]}…{text[len(text) + head + 1 - length :]}'


# -- values of options


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click
    """A duration such as `90s`, `15m`, `2h` or `7d`, in seconds; without a unit it is in seconds."""

    name = 'duration'

    def __init__(self, least: float = 0.0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds of a text."""
        match = re.fullmatch(r'(\d{1,9}(?:\.\d{1,9})?)([smhd]?)', str(value))
        if match is None:
            self.fail(f'give a number and a unit, such as 90s, 15m, 2h or 7d, not {value!r:.80}', param, ctx)
        seconds = float(match[1]) * SECONDS_OF_UNIT[match[2] or 's']
        if seconds < self._least:
            self.fail(f'{value} is less than {self._least:g} s', param, ctx)
        return seconds


class Age(Duration):
    """How long ago something was, in seconds: a duration with a unit, or a date, which is in UTC by default."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds of a text."""
        if re.fullmatch(r'[\d.]+[smhd]', value):
            return super().convert(value, param, ctx)
        try:
            date = date_of(value)
        except ValueError:
            self.fail(f'{value!r:.80} is neither a duration (90s, 30m, 2h, 1d) nor a date (2026-11-22).', param, ctx)
        return time.time() - (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


class Json(click.ParamType):  # type: ignore[type-arg]
    """A list or an object in JSON."""

    name = 'json'

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text."""
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, self._kind):
            shape = 'a list' if self._kind is list else 'an object'
            self.fail(f'it must be {shape} in JSON, not {value!r:.80}', param, ctx)
        return found


# -- tables


def format_table(columns: Sequence[Column], rows: Iterable[Row], max_width: int | None = None) -> str:
    """Return a table with a line of titles, by default as wide as the terminal.

    Columns are shortened, the widest first, until the table has at most `max_width` characters in a line, or no column
    may become narrower.
    """
    max_width = max_width or terminal_width()
    lines = [[Cell(column.title, {'bold': True}) for column in columns]]
    lines += [[column.cell(row) for column in columns] for row in rows]
    widths = [max(len(line[i].text) for line in lines) for i in range(len(columns))]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > max_width:
        flexible = [i for i, column in enumerate(columns) if widths[i] > (column.min_width or widths[i])]
        if not flexible:
            break
        widths[max(flexible, key=widths.__getitem__)] -= 1
    return '\n'.join(_line(columns, widths, line) for line in lines)


def _line(columns: Sequence[Column], widths: Sequence[int], row: Sequence[Cell]) -> str:
    parts = []
    for column, length, cell in zip(columns, widths, row, strict=True):
        text = shorten(cell.text, length)
        blank = ' ' * (length - len(text))
        # Do not style the blanks: underlines and background colours would show them.
        styled = click.style(text, **cell.style) if cell.style else text
        parts.append(blank + styled if column.right else styled + blank)
    return _GAP.join(parts).rstrip(' ')


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


# -- the terminal


def echo(text: str, *, err: bool = False) -> None:
    """Print one line to stdout, or to stderr with `err`. Control characters and line breaks are escaped."""
    click.echo(printable(text), err=err)


def echo_styled(text: str) -> None:
    """Print text that may have colours and several lines. Its parts must be escaped already, as tables and JSON are."""
    click.echo(remove_unwanted_colours(text))


def redraw(text: str) -> None:
    """Print such text over the previous one on the terminal.

    It is written in one piece, and the screen is not cleared first, so that it does not flicker. Lines that do not fit
    on the terminal are left out.
    """
    lines = remove_unwanted_colours(text).split('\n')[: shutil.get_terminal_size().lines - 1]
    click.echo(_HOME + ''.join(f'{line}{_CLEAR_LINE}\n' for line in lines) + _CLEAR_BELOW, nl=False)


def remove_unwanted_colours(text: str) -> str:
    """Return text without colours if the user has set `celery --no-color` or `NO_COLOR`, which Celery reads.

    `click.echo` removes colours from files and pipes.
    """
    context = click.get_current_context(silent=True)
    unwanted = context is not None and getattr(context.find_root().obj, 'no_color', False)
    return click.unstyle(text) if unwanted else text


def confirm(question: str) -> None:
    """Ask the user a yes-or-no question; *raises* `click.Abort` if the answer is no."""
    click.confirm(printable(question), abort=True)


def terminal_width() -> int:
    """Return the width of the terminal in characters. It is unlimited for a file or a pipe."""
    return shutil.get_terminal_size((80 if sys.stdout.isatty() else _UNLIMITED_WIDTH, 24)).columns
