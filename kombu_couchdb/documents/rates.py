"""Rates: of all messages with one rate key, at most so many start in a period, over all workers.

Two headers of a message give its rate key and its rate. A consumer claims such a message only after it has taken a
*start*: it writes the document `rate:<key>` with a later `next`, in the revision that it has read. The starts of a key
have even distances (the generic cell rate algorithm): one may be taken up to `BURST_SECONDS` before `next`, and moves
`next` by `RateLimit.interval`, which is so much longer that no period has more starts than the rate allows.

A message for which there is no start is parked under `parked_key`, see `concurrency`, until its turn comes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from ..errors import ConfigurationError
from ..values import SECONDS_OF_UNIT, is_number
from . import concurrency
from .ids import RATE as PREFIX
from .ids import key_problem
from .shared_documents import Rate as RateDocument
from .task_message import headers_of

#: The names of the headers. A `rate` without a `rate_key` is a header of somebody else.
RATE, RATE_KEY = 'rate', 'rate_key'

#: How long before its time a start may be taken: consumers that are late for one start are not late for the next.
BURST_SECONDS = 0.1

_TEXT = re.compile(r'(\d{1,9}(?:\.\d{1,9})?)(?:/([smh]))?', re.ASCII)

#: The lowest and the highest rate, in starts per second.
_LOWEST, _HIGHEST = 1 / 86_400, 1000

#: A `next` further in the future than this was not written by a consumer.
_MAX_INTERVAL_SECONDS = 1 / _LOWEST + 1


class RateLimit(NamedTuple):
    """The rate of a message: at most `most` messages with this key start in `period` seconds."""

    key: str
    most: int
    period: float

    @property
    def interval(self) -> float:
        """The distance of two starts in seconds; the first start after a period is never early by more than it has."""
        return (self.period + BURST_SECONDS) / self.most


# -- headers


def rate_problem(headers: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the headers of a message; None if they have a valid rate, or none at all."""
    key = headers.get(RATE_KEY)
    if key is None:
        return None
    if reason := key_problem(RATE_KEY, key):
        return reason
    if _parse(headers.get(RATE)) is None:
        return (
            f"the header {RATE} must be a rate from one a day to 1,000 a second, such as '10/s', '100/m', '5/h' "
            f'or a number per second, not {headers.get(RATE)!r:.80}'
        )
    return None


def check(headers: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` if headers have a rate or a concurrency limit that is not valid."""
    if reason := concurrency.limit_problem(headers) or rate_problem(headers):
        raise ConfigurationError(reason)


def rate_of(doc: Mapping[str, Any]) -> RateLimit | None:
    """Return the rate of an item, or None if it has none. It may be malformed: it is then a dead letter soon."""
    headers = headers_of(doc)
    if headers.get(RATE_KEY) is None or rate_problem(headers):
        return None
    parsed = _parse(headers[RATE])
    return None if parsed is None else RateLimit(headers[RATE_KEY], *parsed)


def _parse(rate: Any) -> tuple[int, float] | None:
    """Return the number of starts and the period of a rate; None if it is not valid."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float, str)):
        return None
    if isinstance(rate, str):
        match = _TEXT.fullmatch(rate)
        if match is None:
            return None
        count, period = float(match[1]), SECONDS_OF_UNIT[match[2] or 's']
    else:
        if not 0 <= rate <= _HIGHEST:  # also not NaN, and no int that is too large for a float
            return None
        count, period = float(rate), 1
    # Less than one start in a period is one start in a longer one.
    if not count or not _LOWEST <= count / period <= _HIGHEST:
        return None
    most = max(1, math.floor(count))
    return most, period * most / count


# -- starts


def document_id(key: str) -> str:
    """Return the id of the document that has the next start of a key."""
    return f'{PREFIX}{quote(key, safe="")}'


def next_of(doc: Mapping[str, Any] | None, now: float) -> float:
    """Return the time of the next start; `now` if the document is missing or malformed."""
    found = (doc or {}).get('next')
    if not is_number(found) or not 0 <= found <= now + _MAX_INTERVAL_SECONDS:
        return now
    return float(found)


def has_start(next_: float, now: float) -> bool:
    """Tell whether a start may be taken now."""
    return next_ - BURST_SECONDS <= now


def after(next_: float, rate: RateLimit, now: float) -> float:
    """Return the time of the next start after one was taken."""
    return max(next_, now) + rate.interval


def document(doc: Mapping[str, Any] | None, key: str, next_: float, by: str, now: float) -> RateDocument:
    """Return the successor of a rate's document that takes starts up to `next_`. It differs from all other writes."""
    rev = (doc or {}).get('_rev')
    made: RateDocument = {'_id': document_id(key), 'type': 'Rate', 'key': key, 'next': next_, 'by': by, 'date': now}
    return {**made, '_rev': rev} if rev else made


def order(leaf: Mapping[str, Any]) -> tuple[float, str]:
    """Return the sort key of a leaf of a rate's document: of several, the one with the latest start counts."""
    return next_of(leaf, 0.0), str(leaf['_rev'])


# -- parked messages


def parked_key(key: str, queue: str) -> str:
    """Return the key under which messages of a queue wait for starts: a consumer reads those of its own queues."""
    return f'{PREFIX}{quote(queue, safe="")}:{key}'


def queue_and_key(parked: str | None) -> tuple[str, str] | None:
    """Return queue and rate key of a `parked_key`; None if messages do not wait for a rate under it."""
    if parked is None or not parked.startswith(PREFIX):
        return None
    queue, found, key = parked.removeprefix(PREFIX).partition(':')
    return (unquote(queue), key) if found else None


def waits_for_slot(doc: Mapping[str, Any]) -> bool:
    """Tell whether an item is parked for a slot, not for a start: such an item must be woken before it is claimed."""
    return concurrency.is_parked(doc) and queue_and_key(concurrency.parked_key(doc)) is None
