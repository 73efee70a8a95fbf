"""The actions of pages that are made of what is selectable: for selected rows, and for all that match the filters.

A target of an action for all that match is the query of a URL with the filters: `queue=mail&state=ready`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import islice
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, urlencode

from kombu_couchdb.errors import CouchDBError

from ..resources.change import Change
from ..resources.fields import SEEN, Field, Values, values_in
from ..resources.inputs import Moment, moment
from ..resources.resource import counted
from ..resources.selectable import LIMIT, MAX_COUNTED, ItemAction, Selectable
from .view import Action, InputRefused, View

#: In a target: when the page was shown, which is the latest date.
_SHOWN = 'shown'

S = TypeVar('S')
T = TypeVar('T')


def target_of(query: Mapping[str, Any], now: float) -> str:
    """Return filters as a target: what matches them now. What happens after `now`, the server's time, is left out."""
    given = {name: value for name, value in query.items() if value}
    return urlencode({**given, _SHOWN: datetime.fromtimestamp(now + 1e-6, timezone.utc).isoformat()}, doseq=True)


def _as_shown(values: Values, shown: Moment) -> Values:
    """Return filters with the dates that they had when the page was shown, and with none after that."""
    dated = {
        name: replace(value, seconds=value.date(shown.seconds), is_ago=False) if isinstance(value, Moment) else value
        for name, value in values.items()
    }
    return {**dated, 'before': min(dated.get('before', shown), shown, key=lambda each: each.seconds)}


def filled(selectable: Selectable[S, T], view: View) -> list[Field]:
    """Return the filters as the URL fills them, without those for chips, and without arguments if they are masked."""
    query = view.request.query_params
    texts = {name: query.getlist(name) for name in query}
    return [
        field.filled(texts)
        for field in selectable.filters
        if field.kind != 'chips' and not (field.is_argument and view.site.mask_args)
    ]


def no_match(selectable: Selectable[S, T], view: View) -> str:
    """Return the sentence that nothing matches the filters in the URL; '' without filters."""
    query = view.request.query_params
    given = [(field.label.lower(), ', '.join(filter(None, query.getlist(field.name)))) for field in selectable.filters]
    texts = [f'{label} {value}' for label, value in given if value]
    return f'No {selectable.noun} matches {"; ".join(texts)}.' if texts else ''


def actions_of(selectable: Selectable[S, T], opened: Callable[[View], S]) -> tuple[Action, ...]:
    """Return the actions for selected rows, and those for all rows that match filters; `opened` returns the source."""
    selected = [_ForSelected(selectable, action, opened).action() for action in selectable.actions]
    matching = [_ForAll(selectable, action, opened).action() for action in selectable.actions if selectable.filters]
    return (*selected, *matching)


