"""The common parts of commands for resources: options, lists, details, and changes of a selection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import click

from kombu_couchdb.couchdb.bulk import BATCH_DOCS
from kombu_couchdb.errors import CouchDBError
from kombu_couchdb.log import printable

from .. import audit
from ..resources.change import Change, Part
from ..resources.columns import Lines, Row, json_line
from ..resources.fields import Field
from ..resources.resource import Resource, Selection, counted
from ..resources.selectable import LIMIT, ItemAction, Selectable
from .tables import Typed, confirm, echo, echo_styled, format_table

#: The maximum length of one value in the details of an item; longer values are cut.
_MAX_VALUE_CHARACTERS = 2000

#: The maximum number of lines of one value; of a longer one, the last lines are printed.
_MAX_LINES = 200

S = TypeVar('S')
T = TypeVar('T')
Command = Callable[..., Any]

json_option = click.option('--json', 'as_json', is_flag=True, help='Print JSON, one object per line.')
limit_option = click.option(
    '--limit', '-n', default=50, show_default=True, type=click.IntRange(1), help='The maximum to list.'
)
reason_option = click.option('--reason', metavar='TEXT', help='Why; the page Activity shows it.')
yes_option = click.option('--yes', '-y', is_flag=True, help='Do not ask for confirmation.')


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
    while part := list(islice(items, min(left, BATCH_DOCS))):
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

    def part_of(part: Sequence[T]) -> Iterator[Part]:
        count, refused = act(part)
        yield Part(len(part), {done: count}, refused)

    change = Change.of('', selection.total, selection.items, part_of)
    change.done[done] = 0
    run_change(ctx, f'{verb} {selection.name}?' if selection.total and not yes else '', verb, change)


def run_change(
    ctx: click.Context,
    question: str,
    verb: str,
    change: Change,
    begin: Callable[[], Callable[[str], object]] | None = None,
) -> None:
    """Ask a question, unless it is '', do a change with a progress bar, and print what came of it.

    `begin`, if it is given, records that it begins, and returns the function that records how it ended. The command
    ends with status 1 unless all were changed. Ctrl-C ends it after it has said what was done.
    """
    if question:
        confirm(question)
    end, failed = begin and begin(), ''
    has_bar = change.total is not None and change.total > BATCH_DOCS
    try:
        bar: Any
        with click.progressbar(length=change.total, label=verb, file=sys.stderr) if has_bar else nullcontext() as bar:
            for part in change.run():
                for name, reason in part.refused.items():
                    echo(reason if name in reason else f'{name}: {reason}', err=True)
                if bar:
                    bar.update(part.size)
    except KeyboardInterrupt:
        change.stop()
        echo(f'Interrupted: {change.outcome}. The rest is as it was.', err=True)
        ctx.exit(1)
    except CouchDBError as exc:
        failed = f' It ended with an error: {exc}'
        raise
    finally:
        if end:
            with suppress(CouchDBError):
                end(f'{"; ".join(change.summary)}.{failed}')
    if change.done or not change.refusals:
        echo(f'{change.outcome}.')
    if change.warning:
        echo(f'Warning: {change.warning}.', err=True)
    if change.lost:
        raise click.ClickException(f'{change.lost:,} were changed by somebody else just now')
    if change.refusals:
        ctx.exit(1)


# -- commands that are made of fields, filters and actions


def field_options(fields: Iterable[Field]) -> Callable[[Command], Command]:
    """Return a decorator that adds an option for each field; see `given`."""

    def decorate(function: Command) -> Command:
        for field in reversed([*fields]):
            names = filter(None, (f'--{field.name.replace("_", "-")}', field.short, field.name))
            settings: dict[str, Any] = {'help': field.hint or None}
            if field.kind == 'check':
                settings['is_flag'] = True
            elif field.kind == 'chips':
                settings |= {'multiple': True, 'type': click.Choice(list(field.options))}
            else:
                settings |= {'metavar': field.metavar, 'type': Typed(field.name, field.read)}
            function = click.option(*names, **settings)(function)
        return function

    return decorate


def given(fields: Iterable[Field], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that were given for fields."""
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in fields
        if (value := options[field.name]) not in (None, (), False)
    }


def action_command(
    selectable: Selectable[S, T], action: ItemAction[S, T], opened: Callable[[click.Context], S]
) -> click.Command:
    """Return the command of an action; `opened` returns the source of the items."""
    noun, filters = selectable.noun, selectable.filters
    others = ', '.join(f'--{field.name}' for field in filters[:3])
    summary = action.question.format(f'{noun}s').replace('?', '.')
    text = f'{summary} {action.consequence}\n\nID is an id, or its first characters.'

    @click.command(action.name, help=text, short_help=summary)
    @click.argument('names', metavar='[ID…]', nargs=-1)
    @field_options(action.fields)
    @field_options([*filters, LIMIT])
    @click.option('--all', 'every', is_flag=True, help=f'All {noun}s, of which the other options may select some.')
    @reason_option
    @yes_option
    @click.pass_context
    def command(
        ctx: click.Context, /, names: tuple[str, ...], every: bool, reason: str | None, yes: bool, **options: Any
    ) -> None:
        wanted, values, limit = given(filters, options), given(action.fields, options), options[LIMIT.name]
        if bool(names) == bool(wanted or every or limit):
            raise click.UsageError(f'Name {noun}s by id, or select them with {others} …, or give --all.')
        if action.needs and not values:
            options_of = ', '.join(f'--{field.name.replace("_", "-")}' for field in action.fields)
            raise click.UsageError(f'{action.needs}: {options_of}.')
        source = opened(ctx)
        if names:
            items: Iterable[T] = selectable.find(source, names, False)
            what, total = selectable.named(action, source, list(items), arguments=True)
        else:
            total = selectable.count(source, wanted, True) or 0
            total = min(total, limit or total)
            items, what = islice(selectable.matching(source, wanted), limit), counted(total, noun)
        if not total and not names:
            echo(selectable.no_match(wanted))
            return
        asks = not yes and (not names or (action.asks and not action.needs))
        question = action.question.format(what) if asks else ''
        title, chosen = f'{action.title.lower()} {noun}', selectable.in_words(wanted, arguments=False)
        targets = names or [f'all {what}{chosen}']
        begin = partial(audit.begin, selectable.client(source), audit.who_runs_this(), title, targets, reason)
        run_change(ctx, question, action.title, selectable.change(action, source, items, total, values), begin)

    return command
