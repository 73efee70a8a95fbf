"""The dates of a crontab in a time zone, also on the days on which the clock changes.

* A time that the clock skips is moved by the length of the gap: 02:30 becomes 03:30.
* Of a time that occurs twice, the first one counts.
* A crontab for every hour of the day means elapsed hours: it has no date in a skipped hour, and dates in both hours
  that are called the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from datetime import date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import NamedTuple

_DAY = timedelta(days=1)

#: How far ahead the next date is looked for: 29 February is the same day of the week at the latest after 40 years.
_MAX_DAYS = 41 * 366


class Fields(NamedTuple):
    """The sorted numbers in the five fields. Sunday is the weekday 0."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: tuple[int, ...]
    months: tuple[int, ...]
    weekdays: tuple[int, ...]


def next_date(fields: Fields, zone: tzinfo, after: float) -> float | None:
    """Return the first date after `after`, both in seconds since the epoch; None if there is none in 40 years."""
    # The dates of the day before may be moved beyond midnight.
    day = datetime.fromtimestamp(after, zone).date() - _DAY
    for _ in range(_MAX_DAYS):
        if _is_on(fields, day):
            dates = _dates_on(fields, zone, day)
            if dates[-1] > after:
                return dates[bisect_right(dates, after)]
        day += _DAY
    return None


def count_dates(fields: Fields, zone: tzinfo, first: float, last: float) -> int:
    """Return the number of dates from `first` to `last`, both included."""
    day, end = (datetime.fromtimestamp(date, zone).date() + more for date, more in ((first, -_DAY), (last, _DAY)))
    count = 0
    while day <= end:
        if _is_on(fields, day):
            dates = _dates_on(fields, zone, day)
            count += bisect_right(dates, last) - bisect_left(dates, first)
        day += _DAY
    return count


def _is_on(fields: Fields, day: date) -> bool:
    return day.month in fields.months and day.day in fields.days and day.isoweekday() % 7 in fields.weekdays


@lru_cache(maxsize=200)
def _dates_on(fields: Fields, zone: tzinfo, day: date) -> list[float]:
    """Return all dates that the clock calls a day, in their order."""
    midnight, end = (datetime.combine(one, time(), zone) for one in (day, day + _DAY))
    if midnight.utcoffset() == end.utcoffset():
        start = midnight.timestamp()
        return [start + 3600 * hour + 60 * minute for hour in fields.hours for minute in fields.minutes]
    found, is_hourly = set[float](), len(fields.hours) == 24
    for hour in fields.hours:
        for minute in fields.minutes:
            wall = datetime.combine(day, time(hour, minute))
            first, second = (wall.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
            exists = datetime.fromtimestamp(first, zone).replace(tzinfo=None, fold=0) == wall
            if exists or not is_hourly:
                found.add(first)
            if exists and is_hourly:
                found.add(second)
    return sorted(found)
