"""Validation of names and values before they are sent, and of WorkItems that were read.

CouchDB would change or refuse invalid names and values:

* A name is text of at most 500 bytes: three names make the id of a document, which is part of a URL.
* A number is one that CouchDB returns unchanged: not NaN, not infinite, and of a size from 1e-307 to 1e308.
* Values are nested in at most 100 levels, so that every reader can read them. This concerns headers; the body is text.

Everybody with write access to the database may have changed a WorkItem by hand, so that it cannot be delivered:
`malformed_reason` says what is wrong with it; `checked` returns a document with which nothing is wrong as a `WorkItem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..errors import ConfigurationError, Unstorable
from ..schema import Schema
from ..values import nesting
from . import concurrency, dead_letter, rates, task_message
from .types import Document, WorkItem

_MAX_NAME_BYTES = 500
#: The maximum number of levels in which a value may be nested.
MAX_LEVELS = 100
_MAX_NUMBER, _MIN_NUMBER = 10**308, 1e-307

#: The maximum number of levels in which an item may be nested: those of the published message (see `MAX_LEVELS`), and
#: those around a message that waits in `next`.
_MAX_ITEM_LEVELS = MAX_LEVELS + 10

#: What an item must have to be delivered. The other members only order it: if they are malformed, it is delivered late.
_ITEM = Schema.of(WorkItem, 'message', 'claimed', 'attempts', 'date')

#: The headers that say what a message is limited by.
_LIMITS = frozenset({concurrency.CONCURRENCY_KEY, concurrency.CONCURRENCY_LIMIT, rates.RATE_KEY})


def check_names(**names: Any) -> None:
    """Raise `ConfigurationError` for an invalid `queue`, `exchange` or `routing_key`; None is accepted."""
    for what, name in names.items():
        try:
            fit = name is None or (isinstance(name, str) and len(name.encode('utf-8')) <= _MAX_NAME_BYTES)
        except UnicodeEncodeError:
            fit = False  # half of a surrogate pair
        if not fit:
            raise ConfigurationError(
                f'{what.replace("_", " ")} must be text of at most {_MAX_NAME_BYTES} bytes in UTF-8, not {name!a:.80}'
            )


def check_value(what: str, value: Any, levels: int = MAX_LEVELS) -> Any:
    """Return a copy of `value`; faster than `deepcopy`.

    *Raises* `Unstorable` if CouchDB would not return the value unchanged; `what` names it in the error.
    """
    if not isinstance(value, (dict, list, tuple)):
        if isinstance(value, (int, float)) and not (value == 0 or _MIN_NUMBER <= abs(value) <= _MAX_NUMBER):
            raise Unstorable(f'{what} cannot be stored: CouchDB cannot hold the number {value!r:.40}')
        return value
    if not levels:
        raise Unstorable(f'{what} cannot be stored: it is nested in more than {MAX_LEVELS} levels')
    if not isinstance(value, dict):
        return [check_value(what, member, levels - 1) for member in value]
    copied = {}
    for name, member in value.items():
        if not isinstance(name, str):
            raise Unstorable(f'{what} cannot be stored: the names of members must be text')
        is_plain = member is None or isinstance(member, str)
        copied[name] = member if is_plain else check_value(what, member, levels - 1)
    return copied


def malformed_reason(doc: Mapping[str, Any]) -> str | None:
    """Return the reason why a changed or incomplete item cannot be delivered; None if it can."""
    if nesting(doc)[0] > _MAX_ITEM_LEVELS:
        return dead_letter.malformed(f'it is nested in more than {_MAX_ITEM_LEVELS} levels')
    reason = _ITEM.problem('', doc) or task_message.message_problem(doc['message'])
    if not reason and not _LIMITS.isdisjoint(headers := doc['message']['headers']):
        reason = concurrency.limit_problem(headers) or rates.rate_problem(headers)
    return dead_letter.malformed(reason) if reason else None


def checked(doc: Document) -> WorkItem:
    """Return a document as a WorkItem; call this only if it has no `malformed_reason`."""
    return cast(WorkItem, doc)
