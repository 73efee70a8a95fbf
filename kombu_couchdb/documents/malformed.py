"""Malformed items: WorkItems that somebody has changed by hand, so that they cannot be delivered.

`flaw` tells what is wrong with a document; `checked` returns a document without a flaw as a `WorkItem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from . import concurrency, rates, reasons, task_message, workitem
from .types import Document, WorkItem
from .validation import is_deeper

__all__ = ['checked', 'flaw']

#: The maximum number of levels in which an item may be nested: those of the published message (at most 100, see
#: `validation`), and those around a message that waits in `next`.
_MAX_LEVELS = 110

#: An item with more attempts is malformed.
_MAX_ATTEMPTS = 10**9


def flaw(doc: Mapping[str, Any]) -> str | None:
    """Return the reason why a changed or incomplete item cannot be delivered; None if it can."""
    message = doc.get('message')
    if not isinstance(message, dict):
        return reasons.malformed('message is missing or not an object')
    for name, kinds in (('properties', dict), ('headers', dict), ('body', (str, type(None)))):
        if not isinstance(message.get(name), kinds):
            return reasons.malformed(f'message.{name} is missing or of a wrong type')
    if not isinstance(message['properties'].get('delivery_info', {}), dict):
        return reasons.malformed('message.properties.delivery_info is not an object')
    headers = message['headers']
    if reason := task_message.flaw(message) or concurrency.flaw(headers) or rates.flaw(headers):
        return reasons.malformed(reason)
    if doc.get('claimed') is not None and workitem.claimant(doc) is None:
        return reasons.malformed('claimed is neither null nor names a consumer')
    attempts, date = doc.get('attempts'), doc.get('date')
    if isinstance(attempts, bool) or not isinstance(attempts, int) or not 0 <= attempts <= _MAX_ATTEMPTS:
        return reasons.malformed('attempts is not a whole number, or too large')
    if isinstance(date, bool) or not isinstance(date, (int, float, type(None))):
        return reasons.malformed('date is neither null nor a number of seconds')
    if is_deeper(doc, _MAX_LEVELS):
        return reasons.malformed(f'it is nested in more than {_MAX_LEVELS} levels')
    return None


def checked(doc: Document) -> WorkItem:
    """Return a document as a WorkItem; call this only if the document has no `flaw`."""
    return cast(WorkItem, doc)
