"""Schedules: their form in documents, and their due dates.

::

    {"every": 30}                                                  seconds, counted from the entry's start
    {"every": 3600, "relative": true}                              Celery's `relative`: at the full hour
    {"crontab": "30 2 * * mon-fri", "timezone": "Europe/Berlin"}   minute, hour, day, month, weekday
    {"at": "2027-01-01T09:00:00", "timezone": "Europe/Berlin"}     once; or seconds since the epoch
    {"solar": "sunset", "latitude": 48.1, "longitude": 11.6}       needs the package `ephem`
    {"code": "shop.schedules.Business", "parameters": "…"}         an object in the code of the app

Dates are seconds since the epoch, UTC. Of a crontab on the days on which the clock changes:

* A time that the clock skips is moved by the length of the gap: 02:30 becomes 03:30.
* Of a time that occurs twice, the first one counts.
* A crontab for every hour of the day means elapsed hours: it has no date in a skipped hour, and dates in both hours
  that are called the same.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from celery import schedules
from celery.exceptions import ImproperlyConfigured

from kombu_couchdb.values import MAX_NUMBER, date_of, is_number

#: The latest date in documents: the beginning of the year 3000.
LATEST = 32_503_680_000.0

#: The shortest interval in seconds; the longest is `MAX_NUMBER`.
LEAST_SECONDS = 0.01

#: The least pause in seconds between two due dates of a class in the code of the app.
_LEAST_PAUSE_SECONDS = 1.0

#: The fields of a crontab, as Celery calls them and as people do, with what they may be.
_CRONTAB = {
    'minute': 'minute must be 0 to 59',
    'hour': 'hour must be 0 to 23',
    'day_of_month': 'day must be 1 to 31',
    'month_of_year': 'month must be 1 to 12, or jan to dec',
    'day_of_week': 'weekday must be 0 (Sunday) to 6, or sun to sat',
}
_PATTERNS = 'or a pattern such as *, */5, 1-5 or 1,3'

#: The kinds of schedules: by the member that names the kind, the other members that are allowed.
_KINDS: dict[str, frozenset[str]] = {
    'every': frozenset({'relative'}),
    'crontab': frozenset({'timezone'}),
    'at': frozenset({'timezone'}),
    'solar': frozenset({'latitude', 'longitude'}),
    'code': frozenset({'parameters'}),
}

#: Attributes of Celery's schedule objects that are no parameters.
_NO_PARAMETERS = frozenset({'nowfun', '_app', 'app', 'tz', 'utc_enabled'})

_DAY = timedelta(days=1)

#: How far ahead the next date is looked for: 29 February is the same day of the week at the latest after 40 years.
_MAX_DAYS = 41 * 366


class Malformed(ValueError):
    """A part of an entry is wrong. The text is a sentence that names it."""


class Rule:
    """The due dates of a schedule."""

    #: Whether all processes compute the same dates.
    exact = True
    #: What the dates depend on beside the document: a time zone of the app.
    basis = ''

    def next(self, anchor: float, after: float) -> float | None:
        """Return the first due date after `after`, or None. The entry's first date is after `anchor`."""
        raise NotImplementedError

    def count(self, first: float, last: float) -> int:
        """Return the number of due dates from `first`, which is one, to `last`; about, if `exact` is false."""
        return round((last - first) / ((self.next(first, first) or math.inf) - first)) + 1  # a day may have 23 hours

    def between(self, found: float, end: float) -> float:
        """Return a date about in the middle between `found`, a due date, and `end`, to look for due dates after it."""
        return (found + end) / 2


