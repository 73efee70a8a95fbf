"""The options of commands that change the documents which their user selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ['selection_options']

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
