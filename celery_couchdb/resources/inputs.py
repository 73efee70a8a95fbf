"""Values as people type them, in the options of commands and in the forms of the page.

Each function *raises* `ValueError`, whose text is a sentence that says what is expected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kombu_couchdb.values import MAX_NUMBER, SECONDS_OF_UNIT, date_of


def duration(text: str, least: float = 0.0) -> float:
    """Return a duration such as `90s`, `15m`, `2h` or `7d` in seconds; without a unit it is in seconds."""
    match = re.fullmatch(r'(\d{1,9}(?:\.\d{1,9})?)([smhd]?)', text)
    if match is None:
        raise ValueError(f'give a number and a unit, such as 90s, 15m, 2h or 7d, not {text!r:.80}')
    seconds = float(match[1]) * SECONDS_OF_UNIT[match[2] or 's']
    if not least <= seconds <= MAX_NUMBER:
        raise ValueError(f'it must be from {least:g} to {MAX_NUMBER:,} seconds, not {text}')
    return seconds


def whole(text: str) -> int:
    """Return a whole number from 1."""
    if not re.fullmatch('[1-9][0-9]{0,14}', text):
        raise ValueError(f'give a whole number from 1, not {text!r:.80}')
    return int(text)


@dataclass(frozen=True)
class Moment:
    """A date as somebody has typed it."""

    text: str
    #: In seconds since the epoch, or in seconds before the server's time.
    seconds: float
    is_ago: bool

    def date(self, now: float) -> float:
        """Return the date; `now` is the server's time. Both are in seconds since the epoch."""
        return now - self.seconds if self.is_ago else self.seconds


def moment(text: str) -> Moment:
    """Return a date: a duration with a unit before the server's time, or a date, UTC by default."""
    if re.fullmatch(r'[\d.]+[smhd]', text):
        return Moment(text, duration(text), True)
    try:
        date = date_of(text)
    except ValueError:
        raise ValueError(f'{text!r:.80} is neither a duration (90s, 30m, 2h, 1d) nor a date (2026-11-22)') from None
    return Moment(text, (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp(), False)


def due_date(text: str) -> datetime | None:
    """Return a due date; None for `now`."""
    if text == 'now':
        return None
    try:
        return date_of(text)
    except ValueError:
        raise ValueError(f'it must be a date such as 2026-01-31T08:00+01:00, or "now", not {text!r:.80}') from None


def json_value(text: str, kind: type[Any]) -> Any:
    """Return a list or an object in JSON; `kind` is `list` or `dict`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise ValueError(f'it must be {"a list" if kind is list else "an object"} in JSON, not {text!r:.80}')
    return found


def choice(text: str, known: Collection[str]) -> str:
    """Return one of some words."""
    if text not in known:
        raise ValueError(f'it must be one of {", ".join(known)}, not {text!r:.80}')
    return text
