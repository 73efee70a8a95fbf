"""Selectable and ItemAction: filters, fields and actions, of which commands and forms of pages are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kombu_couchdb.admin.status import consumers
from kombu_couchdb.couchdb.client import Client

from .change import Change, Part
from .columns import Tone
from .fields import Field, Values
from .inputs import Moment, whole
from .resource import counted

#: Up to this number, items that match filters are read to count them before a page asks whether to change them.
MAX_COUNTED = 1000

#: How many of the items that match filters an action changes.
LIMIT = Field('limit', 'At most', hint='Only the first so many.', read=whole, metavar='N')

#: The maximum length of the name of an item with its arguments, in characters.
MAX_NAME = 80

T = TypeVar('T')
S = TypeVar('S')


@dataclass(frozen=True)
class ItemAction(Generic[S, T]):
    """Something that operators do to selected items: a command, and a button of the page."""

    #: The name of the command, and the text of the button.
    name: str
    title: str
    #: Does it to some items of a source, part by part. The values of the fields are keyword arguments.
    act: Callable[..., Iterable[Part]]
    #: The question before it, with the items in the place of the braces, such as `Move {}?`.
    question: str
    #: What it means, in one sentence or two.
    consequence: str = ''
    fields: Sequence[Field] = ()
    #: What is said if no field has a value; '' if none needs one.
    needs: str = ''
    #: Returns the texts of the fields of one item as it is now, and of `SEEN`; but for that, what stays so is not given
    #: to `act`. *Raises* `CouchDBError`.
    filled: Callable[[S, T], Mapping[str, str]] | None = None
    #: What it changes of the items, and how many of them; '' if it changes the items.
    unit: str = ''
    amount: Callable[[S, Sequence[T]], int] | None = None
    #: `bad` if it destroys something.
    tone: Tone = ''
    #: Whether the act takes `by` and `reason`: who does it, and why.
    is_signed: bool = False
    #: Whether the page asks before.
    asks: bool = True


@dataclass(frozen=True)
class Selectable(Generic[S, T]):
    """Things in a source of the type `S` that operators select, by id or by filters, and change."""

    noun: str
    actions: Sequence[ItemAction[S, T]]
    #: Returns the items with these ids; unless the last argument is true, also those that an id is the beginning of.
    #: *Raises* `ConfigurationError`.
    find: Callable[[S, Sequence[str], bool], Sequence[T]]
    #: Returns an item as people know it, such as `shop.divide(54, 0)`; without arguments unless the last one is true.
    name_of: Callable[[S, T, bool], str]
    #: Returns the client of the broker's database, which has the record of what operators do.
    client: Callable[[S], Client]
    filters: Sequence[Field] = ()
    #: Yields the items that match the values of the filters.
    matching: Callable[[S, Values], Iterator[T]] = lambda source, values: iter(())
    #: Returns their number; unless the last argument is true, None if there are so many that counting takes long.
    count: Callable[[S, Values, bool], int | None] = lambda source, values, fully: None

    def change(
        self, action: ItemAction[S, T], source: S, items: Iterable[T], total: int | None, values: Values
    ) -> Change:
        """Return the change of some items by an action."""
        client = self.client(source)
        return Change.of(
            action.unit or self.noun,
            total,
            items,
            lambda part: action.act(source, part, **values),
            lambda: {name for one in consumers(client) if one['alive'] for name in one['queues']},
        )

    def in_words(self, values: Values, *, arguments: bool) -> str:
        """Return the values of filters as words behind a number: ` (task: pay, error: ValueError)`; '' without any.

        Without `arguments`, those of tasks are left out: for a record that pages without arguments show, too.
        """
        words = (
            f'{field.label.lower()}: {_text(values[field.name])}'
            for field in self.filters
            if values.get(field.name) and (arguments or not field.is_argument)
        )
        shown = ', '.join(words)
        return f' ({shown})' if shown else ''

    def no_match(self, values: Values) -> str:
        """Return the sentence that nothing matches the values of filters, or that there is nothing."""
        words = self.in_words(values, arguments=True)
        return f'No {self.noun} matches these filters{words}.' if values else f'There are no {self.noun}s.'

    def named(self, action: ItemAction[S, T], source: S, items: Sequence[T], *, arguments: bool) -> tuple[str, int]:
        """Return what some items are called in a question, and how many things the action changes."""
        name = self.name_of(source, items[0], arguments) if len(items) == 1 else ''
        what = f'the {self.noun} {name}' if name else f'these {counted(len(items), self.noun)}'
        if action.amount is None:
            return what, len(items)
        total = action.amount(source, items)
        return f'{what} with {counted(total, action.unit)}', total


def _text(value: Any) -> str:
    text = ', '.join(value) if isinstance(value, list) else value.text if isinstance(value, Moment) else str(value)
    return text[:MAX_NAME]
