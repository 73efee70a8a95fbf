"""Resources: what operators list, show, select and change, such as jobs, failures, parcels or schedules.

A resource describes each of its items as a dictionary. That is the JSON of the commands and of the page, and what the
columns of a table and the lines of details show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .columns import Column, Row

T = TypeVar('T')


def counted(count: int, noun: str, plural: str = '') -> str:
    """Return a number and a noun: `1 job`, `2,000 jobs`."""
    return f'{count:,} {noun if count == 1 else plural or noun + "s"}'


@dataclass(frozen=True)
class Resource(Generic[T]):
    """Things of one kind, of which operators list, show and change some."""

    #: Describes some items.
    describe: Callable[[Sequence[T]], Iterable[Row]]
    #: The columns of a table of them.
    columns: Sequence[Column] = ()
    #: Describes some items for the table, if that needs less than `describe`.
    summarize: Callable[[Sequence[T]], Iterable[Row]] | None = None
    #: Returns the values in the details of an item, from its description.
    details: Callable[[Row], Row] = dict

    def summary(self, items: Sequence[T]) -> list[Row]:
        """Describe some items for the table."""
        return list((self.summarize or self.describe)(items))


@dataclass(frozen=True)
class Selection(Generic[T]):
    """The items that somebody wants to change."""

    #: What they are called in the question whether to change them.
    name: str
    #: They may be read while others are changed.
    items: Iterable[T]
    total: int
