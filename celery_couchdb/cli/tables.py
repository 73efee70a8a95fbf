"""Input and output of the commands: types of options, tables on the terminal, and printing itself.

No other module prints. Names, ids and reasons in documents can contain any characters, and this module escapes those
that control a terminal: in lines, tables and JSON.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import click

from kombu_couchdb.log import printable

from ..resources import inputs
from ..resources.columns import Cell, Column, Row, Tone

#: How the terminal shows the tones of cells, as keyword arguments for `click.style`.
_STYLES: Mapping[Tone, Mapping[str, Any]] = {
    '': {},
    'good': {'fg': 'green'},
    'warning': {'fg': 'yellow'},
    'bad': {'fg': 'red'},
    'info': {'fg': 'cyan'},
    'dim': {'dim': True},
    'strong': {'bold': True},
}

_GAP = '  '

#: The least number of characters that stay of a title.
_TITLE_CHARACTERS = 6

#: A name, or several; and the characters after which a name may be broken.
_NAMES, _BREAK = re.compile(r'\S+(, \S+)*'), '[-.,:@/_ ]'

#: A name that needs more lines of its column is cut: a forged document may have a long one.
_MAX_LINES = 12

#: The width of a file or a pipe, in characters: wider than any table.
_UNLIMITED_WIDTH = 1_000_000

#: Escape sequences: move the cursor to the upper left corner; clear the rest of the line; clear everything below.
_HOME, _CLEAR_LINE, _CLEAR_BELOW = '\x1b[H', '\x1b[K', '\x1b[J'


def shorten(text: str, length: int) -> str:
    """Return text with at most `length` characters; an ellipsis replaces the end of a longer text."""
    return text if len(text) <= length else f'{text[: length - 1]}…'


# -- values of options


class Typed(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click
    """A value that a function of `inputs` reads."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text."""
        try:
            return self._read(str(value))
        except ValueError as exc:
            self.fail(f'{exc}.', param, ctx)


class Duration(Typed):
    """A duration such as `90s`, `15m`, `2h` or `7d`, in seconds; without a unit it is in seconds."""

    def __init__(self, least: float = 0.0) -> None:
        super().__init__('duration', partial(inputs.duration, least=least))


# -- tables


def format_table(columns: Sequence[Column], rows: Iterable[Row], max_width: int | None = None) -> str:
    """Return a table with a line of titles, by default as wide as the terminal.

    Columns become narrower, the widest first, until the table has at most `max_width` characters in a line, or no
    column may become narrower. Then texts, ids and titles are cut, and names have several lines.
    """
    max_width = max_width or terminal_width()
    lines = [[Cell(column.title, 'strong') for column in columns]]
    lines += [[column.cell(row) for column in columns] for row in rows]
    widths = [max(len(line[i].text) for line in lines) for i in range(len(columns))]
    cells = [max([_TITLE_CHARACTERS, *(len(line[i].text) for line in lines[1:])]) for i in range(len(columns))]
    least = [
        column.min_width or (min(cells[i], widths[i]) if column.right else widths[i])
        for i, column in enumerate(columns)
    ]
    max_width -= len(_GAP) * (len(widths) - 1)
    for i, column in enumerate(columns):
        # Ids become narrow first: their first characters are enough for a command.
        if column.title == 'ID' and sum(widths) > max_width:
            widths[i] = min(widths[i], least[i])
    for is_title in (True, False):  # of numbers, only the title becomes narrower: before names
        while sum(widths) > max_width and (
            wide := [i for i, column in enumerate(columns) if widths[i] > least[i] and (column.right or not is_title)]
        ):
            widths[max(wide, key=widths.__getitem__)] -= 1
    fit = [[[shorten(cell.text, width)] for cell, width in zip(lines[0], widths, strict=True)]]
    fit += [list(map(_fitted, columns, line, widths)) for line in lines[1:]]
    return '\n'.join(
        _line(columns, widths, line, texts)
        for line, parts in zip(lines, fit, strict=True)
        for texts in zip_longest(*parts, fillvalue='')
    )


def _fitted(column: Column, cell: Cell, width: int) -> list[str]:
    """Return the lines of a cell: a name, or several with commas between them, is broken into lines, or else cut."""
    is_long = len(cell.text) > _MAX_LINES * width
    if len(cell.text) <= width or is_long or column.title == 'ID' or not _NAMES.fullmatch(cell.text):
        return [shorten(cell.text, width)]
    part = f'.{{1,{width}}}'
    return [found.rstrip() for found in re.findall(f'{part}$|{part}(?<= )|{part}(?<={_BREAK})|{part}', cell.text)]


def _line(columns: Sequence[Column], widths: Sequence[int], row: Sequence[Cell], texts: Sequence[str]) -> str:
    parts = []
    for column, length, cell, text in zip(columns, widths, row, texts, strict=True):
        blank = ' ' * (length - len(text))
        # Do not style the blanks: underlines and background colours would show them.
        styled = click.style(text, **_STYLES[cell.tone]) if cell.tone and text else text
        parts.append(blank + styled if column.right else styled + blank)
    return _GAP.join(parts).rstrip(' ')


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
