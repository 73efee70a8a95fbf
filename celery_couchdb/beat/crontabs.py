"""The dates of a crontab in a time zone, also on the days on which the clock changes.

* A time that the clock skips is moved by the length of the gap: 02:30 becomes 03:30.
* Of a time that occurs twice, the first one counts.
* A crontab for every hour of the day means elapsed hours: it has no date in a skipped hour, and dates in both hours
  that are called the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import date, datetime, time, timedelta, tzinfo
from typing import NamedTuple

__all__ = ['Fields', 'count_dates', 'next_date']

_DAY = timedelta(days=1)

#: How far ahead the next date is looked for: 29 February is the same day of the week at the latest after 40 years.
_MAX_DAYS = 41 * 366


class Fields(NamedTuple):
    """The sorted numbers in the five fields. Sunday is the weekday 0."""

    minutes: list[int]
    hours: list[int]
    days: Collection[int]
    months: Collection[int]
    weekdays: Collection[int]


def next_date(fields: Fields, zone: tzinfo, after: float) -> float | None:
    """Return the first date after `after`, both in seconds since the epoch; None if there is none in 40 years."""
    # The dates of the day before may be moved beyond midnight.
    day = datetime.fromtimestamp(after, zone).date() - _DAY
    for _ in range(_MAX_DAYS):
        if _is_on(fields, day):
            found = _first_on(fields, zone, day, after)
            if found is not None:
                return found
        day += _DAY
    return None


def count_dates(fields: Fields, zone: tzinfo, first: float, last: float) -> int:
    """Return the number of dates from `first` to `last`, both included."""
    day, end = (datetime.fromtimestamp(date, zone).date() + more for date, more in ((first, -_DAY), (last, _DAY)))
    count, a_day = 0, len(fields.hours) * len(fields.minutes)
    while day <= end:
        if _is_on(fields, day):
            midnight, next_midnight = (datetime.combine(one, time(), zone) for one in (day, day + _DAY))
            start = midnight.timestamp()
            if midnight.utcoffset() != next_midnight.utcoffset():
                count += len({found for found in _on_changing_day(fields, zone, day) if first <= found <= last})
            elif first <= start and start + 86400 <= last:
                count += a_day
            else:
                dates = (start + 3600 * hour + 60 * minute for hour in fields.hours for minute in fields.minutes)
                count += sum(first <= found <= last for found in dates)
        day += _DAY
    return count


def _is_on(fields: Fields, day: date) -> bool:
    return day.month in fields.months and day.day in fields.days and day.isoweekday() % 7 in fields.weekdays


def _first_on(fields: Fields, zone: tzinfo, day: date, after: float) -> float | None:
    midnight, end = (datetime.combine(one, time(), zone) for one in (day, day + _DAY))
    if midnight.utcoffset() != end.utcoffset():
        return min((found for found in _on_changing_day(fields, zone, day) if found > after), default=None)
    start = midnight.timestamp()
    for hour in fields.hours:
        if start + 3600 * (hour + 1) > after:
            for minute in fields.minutes:
                if (found := start + 3600 * hour + 60 * minute) > after:
                    return found
    return None


def _on_changing_day(fields: Fields, zone: tzinfo, day: date) -> Iterator[float]:
    """Yield all dates on a day on which the clock changes."""
    is_hourly = len(fields.hours) == 24
    for hour in fields.hours:
        for minute in fields.minutes:
            wall = datetime.combine(day, time(hour, minute))
            first, second = (wall.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
            exists = datetime.fromtimestamp(first, zone).replace(tzinfo=None, fold=0) == wall
            if exists or not is_hourly:
                yield first
            if exists and is_hourly:
                yield second
