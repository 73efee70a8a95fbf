"""The DoneItem: a completed message that is kept for a while (`keep_done`), with its times.

::

    {"_id": "0000647…", "type": "DoneItem", "status": "done", "queue": "celery", "priority": 0, "date": null,
     "published": 1763709000.123456, "attempts": 1,
     "started": 1763709001.5,          when the consumer claimed it
     "finished": 1763709002.5,         when the consumer acknowledged it
     "expires": 1763795402.5,          when it is deleted
     "consumer": "broker:consumer:…",  the consumer, whose id contains host and process id
     "worker": "celery@shop-1",        the name of the Celery worker, if the consumer belongs to one
     "claimed": null, "message": {…}, "_attachments": {…}}

The acknowledgement replaces the WorkItem by it, under the same id. It has another type than a WorkItem, so that no view
shows it as a message that waits, is claimed or is a dead letter, not even to processes of versions without `keep_done`.
A unique job's id is used again, so what is kept of a unique job is a copy with an id of its own (`dead_letter.apart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError
from ..values import is_number
from . import workitem
from .types import DONE, Document

__all__ = ['KEEP_DONE', 'check_seconds', 'made_of']

#: The property of a message, and the attribute of a task, with the seconds for which its completed message is kept.
KEEP_DONE = 'keep_done'

#: The longest time, in seconds: about 31 years.
_MAX_SECONDS = 1e9


def made_of(doc: Mapping[str, Any], seconds: float, now: float, worker: str | None) -> Document:
    """Return the document that replaces an acknowledged item and is kept for `seconds`."""
    claimed = doc.get('claimed') or {}
    return {
        **doc,
        'type': 'DoneItem',
        'status': DONE,
        'claimed': None,
        'started': claimed.get('date'),
        'finished': now,
        'expires': now + seconds,
        **workitem.last_consumer(doc),
        **({'worker': worker} if worker else {}),
    }


def check_seconds(value: Any) -> float:
    """Return `value` if it is a time for which completed messages can be kept; 0 means that they are deleted.

    *Raises* `ConfigurationError` if it is not a number of seconds from 0 on.
    """
    if not is_number(value) or not 0 <= value <= _MAX_SECONDS:
        raise ConfigurationError(
            f'{KEEP_DONE} must be a number of seconds from 0 on, not {value!r:.80}; the most is {_MAX_SECONDS:.0f}'
        )
    return float(value)