@dataclass(frozen=True)
class _ForSelected(Generic[S, T]):
    """An action for selected rows."""

    selectable: Selectable[S, T]
    item_action: ItemAction[S, T]
    opened: Callable[[View], S]

    def action(self) -> Action:
        """Return it for a page."""
        given = self.item_action
        return Action(
            given.name,
            given.title,
            self.change,
            given.question if given.asks else '',
            given.consequence,
            given.tone,
            self.fields,
            describe=self.described,
            names=self.names,
            is_offered=self.is_offered,
        )

    def is_offered(self, view: View) -> bool:
        """Tell whether the user of a view has it."""
        fields = self.item_action.fields
        return not fields or not view.site.mask_args or not all(field.is_argument for field in fields)

    def items(self, source: S, targets: Sequence[str]) -> Sequence[T]:
        """Return the items of the selected rows."""
        return self.selectable.find(source, targets, True)

    def change(self, view: View, targets: Sequence[str]) -> Change:
        """Return the change of the selected items."""
        source = self.opened(view)
        items, values = self.items(source, targets), self.values(view, targets)
        amount = self.item_action.amount
        total = amount(source, items) if amount else len(items)
        return self.selectable.change(self.item_action, source, items, total, values)

    def values(self, view: View, targets: Sequence[str]) -> Values:
        """Return what the user has typed into the fields, and changed; *raises* `InputRefused`."""
        try:
            values = values_in(self.fields(view, targets), view.texts)
        except ValueError as exc:
            raise InputRefused(str(exc)) from None
        shown = self.shown(view, targets)
        seen = {SEEN.name: values.pop(SEEN.name)} if SEEN.name in values else {}
        values = {name: value for name, value in values.items() if view.form[name].strip() != shown.get(name)}
        if self.item_action.needs and values.keys() <= {LIMIT.name}:
            raise InputRefused(self.item_action.needs)
        signature = {'by': view.session.name, 'reason': view.reason} if self.item_action.is_signed else {}
        return {**values, **seen, **signature}

    def shown(self, view: View, targets: Sequence[str]) -> Mapping[str, str]:
        """Return the texts of the fields of the only item as it is now; *raises* `InputRefused`."""
        if self.item_action.filled is None or len(targets) != 1:
            return {}
        source = self.opened(view)
        try:
            return self.item_action.filled(source, self.items(source, targets)[0])
        except CouchDBError as exc:
            raise InputRefused(str(exc)) from None

    def fields(self, view: View, targets: Sequence[str]) -> Sequence[Field]:
        """Return the fields of the form."""
        shown, known = self.shown(view, targets), view.known
        return [
            replace(field, value=shown.get(field.name, field.value), options=known.get(field.metavar.lower(), ()))
            for field in (*self.item_action.fields, *([SEEN] if SEEN.name in shown else []))
            if not (field.is_argument and view.site.mask_args)
        ]

    def described(self, view: View, targets: Sequence[str]) -> str:
        """Return the selected items in words."""
        source = self.opened(view)
        items = self.items(source, targets)
        return self.selectable.named(self.item_action, source, items, arguments=not view.site.mask_args)[0]

    def names(self, view: View, targets: Sequence[str]) -> Sequence[str]:
        """Return the names of selected items."""
        source = self.opened(view)
        items = self.items(source, targets)
        return [self.selectable.name_of(source, item, not view.site.mask_args) for item in items]


class _ForAll(_ForSelected[S, T]):
    """An action for all rows that match filters."""

    def action(self) -> Action:
        given = super().action()
        return replace(given, name=f'{given.name}-all', question=self.item_action.question, rows='match')

    def change(self, view: View, targets: Sequence[str]) -> Change:
        source, filters, values = self.opened(view), self.filters(view, targets), dict(self.values(view, targets))
        limit, total = values.pop(LIMIT.name, None), self.total(source, filters)
        found = (item for wanted in filters for item in self.selectable.matching(source, wanted))
        if limit is not None:
            total = limit if total is None else min(limit, total)
        return self.selectable.change(self.item_action, source, islice(found, limit), total, values)

    def fields(self, view: View, targets: Sequence[str]) -> Sequence[Field]:
        return [*super().fields(view, targets), LIMIT]

    def shown(self, view: View, targets: Sequence[str]) -> Mapping[str, str]:
        return {}

    def filters(self, view: View, targets: Sequence[str]) -> list[Values]:
        """Return the filters that the targets are; *raises* `InputRefused`.

        No page has a target without a date, or with masked arguments, whose number would tell what they are.
        """
        fields = [field for field in self.selectable.filters if not (field.is_argument and view.site.mask_args)]
        names = {_SHOWN, *(field.name for field in fields)}
        try:
            found = [parse_qs(target, strict_parsing=True) for target in targets]
            if all(_SHOWN in texts and texts.keys() <= names for texts in found):
                return [_as_shown(values_in(fields, texts), moment(texts[_SHOWN][0])) for texts in found]
        except ValueError:
            pass
        raise InputRefused('This form is not from this page: load it again')

    def total(self, source: S, filters: Sequence[Values]) -> int | None:
        """Return how many items match; None if they are too many to count."""
        numbers = [self.selectable.count(source, wanted, False) for wanted in filters]
        return sum(number for number in numbers if number is not None) if None not in numbers else None

    def described(self, view: View, targets: Sequence[str]) -> str:
        filters, noun = self.filters(view, targets), self.selectable.noun
        total = self.total(self.opened(view), filters)
        number = f'{noun}s, more than {MAX_COUNTED:,},' if total is None else counted(total, noun)
        if len(filters) > 1:
            return f'{counted(len(filters), "group")} with {number.rstrip(",")}'
        typed = parse_qs(targets[0])
        shown = {name: value for name, value in filters[0].items() if name in typed}
        return f'all {number}{self.selectable.in_words(shown, arguments=True)}'

    def names(self, view: View, targets: Sequence[str]) -> Sequence[str]:
        return ()
