"""Headers, due date, lifetime and priority of a message, as kombu's virtual transports represent it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from ..values import date_of

__all__ = ['HIGHEST', 'due_date', 'headers_of', 'lifetime', 'priority']

#: The highest of AMQP's priorities, which go from 0 to 9; 9 is delivered first.
HIGHEST = 9


def headers_of(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the headers of the message in a document that somebody may have changed; {} if they are malformed."""
    message = doc.get('message')
    headers = message.get('headers') if isinstance(message, dict) else None
    return headers if isinstance(headers, dict) else {}


def due_date(message: Mapping[str, Any]) -> float | None:
    """Return when a Celery message with an `eta` header is due, in seconds since the epoch; None for at once.

    A header that is not a date is ignored: Celery refuses the task with a clear error of its own. So is that of a
    message without the header `task`: it belongs to a program that uses kombu without Celery.
    """
    headers = message.get('headers') or {}
    eta = headers.get('eta') if 'task' in headers else None
    if isinstance(eta, str):
        try:
            eta = date_of(eta)
        except ValueError:
            return None
    if not isinstance(eta, datetime):
        return None
    # Celery takes a date without a time zone as UTC (celery.utils.time.maybe_make_aware).
    return (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)).timestamp()


def lifetime(message: Mapping[str, Any]) -> float | None:
    """Return for how many seconds a message may wait to be delivered; None: forever."""
    try:
        return int(message['properties']['expiration']) / 1000  # AMQP has it as a string, in milliseconds
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def priority(message: Mapping[str, Any]) -> int:
    """Return the priority of a message; 0 if it has none."""
    try:
        return max(0, min(HIGHEST, int(message['properties']['priority'])))
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0
