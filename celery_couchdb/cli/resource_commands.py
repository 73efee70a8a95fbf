"""The common parts of commands for resources: options, lists, details, and changes of a selection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeVar

import click

from kombu_couchdb.log import printable

from ..resources.columns import Lines, Row, json_line
from ..resources.resource import Resource, Selection
from .tables import Age, confirm, echo, echo_styled, format_table

#: The items that are read and printed, or changed, together. A progress bar is shown for more.
_BATCH = 200

#: The maximum length of one value in the details of an item; longer values are cut.
_MAX_VALUE_CHARACTERS = 2000

#: The maximum number of lines of one value; of a longer one, the last lines are printed.
_MAX_LINES = 200

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


def print_list(
    resource: Resource[T], found: Iterable[T], as_json: bool, *, empty: str, limit: int = sys.maxsize
) -> None:
    """Print up to `limit` of the items `found`: a table, or one JSON object per line, as they are read.

    `empty` is printed in place of a table without items. Below a table, stderr says if there are more.
    """
    items, rows = iter(found), list[Row]()
    left = limit
    while part := list(islice(items, min(left, _BATCH))):
        left -= len(part)
        if not as_json:
            rows += resource.summary(part)
        for row in resource.describe(part) if as_json else ():
            echo_styled(json_line(row))
    if as_json:
        return
    if not rows:
        echo(empty)
        return
    echo_styled(format_table(resource.columns, rows))
    if next(items, None) is not None:
        echo(f'These are the first {limit}; there are more (--limit).', err=True)


def print_details(resource: Resource[T], items: Sequence[T], as_json: bool) -> None:
    """Print the details of items: one value per line, or one JSON object per item."""
    rows = resource.describe(items)
    if as_json:
        echo_styled('\n'.join(map(json_line, rows)))
    else:
        echo_styled('\n\n'.join(_lines(resource.details(row)) for row in rows))


def _lines(details: Row) -> str:
    lines = []
    for name, value in details.items():
        if isinstance(value, Lines):
            lines += [printable(name), *(f'  {_shortened(printable(line))}' for line in value[-_MAX_LINES:])]
        else:
            text = value if isinstance(value, str) else json_line(value)
            lines.append(f'{printable(name):<10} {_shortened(printable(text))}')
    return '\n'.join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f'{text[:_MAX_VALUE_CHARACTERS]}… (see --json)'


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
