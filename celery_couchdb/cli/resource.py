"""Resources: what commands list, show, select and change, such as jobs, dead letters, parcels or results.

A resource describes each of its items as a dictionary. That is what `--json` prints, and what the columns of a table
and the lines of details show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import click

from .tables import Age, Column, Row, confirm, echo, echo_styled, format_table, json_line, printable

#: The items that are read and printed, or changed, together. A progress bar is shown for more.
_BATCH = 200

#: The maximum length of one value in the details of an item; longer values are cut.
_MAX_VALUE_CHARACTERS = 2000

T = TypeVar('T')
Command = Callable[..., Any]

json_option = click.option('--json', 'as_json', is_flag=True, help='Print JSON, one object per line.')
limit_option = click.option(
    '--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The maximum to list.'
)
yes_option = click.option('--yes', '-y', is_flag=True, help='Do not ask for confirmation.')


def since_option(what: str) -> Callable[[Command], Command]:
    """Return the decorator of the option `--since`. The command gets the argument `age`, in seconds before now."""
    text = f'{what} since then: a duration before now (90s, 30m, 2h, 1d) or a date (2026-11-22T14:30; UTC).'
    return click.option('--since', 'age', metavar='TIME', type=Age(), help=text)


def selection_options(every: str, *others: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds ids, `--all`, whose help is `every`, and `--yes` to a command, and other options."""

    def decorate(function: Command) -> Command:
        all_option = click.option('--all', 'every', is_flag=True, help=every)
        decorators: list[Callable[[Command], Command]] = [yes_option, all_option, *others]
        for decorator in decorators:
            function = decorator(function)
        return click.argument('names', metavar='[ID…]', nargs=-1)(function)

    return decorate


def counted(count: int, noun: str, plural: str = '') -> str:
    """Return a number and a noun: `1 job`, `2,000 jobs`."""
    return f'{count:,} {noun if count == 1 else plural or noun + "s"}'


@dataclass(frozen=True)
class Resource(Generic[T]):
    """Things of one kind, of which commands list, show and change some."""

    #: Describes some items.
    describe: Callable[[Sequence[T]], Iterable[Row]]
    #: The columns of a table of them.
    columns: Sequence[Column] = ()
    #: Describes some items for the table, if that needs less than `describe`.
    summarize: Callable[[Sequence[T]], Iterable[Row]] | None = None
    #: Returns the values in the details of an item, from its description.
    details: Callable[[Row], Row] = dict

    def print_list(self, found: Iterable[T], as_json: bool, *, empty: str, limit: int = sys.maxsize) -> None:
        """Print up to `limit` of the items `found`: a table, or one JSON object per line, as they are read.

        `empty` is printed in place of a table without items. Below a table, stderr says if there are more.
        """
        items, rows = iter(found), list[Row]()
        left = limit
        while part := list(islice(items, min(left, _BATCH))):
            left -= len(part)
            if not as_json:
                rows += (self.summarize or self.describe)(part)
            for row in self.describe(part) if as_json else ():
                echo_styled(json_line(row))
        if as_json:
            return
        if not rows:
            echo(empty)
            return
        echo_styled(format_table(self.columns, rows))
        if next(items, None) is not None:
            echo(f'These are the first {limit}; there are more (--limit).', err=True)

    def show(self, items: Sequence[T], as_json: bool) -> None:
        """Print the details of items: one value per line, or one JSON object per item."""
        rows = self.describe(items)
        separator, texts = ('\n', map(json_line, rows)) if as_json else ('\n\n', map(self._details, rows))
        echo_styled(separator.join(texts))

    def _details(self, row: Row) -> str:
        lines = []
        for name, value in self.details(row).items():
            text = printable(value if isinstance(value, str) else json_line(value))
            if len(text) > _MAX_VALUE_CHARACTERS:
                text = f'{text[:_MAX_VALUE_CHARACTERS]}… (see --json)'
            lines.append(f'{printable(name):<10} {text}')
        return '\n'.join(lines)


@dataclass(frozen=True)
class Selection(Generic[T]):
    """The items that a command changes."""

    #: What they are called in the question whether to change them.
    name: str
    #: They may be read while others are changed.
    items: Iterable[T]
    total: int


def change(
    ctx: click.Context,
    verb: str,
    selection: Selection[T],
    act: Callable[[Sequence[T]], tuple[int, Mapping[str, str]]],
    done: str,
    *,
    yes: bool,
) -> None:
    """Ask whether to `verb` a selection, unless `yes` is true, call `act` with batches of it, and print the result.

    `act` returns how many items it changed, and the reasons why others were refused, by id. `done` is what happened to
    them. The command ends with status 1 unless all were changed.
    """
    if selection.total and not yes:
        confirm(f'{verb} {selection.name}?')
    count, left, refused = 0, 0, 0
    items, has_bar = iter(selection.items), selection.total > _BATCH
    with click.progressbar(length=selection.total, label=verb, file=sys.stderr) if has_bar else nullcontext() as bar:
        while part := list(islice(items, _BATCH)):
            changed, reasons = act(part)
            count, left, refused = count + changed, left + len(part) - changed, refused + len(reasons)
            for name, reason in reasons.items():
                echo(f'{name}: {reason}', err=True)
            if bar:
                bar.update(len(part))
    echo(f'{count:,} {done}.')
    if refused:
        ctx.exit(1)
    if left:
        raise click.ClickException(f'{left:,} were changed by somebody else just now')
