"""Schedules in words, for people: `every 15 minutes`, `at 03:30 on Monday to Friday, Europe/Berlin`.

The words are exact: two schedules with the same words have the same due dates, except that those of an interval also
depend on its start. A crontab for which there are no brief words is shown as it is. The words of a crontab are made of
its numbers, not of its text: `*/7` is not every seven minutes, and Celery wants both, the day and the weekday.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from itertools import groupby, pairwise
from typing import Any

from ...resources.columns import NO_VALUE
from ...resources.resource import counted
from .schedules import At, Crontab, Every, Fields, Relative, Rule

_MONTHS = (
    *('', 'January', 'February', 'March', 'April', 'May', 'June'),
    *('July', 'August', 'September', 'October', 'November', 'December'),
)

#: Weeks begin on Monday here: Sunday is the day 7.
_WEEKDAYS = ('', 'Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday')

#: What the dates of a relative interval are rounded to, by the length in seconds.
_FULL = {86400: 'at 00:00', 3600: 'at the full hour', 60: 'at the full minute', 1: 'at the full second'}

#: The most times of a day, and parts of any other list, that words name.
_MOST_PARTS = 4


def in_words(schedule: Any, rule: Rule | None) -> str:
    """Return a schedule as it is in a document in words; `rule` is its rule, None if it is malformed."""
    if isinstance(rule, Every):
        return every(rule.seconds)
    if isinstance(rule, Relative):
        zone = f', {rule.basis}' if rule.unit >= 3600 else ''
        return f'{every(rule.step)} {_FULL[rule.unit]}{zone}'
    if isinstance(rule, Crontab):
        words = crontab_words(rule.fields) or f'crontab {" ".join(schedule["crontab"].split())}'
        return words if _is_same_everywhere(rule.fields) else f'{words}, {rule.zone}'
    if isinstance(rule, At):
        date = datetime.fromtimestamp(rule.date, rule.zone)
        time = date.replace(tzinfo=None).isoformat(' ').removesuffix(':00')
        return f'once at {time} {rule.zone}' + (', the second time that the clock shows it' if date.fold else '')
    if isinstance(schedule, Mapping) and rule is not None:
        return f'by {schedule["code"]} in the code' if 'code' in schedule else _solar_words(schedule)
    return ' '.join(map(str, schedule.values())) if isinstance(schedule, Mapping) else NO_VALUE


def every(seconds: float) -> str:
    """Return an interval in words: `every 0.5 seconds`, `every hour`, `every 1 day 12 hours`."""
    rest, parts = Decimal(str(seconds)), list[str]()
    for unit, length in (('day', 86400), ('hour', 3600), ('minute', 60)):
        count, rest = divmod(rest, length)
        if count:
            parts.append(counted(int(count), unit))
    if rest:
        parts.append(f'{_plain(rest)} second' + ('' if rest == 1 else 's'))
    return 'every ' + (parts[0].removeprefix('1 ') if len(parts) == 1 else ' '.join(parts))


def _plain(number: Any) -> str:
    """Return a number without an exponent and without zeros at the end."""
    return f'{Decimal(str(number)).normalize():f}'


def _solar_words(schedule: Mapping[str, Any]) -> str:
    event, _, kind = schedule['solar'].partition('_')
    latitude, longitude = (
        f'{_plain(abs(float(schedule[name])))} {letters[schedule[name] < 0]}'
        for name, letters in (('latitude', 'NS'), ('longitude', 'EW'))
    )
    # `dusk_civil` is civil dusk, `solar_noon` is solar noon.
    words = f'{kind} {event}' if event in ('dawn', 'dusk') else f'{event} {kind}'
    return f'at {words.strip()} at {latitude}, {longitude}'


# -- crontabs


def crontab_words(fields: Fields) -> str | None:
    """Return a crontab in words, without its time zone; None if there are no brief ones."""
    times, days = _times(fields), _days(fields)
    return None if times is None or days is None else f'{times} {days}'.strip()


def _is_same_everywhere(fields: Fields) -> bool:
    """Tell whether the words say the same in all time zones, as `every 5 minutes` does."""
    has_all = (len(fields.hours), len(fields.days), len(fields.months), len(fields.weekdays)) == (24, 31, 12, 7)
    return has_all and _step(fields.minutes) is not None and fields.minutes[0] == 0


def _times(fields: Fields) -> str | None:
    minutes, hours = fields.minutes, fields.hours
    first, last = f'{hours[0]:02}:{minutes[0]:02}', f'{hours[-1]:02}:{minutes[-1]:02}'
    step, gap = _step(minutes), _gap(hours)
    if len(hours) == 24 and step is not None and minutes[0] == 0:
        return every(step * 60)
    if len(hours) == 24 and (numbers := _listed(minutes)):
        return f'at minute{"" if len(minutes) == 1 else "s"} {numbers} of every hour'
    if len(hours) * len(minutes) <= _MOST_PARTS:
        return 'at ' + _joined([f'{hour:02}:{minute:02}' for hour in hours for minute in minutes])
    if step is not None and (len(hours) == 1 or gap == 1):
        return f'{every(step * 60)} from {first} to {last}'
    if len(minutes) == 1 and gap is not None:
        return f'{every(gap * 3600)} from {first} to {last}'
    return None


def _step(minutes: Sequence[int]) -> int | None:
    """Return the minutes between two dates, if they are always the same, also from one hour to the next."""
    step = 60 // len(minutes)
    return step if len(minutes) > 1 and tuple(minutes) == tuple(range(minutes[0], 60, step)) else None


def _gap(numbers: Sequence[int]) -> int | None:
    """Return the difference between neighbours, if it is always the same."""
    gaps = {following - number for number, following in pairwise(numbers)}
    return gaps.pop() if len(gaps) == 1 else None


def _days(fields: Fields) -> str | None:
    """Return the days in words; an empty text if the times are for every hour of every day."""
    has_all_days, has_all_weekdays = len(fields.days) == 31, len(fields.weekdays) == 7
    months = '' if len(fields.months) == 12 else _listed(fields.months, _MONTHS)
    weekdays = _listed(sorted(day or 7 for day in fields.weekdays), _WEEKDAYS)
    days = _listed(fields.days)
    if months is None or weekdays is None or days is None or not (has_all_days or has_all_weekdays):
        return None
    if not has_all_days:
        return f'on day{"" if len(fields.days) == 1 else "s"} {days} of {months or "the month"}'
    words = f'on {weekdays}' if not has_all_weekdays else '' if len(fields.hours) == 24 else 'every day'
    return f'{words} in {months}'.strip() if months else words


def _listed(numbers: Sequence[int], names: Sequence[str] = ()) -> str | None:
    """Return numbers, or their names, in words: `1 to 7, 15 and 31`; None if they are too many."""
    # The difference of a number and its index is the same for all numbers that follow each other.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    parts = list[str]()
    for run in runs:
        words = [names[number] if names else str(number) for number in run]
        parts += [f'{words[0]} to {words[-1]}'] if len(run) > 2 else words
    return _joined(parts) if len(parts) <= _MOST_PARTS else None


def _joined(words: Sequence[str]) -> str:
    return ' and '.join(filter(None, (', '.join(words[:-1]), words[-1])))