class Every(Rule):
    """A fixed interval. The due dates are on a grid that begins at the anchor, so that they do not drift."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def next(self, anchor: float, after: float) -> float | None:
        count = max(1, math.floor((after - anchor) / self.seconds))
        while (due := round(anchor + count * self.seconds, 3)) <= after:
            count += 1
        return due

    def count(self, first: float, last: float) -> int:
        return math.floor((last - first) / self.seconds + 1e-3) + 1


class Crontab(Rule):
    """A crontab in a time zone."""

    def __init__(self, fields: Fields, zone: tzinfo) -> None:
        self.fields, self.zone, self.basis = fields, zone, str(zone)

    def next(self, anchor: float, after: float) -> float | None:
        return next_date(self.fields, self.zone, after)

    def count(self, first: float, last: float) -> int:
        return count_dates(self.fields, self.zone, first, last)


class At(Rule):
    """One date."""

    def __init__(self, date: float, zone: tzinfo) -> None:
        self.date, self.basis = date, str(date)
        #: The time zone in which people want to read it.
        self.zone = zone

    def next(self, anchor: float, after: float) -> float | None:
        return self.date if self.date > after else None


class Computed(Rule):
    """A schedule that Celery computes: `solar` and `relative`. Its dates are rounded up to whole seconds."""

    exact = False

    def __init__(self, schedule: Any, app: Any) -> None:
        self._schedule, self._app = schedule, app
        self.basis = '' if isinstance(schedule, schedules.solar) else str(app.timezone)

    def next(self, anchor: float, after: float) -> float | None:
        with _at(self._schedule, self._app, after) as last:
            due = math.ceil(round(after + self._schedule.remaining_estimate(last).total_seconds(), 3))
        return float(due) if due > after else math.floor(after) + 1.0


class Relative(Computed):
    """Celery's `relative`: whole minutes, hours or days after the due date before."""

    def __init__(self, seconds: float, app: Any) -> None:
        super().__init__(schedules.schedule(timedelta(seconds=seconds), True, app=app), app)
        #: The due dates are at full days, hours, minutes or seconds: how long such a unit is, in seconds.
        self.unit = unit = max(unit for unit in (1, 60, 3600, 86400) if unit <= max(seconds, 1))
        #: The seconds between two due dates.
        self.step = max(seconds // unit, 1) * unit
        #: How long after a due date Celery's next one is still that of the due date itself; the half of it.
        self._margin = (unit - seconds % unit) / 2

    def between(self, found: float, end: float) -> float:
        # Elsewhere than shortly after a due date, the next one depends on where one looks. Days may have 23 hours.
        return found + (end - found) / 2 // self.step * self.step + self._margin


class Asked(Rule):
    """A schedule object of a class in the code of the app. It is asked at the dates that it names."""

    exact = False

    def __init__(self, schedule: Any, app: Any) -> None:
        self._schedule, self._app = schedule, app
        #: The date of the last question, and the answer: a class may take longer than the lease of the leader.
        self._known: tuple[float, tuple[bool, float]] | None = None

    def next(self, anchor: float, after: float) -> float | None:
        """Return when the class is asked first."""
        return after + _LEAST_PAUSE_SECONDS

    def ask(self, due: float, last: float, now: float) -> tuple[bool, float]:
        """Ask at the date `due`; return whether the task is due, and in how many seconds to ask again.

        `last` is the last date that was due, and `now` is what the class takes for now. *Raises* what the class raises.
        """
        if self._known is None or self._known[0] != due:
            with _at(self._schedule, self._app, now):
                is_due, seconds = self._schedule.is_due(datetime.fromtimestamp(last, self._app.timezone))
            if not is_number(seconds):
                raise Malformed(f'is_due of its schedule returned {seconds!r:.80}, which is not a number of seconds')
            self._known = due, (bool(is_due), min(max(seconds, _LEAST_PAUSE_SECONDS), MAX_NUMBER))
        return self._known[1]


@contextmanager
def _at(schedule: Any, app: Any, now: float) -> Iterator[datetime]:
    """Let a schedule object believe that it is `now`, in the app's time zone."""
    moment = datetime.fromtimestamp(now, app.timezone)
    nowfun, schedule.nowfun = schedule.nowfun, lambda: moment
    try:
        yield moment
    finally:
        schedule.nowfun = nowfun


def rule_of(doc: Mapping[str, Any], app: Any, code: Rule | None = None) -> Rule:
    """Return the rule for a schedule as it is in a document.

    `code` is the rule of the entry with the same name in the code of the app, if there is one. *Raises* `Malformed`.
    """
    kinds = [kind for kind in _KINDS if kind in doc]
    if len(kinds) != 1:
        raise Malformed(f'schedule must have exactly one of the members {", ".join(_KINDS)}')
    [kind] = kinds
    if unknown := sorted(map(str, doc.keys() - _KINDS[kind] - {kind})):
        raise Malformed(f'schedule has the unknown member {unknown[0]!r:.80} beside {kind!r}')
    if kind != 'code':
        return _READERS[kind](doc, app)
    if code is None:
        raise Malformed('its schedule is in the code of the app, which has no entry of this name')
    return code


def described(schedule: Any) -> dict[str, Any]:
    """Return one of Celery's schedule objects as it is in a document."""
    kind = type(schedule)
    if schedule.nowfun is None:
        if kind is schedules.schedule and schedule.seconds >= LEAST_SECONDS:
            return {'every': schedule.seconds, **({'relative': True} if schedule.relative else {})}
        if kind is schedules.crontab:
            zone = getattr(schedule.tz, 'key', None)
            text = ' '.join(map(_crontab_text, (getattr(schedule, f'_orig_{name}') for name in _CRONTAB)))
            return {'crontab': text, **({'timezone': zone} if zone else {})}
        if kind is schedules.solar:
            return {'solar': schedule.event, 'latitude': schedule.lat, 'longitude': schedule.lon}
    parameters = {name: value for name, value in vars(schedule).items() if name not in _NO_PARAMETERS}
    text = json.dumps(parameters, default=_named, sort_keys=True, skipkeys=True)
    return {'code': f'{kind.__module__}.{kind.__qualname__}', 'parameters': digest_of(text)}


def _named(value: Any) -> Any:
    """Return a parameter that JSON cannot hold as text that is the same in all processes."""
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(member, default=_named) for member in value)
    if isinstance(value, (timedelta, date, time)):
        return str(value)
    return f'{type(value).__module__}.{type(value).__qualname__}'


