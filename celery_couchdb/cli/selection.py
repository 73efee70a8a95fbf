"""Commands that change the documents which their user selects: their options, and the output of replay and drop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from .tables import echo

__all__ = ['print_dropped', 'print_replayed', 'selection_options']

Command = Callable[..., Any]


def selection_options(every: str, *others: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds ids, `--all`, whose help is `every`, and `--yes` to a command, and other options."""

    def decorate(function: Command) -> Command:
        decorators: list[Callable[[Command], Command]] = [
            click.option('--yes', '-y', is_flag=True, help='Do not ask for confirmation.'),
            click.option('--all', 'every', is_flag=True, help=every),
            *others,
            click.argument('names', metavar='[ID…]', nargs=-1),
        ]
        for decorator in decorators:
            function = decorator(function)
        return function

    return decorate


def print_replayed(ctx: click.Context, count: int, refused: Mapping[str, str]) -> None:
    """Print how many documents were replayed, and why others, by id, were not; then exit with status 1."""
    for name, reason in refused.items():
        echo(f'{name}: {reason}', err=True)
    echo(f'{count:,} replayed.')
    if refused:
        ctx.exit(1)


def print_dropped(count: int, selected: int) -> None:
    """Print how many of the `selected` documents were dropped; *raises* `ClickException` if not all were."""
    echo(f'{count:,} dropped.')
    if count < selected:
        raise click.ClickException(f'{selected - count:,} were changed by somebody else just now')
