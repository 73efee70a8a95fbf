"""Tables of pages: the columns of a resource, with links, ids of rows that stay, and boxes to select rows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..resources.columns import NO_VALUE, Cell, Column, Row, Tone

#: The maximum length of a text in a cell. The rest is cut, and the tip of the cell has more of it.
_MAX_CHARACTERS, _MAX_TIP_CHARACTERS = 160, 1000

#: The maximum length of a word for a state, of a text that needs no line of its own, and of one for a quarter of it.
_PILL_CHARACTERS, _WIDE_CHARACTERS, _NARROW_CHARACTERS = 24, 28, 10

#: The maximum length of an id in a table, and of a word that is not broken into two lines.
_ID_CHARACTERS, _WORD_CHARACTERS = 16, 26

_UUID = re.compile('[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}')


@dataclass(frozen=True)
class TableCell:
    """One cell: a text, the whole text if it was cut, where it leads to, and numbers for a small chart instead."""

    text: str
    tone: Tone = ''
    tip: str = ''
    link: str | None = None
    chart: Sequence[float] | None = None
    #: Dates, in seconds since the epoch, that are shown in the time zone of the browser.
    dates: Sequence[float] = ()
    #: Whether it is one word for a state.
    pill: bool = False

    @property
    def is_wide(self) -> bool:
        """Whether it needs a line of its own on a small screen."""
        return bool(self.dates) or len(self.text) > _WIDE_CHARACTERS

    @property
    def is_half(self) -> bool:
        """Whether it needs half a line on a small screen."""
        return not self.is_wide and len(self.text) > _NARROW_CHARACTERS

    @property
    def is_word(self) -> bool:
        """Whether it is one short word, such as a name."""
        return len(self.text) <= _WORD_CHARACTERS and ' ' not in self.text

    @classmethod
    def of(cls, cell: Cell) -> TableCell:
        """Return a cell of a resource, cut if it is long."""
        if len(cell.text) <= _MAX_CHARACTERS:
            return cls(cell.text, cell.tone)
        return cls(f'{cell.text[:_MAX_CHARACTERS]}…', cell.tone, cell.text[:_MAX_TIP_CHARACTERS])


@dataclass(frozen=True)
class TableRow:
    """One row. `key` is what is selected with it; '' if it cannot be selected."""

    key: str
    cells: Sequence[TableCell]
    #: What the row as a whole means to its reader, and a few words why.
    tone: Tone = ''
    note: str = ''
    #: A sentence below its first cell.
    remark: str = ''

    @property
    def id(self) -> str:
        """The id of the row in the page, the same each time, whatever characters the key has."""
        return f'row-{hashlib.sha256(self.key.encode("utf-8", "surrogatepass")).hexdigest()[:16]}'


@dataclass(frozen=True)
class Table:
    """A table for the macro `table` of the templates."""

    #: What the rows are, such as `Queues`.
    caption: str
    columns: Sequence[Column]
    rows: Sequence[TableRow]
    #: Shown in place of a table without rows.
    empty: str = ''
    #: Whether rows can be selected.
    selectable: bool = False
    #: More than these rows exist, and where all are.
    more: str = ''
    more_link: str = ''
    #: By title of a column, where the table is sorted by it.
    sorts: Mapping[str, str] = field(default_factory=dict)
    #: Whether rows that are not there any more stay in the page of a browser that shows them, marked as gone.
    keeps: bool = False

    @classmethod
    def of(
        cls,
        caption: str,
        columns: Sequence[Column],
        rows: Iterable[Row],
        key: Callable[[Row], Any],
        *,
        links: Mapping[str, Callable[[Row], str | None]] | None = None,
        charts: Mapping[str, Callable[[Row], Sequence[float] | None]] | None = None,
        dates: Mapping[str, Callable[[Row], Sequence[float]]] | None = None,
        note: Callable[[Row], tuple[Tone, str]] = lambda row: ('', ''),
        remark: Callable[[Row], str] = lambda row: '',
        **more: Any,
    ) -> Table:
        """Return the table of some rows.

        `key` returns what is selected with a row, `note` what the row means and a few words why, and `remark` a
        sentence about it. `links`, `charts` and `dates` have, by title of a column, a function that returns where its
        cell leads to, the numbers of its chart, or its dates.
        """
        links, charts, dates = links or {}, charts or {}, dates or {}

        def cell(column: Column, row: Row) -> TableCell:
            found = TableCell.of(column.cell(row))
            link = links[column.title](row) if column.title in links else None
            chart = charts[column.title](row) if column.title in charts else None
            if column.title == 'ID' and len(found.text) > _ID_CHARACTERS:
                found = replace(found, text=_short(found.text), tip=found.tip or found.text)
            is_pill = column.title in ('STATE', 'KIND') and len(found.text) <= _PILL_CHARACTERS
            days = dates[column.title](row) if column.title in dates else ()
            return replace(found, link=link, chart=chart, dates=days, pill=is_pill)

        found = [
            TableRow(str(key(row)), [cell(column, row) for column in columns], *note(row), remark(row)) for row in rows
        ]
        return cls(caption, columns, found, **more)


def _short(text: str) -> str:
    """Return the beginning of an id: of a UUID, its first eight characters."""
    return text[:8] if _UUID.fullmatch(text) else f'{text[:_ID_CHARACTERS]}…'


def points(numbers: Sequence[float], width: int = 96, height: int = 20) -> str:
    """Return the points of a line through these numbers, for the attribute of an SVG polyline."""
    most = max(numbers, default=0.0) or 1.0
    step, scale = width / max(1, len(numbers) - 1), (height - 2) / most
    return ' '.join(f'{i * step:.1f},{height - 1 - number * scale:.1f}' for i, number in enumerate(numbers))


def title(column: Column) -> str:
    """Return the title of a column, such as `Oldest`."""
    return column.title.capitalize() if column.title.isupper() else column.title


def no_value(text: str) -> bool:
    """Tell whether a text stands for a missing value."""
    return text in ('', NO_VALUE)
