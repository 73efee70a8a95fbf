"""Output of the commands: numbers, ages and sizes as people read them, tables, and JSON.

Names, ids and reasons in documents may be any text, and so nothing else prints: neither a line nor a table nor JSON has a
character in it by which such a text could write to the terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from kombu.utils.json import JSONEncoder

from kombu_couchdb.log import printable

__all__ = [
    'NONE',
    'Cell',
    'Column',
    'age',
    'asked',
    'coloured',
    'count',
    'json_line',
    'printable',
    'rate',
    'redraw',
    'say',
    'shortened',
    'show',
    'size',
    'table',
    'width',
]

#: What stands for a value that there is not.
NONE = '-'

_GAP = '  '

#: More columns than any table has.
_ENDLESS = 1_000_000

#: Moves the cursor to the upper left corner; clears the rest of a line, and what is below.
_HOME, _CLEAR_LINE, _CLEAR_BELOW = '\x1b[H', '\x1b[K', '\x1b[J'


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table; `style` is what `click.style` takes."""

    text: str
    style: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """A column: its title, whether it is aligned to the right, as numbers are, and how far it may be shortened, if at all."""

    title: str
    right: bool = False
    #: The fewest characters it may have; None: it is never shortened.
    least: int | None = None


# -- values


def count(number: int | None, **style: Any) -> Cell:
    """Return a number with separators of thousands; a zero is dim, and has no style of its own."""
    if number is None:
        return Cell(NONE, {'dim': True})
    return Cell(f'{number:,}', style if number else {'dim': True})


def rate(per_second: float) -> Cell:
    """Return how many a second, to one decimal; a zero is dim."""
    if not per_second:
        return Cell('0', {'dim': True})
    return Cell(f'{per_second:,.1f}' if per_second >= 0.05 else '<0.1')


def size(octets: int | None) -> str:
    """Return a number of bytes as `4.2 MB`."""
    if octets is None:
        return NONE
    if octets < 1000:
        return f'{octets} B'
    value = octets / 1000
    for unit in ('kB', 'MB', 'GB'):
        if value < 999.95:
            return f'{value:.1f} {unit}'
        value /= 1000
    return f'{value:,.1f} TB'


def age(seconds: float | None) -> str:
    """Return a duration in its two largest units: `12 s`, `3 m 12 s`, `2 h 5 m`, `4 d 3 h`."""
    if seconds is None:
        return NONE
    whole = max(0, int(seconds))
    for unit, length, lesser, part in (('d', 86400, 'h', 3600), ('h', 3600, 'm', 60), ('m', 60, 's', 1)):
        if whole >= length:
            return f'{whole // length:,} {unit} {whole % length // part} {lesser}'
    return f'{whole} s'


def shortened(text: str, length: int) -> str:
    """Return text with at most `length` characters; an ellipsis in its middle stands for what was left out."""
    if len(text) <= length:
        return text
    head = length // 2
    return f'{text[:head]}…{text[len(text) + head + 1 - length :]}'


# -- tables


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], room: int) -> str:
    """Return a table with a line of titles, not wider than `room` as far as its columns may be shortened."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    cells = [[Cell(printable(cell.text), cell.style) for cell in row] for row in cells]
    titles = [Cell(column.title, {'bold': True}) for column in columns]
    widths = [max(len(row[i].text) for row in [titles, *cells]) for i in range(len(columns))]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        flexible = [i for i, column in enumerate(columns) if column.least is not None and widths[i] > column.least]
        if not flexible:
            break
        widths[max(flexible, key=widths.__getitem__)] -= 1
    return '\n'.join(_line(columns, widths, row) for row in [titles, *cells])


def _line(columns: Sequence[Column], widths: Sequence[int], row: Sequence[Cell]) -> str:
    parts = []
    for column, length, cell in zip(columns, widths, row, strict=True):
        text = shortened(cell.text, length)
        blank = ' ' * (length - len(text))
        # The blanks stay outside, or an underlined or coloured cell would show them.
        styled = click.style(text, **cell.style) if cell.style else text
        parts.append(blank + styled if column.right else styled + blank)
    return _GAP.join(parts).rstrip(' ')


# -- JSON


def json_line(value: Any) -> str:
    """Return JSON in one line; what JSON does not know stands as text, and what is not printable as `\\u009b`."""
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


def say(text: str, *, err: bool = False) -> None:
    """Print one line, of whatever text, to stdout or stderr."""
    click.echo(printable(text), err=err)


def show(text: str) -> None:
    """Print what `table`, `json_line` and their like have made."""
    click.echo(coloured(text))


def redraw(text: str) -> None:
    """Write such text over what was drawn before, in one go and without clearing the screen first: it does not flicker."""
    lines = coloured(text).split('\n')[: shutil.get_terminal_size().lines - 1]
    click.echo(_HOME + ''.join(f'{line}{_CLEAR_LINE}\n' for line in lines) + _CLEAR_BELOW, nl=False)


def coloured(text: str) -> str:
    """Return text without its colours if the user wants none: `celery --no-color`, or NO_COLOR, which Celery reads.

    That they stay out of files and pipes is what `click.echo` sees to.
    """
    context = click.get_current_context(silent=True)
    unwanted = context is not None and getattr(context.find_root().obj, 'no_color', False)
    return click.unstyle(text) if unwanted else text


def asked(question: str) -> None:
    """Ask whether to go on; *raises* `click.Abort` if not."""
    click.confirm(printable(question), abort=True)


def width() -> int:
    """Return how many columns there are to print in: those of the terminal; in a file or a pipe nothing is shortened."""
    return shutil.get_terminal_size((80 if sys.stdout.isatty() else _ENDLESS, 24)).columns