def digest_of(value: Any) -> str:
    """Return the digest of a JSON value. It is the same for 5 and 5.0: some servers return the one for the other."""
    return sha256(json.dumps(_with_whole_numbers(value), sort_keys=True).encode()).hexdigest()[:32]


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _crontab_text(field: Any) -> str:
    text = field if isinstance(field, (str, int)) else ','.join(map(str, sorted(field)))
    return str(text).replace(' ', '')


def _every(doc: Mapping[str, Any], app: Any) -> Rule:
    value, relative = doc['every'], doc.get('relative', False)
    if not is_number(value) or not LEAST_SECONDS <= value <= MAX_NUMBER:
        raise Malformed(f'schedule.every must be a number of seconds from {LEAST_SECONDS} to {MAX_NUMBER:,}')
    if not isinstance(relative, bool):
        raise Malformed('schedule.relative must be true or false')
    return Relative(value, app) if relative else Every(value)


def _crontab(doc: Mapping[str, Any], app: Any) -> Rule:
    texts = doc['crontab'].split() if isinstance(doc['crontab'], str) else []
    if len(texts) != 5:
        raise Malformed('schedule.crontab must be text with five fields: minute, hour, day, month and weekday')
    parsed = _parsed(dict(zip(_CRONTAB, texts, strict=True)), app)
    numbers = [tuple(sorted(getattr(parsed, name))) for name in _CRONTAB]
    if not all(numbers):
        raise Malformed('schedule.crontab is not valid: a field has no number')
    return Crontab(Fields(*numbers), _zone(doc, app))


def _parsed(fields: Mapping[str, str], app: Any) -> Any:
    """Return Celery's crontab with these fields; the error names the one that is wrong."""
    try:
        return schedules.crontab(**fields, app=app)
    except (schedules.ParseException, ValueError, TypeError, LookupError) as exc:
        for name, text in fields.items():
            if len(fields) == 1:
                raise Malformed(f'schedule.crontab: the {_CRONTAB[name]}, {_PATTERNS}; not {text!r:.80}') from exc
            _parsed({name: text}, app)
        raise Malformed(f'schedule.crontab is not valid: {exc}') from exc


def _zone(doc: Mapping[str, Any], app: Any) -> tzinfo:
    """Return the time zone of a schedule. Without one it is the app's."""
    name = doc.get('timezone')
    if name is None:
        zone: tzinfo = app.timezone
        return zone
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as exc:
        raise Malformed(f'schedule.timezone {name!r:.80} is not the name of a time zone') from exc


def _at_date(doc: Mapping[str, Any], app: Any) -> Rule:
    found, zone = doc['at'], app.timezone
    if isinstance(found, str):
        try:
            parsed = date_of(found)
            zone = parsed.tzinfo or _zone(doc, app)
            found = parsed.replace(tzinfo=zone).timestamp()
        except (ValueError, OverflowError) as exc:
            if isinstance(exc, Malformed):
                raise
            found = None
    if not is_number(found) or not 0 <= found <= LATEST:
        raise Malformed('schedule.at must be a date such as "2027-01-01T09:00:00+01:00", or seconds since the epoch')
    return At(float(found), zone)


def _solar(doc: Mapping[str, Any], app: Any) -> Rule:
    try:
        return Computed(schedules.solar(doc['solar'], doc['latitude'], doc['longitude'], app=app), app)
    except KeyError as exc:
        raise Malformed(f'schedule.solar needs the member {exc.args[0]!r}') from exc
    except ImproperlyConfigured as exc:
        raise Malformed('schedule.solar needs the package ephem: pip install "celery[solar]"') from exc
    except (ValueError, TypeError) as exc:
        raise Malformed(f'schedule.solar is not valid: {exc}') from exc


_READERS: dict[str, Callable[[Mapping[str, Any], Any], Rule]] = {
    'every': _every,
    'crontab': _crontab,
    'at': _at_date,
    'solar': _solar,
}


# -- crontabs


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
