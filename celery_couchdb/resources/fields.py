"""Fields: what commands take as options, and pages as fields of forms and filters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from .inputs import choice, json_value, moment

#: What was typed into fields, by name. A value is what `Field.read` returns; a field that was left empty is missing.
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """A value that people type or choose."""

    name: str
    label: str
    value: str = ''
    #: One sentence for people: the help of the option, and what the form says below the field.
    hint: str = ''
    #: `area` has several lines, `check` is yes or no, of `chips` any number can be chosen, and only forms have
    #: `hidden`.
    kind: Literal['text', 'area', 'select', 'check', 'chips', 'hidden'] = 'text'
    #: The values of `select` and `chips`, and suggestions for a text.
    options: Sequence[str] = ()
    #: Returns the value of a text; *raises* `ValueError` with a sentence.
    read: Callable[[str], Any] = str
    #: How the option is called beside `--name`, and what its help shows in place of a value.
    short: str = ''
    metavar: str = 'TEXT'
    #: Whether it shows arguments of tasks.
    is_argument: bool = False
    #: In a form: for which choices in the field `kind` it is there; () for all.
    kinds: Sequence[str] = ()

    def filled(self, texts: Mapping[str, Sequence[str]]) -> Field:
        """Return the field with what the user has typed."""
        return replace(self, value=next(iter(texts.get(self.name, ())), ''))

    def value_in(self, texts: Mapping[str, Sequence[str]]) -> Any:
        """Return what was typed into the field; None if it was left empty. *Raises* `ValueError` with a sentence."""
        given = [text.strip() for text in texts.get(self.name, ()) if text.strip()]
        if self.kind == 'chips':
            return [self.typed(text) for text in given] or None
        return (True if self.kind == 'check' else self.typed(given[0])) if given else None

    def typed(self, text: str) -> Any:
        """Return the value of a text; *raises* `ValueError` with a sentence that names the field."""
        try:
            return choice(text, self.options) if self.kind == 'chips' else self.read(text)
        except ValueError as exc:
            raise ValueError(f'{self.label}: {exc}') from None


def values_in(fields: Iterable[Field], texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what was typed into fields, by name; *raises* `ValueError` with a sentence."""
    found = {field.name: field.value_in(texts) for field in fields}
    return {name: value for name, value in found.items() if value is not None}


#: In a form: the revision of what it shows. Nobody overwrites what somebody else has changed since.
SEEN = Field('seen', 'Revision', kind='hidden')

QUEUE = Field('queue', 'Queue', hint='Only those of this queue.', short='-Q', metavar='NAME')
TASK = Field('task', 'Task', hint='Only those of the task with this name.', metavar='NAME')
ARGS = Field(
    'args',
    'Arguments contain',
    hint='Only those whose arguments, as Python shows them, contain this text.',
    is_argument=True,
)


def since(what: str) -> Field:
    """Return the field for the earliest date of `what` happened; its value is a `Moment`."""
    hint = f'Only what {what} since then: a duration before now (90s, 30m, 2h, 1d) or a date (2026-11-22T14:30; UTC).'
    return Field('since', 'Since', hint=hint, read=moment, metavar='TIME')


def before(what: str) -> Field:
    """Return the field for the latest date of `what` happened; its value is a `Moment`."""
    return Field('before', 'Before', hint=f'Only what {what} before then, given likewise.', read=moment, metavar='TIME')


def dates_in(values: Values, now: float) -> tuple[float | None, float | None]:
    """Return the values of the fields `since` and `before` as dates; `now` is the server's time."""
    since, before = (values[name].date(now) if name in values else None for name in ('since', 'before'))
    return since, before


def new_arguments(condition: str = '') -> tuple[Field, Field]:
    """Return the fields for other arguments; `condition` is a sentence."""

    def field(name: str, label: str, hint: str, kind: type[Any]) -> Field:
        hint, read = f'{hint} {condition}'.strip(), partial(json_value, kind=kind)
        return Field(name, label, hint=hint, kind='area', read=read, metavar='JSON', is_argument=True)

    return (
        field('new_args', 'Arguments', 'The new positional arguments: a list in JSON.', list),
        field('new_kwargs', 'Named arguments', 'The new named arguments: an object in JSON.', dict),
    )
