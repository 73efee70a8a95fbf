"""Schedules: their form in documents, and their due dates.

::

    {"every": 30}                                                  seconds, counted from the entry's start
    {"every": 3600, "relative": true}                              Celery's `relative`: at the full hour
    {"crontab": "30 2 * * mon-fri", "timezone": "Europe/Berlin"}   minute, hour, day, month, weekday
    {"at": "2027-01-01T09:00:00", "timezone": "Europe/Berlin"}     once; or seconds since the epoch
    {"solar": "sunset", "latitude": 48.1, "longitude": 11.6}       needs the package `ephem`
    {"code": "shop.schedules.Business"}                            an object in the code of the app

Dates are seconds since the epoch, UTC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any, Protocol
from zoneinfo import ZoneInfo

from celery import schedules
from celery.exceptions import ImproperlyConfigured

from .crontabs import Fields, next_date

__all__ = ['LATEST', 'Malformed', 'Rule', 'described', 'is_number', 'rule_of']

#: The latest date in documents: the beginning of the year 3000.
LATEST = 32_503_680_000.0

#: The range of intervals in seconds.
_LEAST_SECONDS, _MOST_SECONDS = 0.01, 1e9

_CRONTAB = ('minute', 'hour', 'day_of_month', 'month_of_year', 'day_of_week')

#: The kinds of schedules: by the member that names the kind, the other members that are allowed.
_KINDS: dict[str, frozenset[str]] = {
    'every': frozenset({'relative'}),
    'crontab': frozenset({'timezone'}),
    'at': frozenset({'timezone'}),
    'solar': frozenset({'latitude', 'longitude'}),
    'code': frozenset(),
}


class Malformed(ValueError):
    """A part of an entry is wrong. The text is a sentence that names it."""


class Rule(Protocol):
    """The due dates of a schedule."""

    #: Whether all processes compute the same dates.
    exact: bool

    def next(self, anchor: float, after: float) -> float | None:
        """Return the first due date after `after`, or None. The entry's first date is after `anchor`."""


class Every:
    """A fixed interval. The due dates are on a grid that begins at the anchor, so that they do not drift."""

    exact = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def next(self, anchor: float, after: float) -> float | None:
        count = max(1, math.floor((after - anchor) / self._seconds))
        while (due := round(anchor + count * self._seconds, 3)) <= after:
            count += 1
        return due


class Crontab:
    """A crontab in a time zone, see `crontabs`."""

    exact = True

    def __init__(self, fields: Fields, zone: tzinfo) -> None:
        self._fields, self._zone = fields, zone

    def next(self, anchor: float, after: float) -> float | None:
        return next_date(self._fields, self._zone, after)


class At:
    """One date."""

    exact = True

    def __init__(self, date: float) -> None:
        self._date = date

    def next(self, anchor: float, after: float) -> float | None:
        return self._date if self._date > after else None


class Object:
    """One of Celery's schedule objects. The dates of `solar` are rounded up to whole seconds."""

    exact = False

    def __init__(self, schedule: Any, *, whole_seconds: bool = False) -> None:
        self._schedule, self._whole_seconds = schedule, whole_seconds

    def next(self, anchor: float, after: float) -> float | None:
        schedule, last = self._schedule, datetime.fromtimestamp(after, timezone.utc)
        nowfun, schedule.nowfun = schedule.nowfun, lambda: last
        try:
            now = schedule.maybe_make_aware(schedule.now()).timestamp()  # classes of an app may ignore `nowfun`
            try:
                due = now + schedule.remaining_estimate(last).total_seconds()
            except NotImplementedError:
                due = now + schedule.is_due(last)[1]
        finally:
            schedule.nowfun = nowfun
        due = float(math.ceil(due) if self._whole_seconds else round(due, 3))
        return due if due > after else after + 1


def rule_of(doc: Any, app: Any, code: Any = None) -> Rule:
    """Return the rule for a schedule as it is in a document.

    `code` is the schedule of the entry with the same name in the code of the app, if there is one. *Raises*
    `Malformed`.
    """
    if not isinstance(doc, Mapping):
        raise Malformed('schedule must be an object such as {"every": 30}')
    kinds = [kind for kind in _KINDS if kind in doc]
    if len(kinds) != 1:
        raise Malformed(f'schedule must have exactly one of the members {", ".join(_KINDS)}')
    [kind] = kinds
    if unknown := sorted(map(str, doc.keys() - _KINDS[kind] - {kind})):
        raise Malformed(f'schedule has the unknown member {unknown[0]!r:.80} beside {kind!r}')
    value = doc[kind]
    if kind == 'every':
        return _every(value, doc.get('relative', False), app)
    if kind == 'crontab':
        return Crontab(_fields(value, app), _zone(doc, app))
    if kind == 'at':
        return At(_date(value, doc, app))
    if kind == 'solar':
        return _solar(value, doc, app)
    if code is None:
        raise Malformed('its schedule is in the code of the app, which has no entry of this name')
    return Object(code)


def described(schedule: Any) -> dict[str, Any]:
    """Return one of Celery's schedule objects as it is in a document."""
    kind = type(schedule)
    if schedule.nowfun is None:
        if kind is schedules.schedule and schedule.seconds >= _LEAST_SECONDS:
            return {'every': schedule.seconds, **({'relative': True} if schedule.relative else {})}
        if kind is schedules.crontab:
            zone = getattr(schedule.tz, 'key', None)
            text = ' '.join(map(_crontab_text, (getattr(schedule, f'_orig_{name}') for name in _CRONTAB)))
            return {'crontab': text, **({'timezone': zone} if zone else {})}
        if kind is schedules.solar:
            return {'solar': schedule.event, 'latitude': schedule.lat, 'longitude': schedule.lon}
    return {'code': f'{kind.__module__}.{kind.__qualname__}'}


def _crontab_text(field: Any) -> str:
    text = field if isinstance(field, (str, int)) else ','.join(map(str, sorted(field)))
    return str(text).replace(' ', '')


def _every(value: Any, relative: Any, app: Any) -> Rule:
    if not is_number(value) or not _LEAST_SECONDS <= value <= _MOST_SECONDS:
        raise Malformed(f'schedule.every must be a number of seconds from {_LEAST_SECONDS} to {_MOST_SECONDS:.0f}')
    if not isinstance(relative, bool):
        raise Malformed('schedule.relative must be true or false')
    return Object(schedules.schedule(timedelta(seconds=value), True, app=app)) if relative else Every(value)


def _fields(value: Any, app: Any) -> Fields:
    texts = value.split() if isinstance(value, str) else []
    if len(texts) != 5:
        raise Malformed('schedule.crontab must be text with five fields: minute, hour, day, month and weekday')
    try:
        parsed = schedules.crontab(**dict(zip(_CRONTAB, texts, strict=True)), app=app)
    except (schedules.ParseException, ValueError, TypeError, LookupError) as exc:
        raise Malformed(f'schedule.crontab is not valid: {exc}') from exc
    numbers = [sorted(getattr(parsed, name)) for name in _CRONTAB]
    if not all(numbers):
        raise Malformed('schedule.crontab is not valid: a field has no number')
    return Fields(*numbers)


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


def _date(value: Any, doc: Mapping[str, Any], app: Any) -> float:
    found = value
    if isinstance(value, str):
        try:
            # Python 3.10 does not know the Z.
            parsed = datetime.fromisoformat(value[:-1] + '+00:00' if value.endswith(('Z', 'z')) else value)
            found = (parsed if parsed.tzinfo else parsed.replace(tzinfo=_zone(doc, app))).timestamp()
        except (ValueError, OverflowError) as exc:
            if isinstance(exc, Malformed):
                raise
            found = None
    if not is_number(found) or not 0 <= found <= LATEST:
        raise Malformed('schedule.at must be a date such as "2027-01-01T09:00:00+01:00", or seconds since the epoch')
    return float(found)


def _solar(event: Any, doc: Mapping[str, Any], app: Any) -> Rule:
    try:
        return Object(schedules.solar(event, doc['latitude'], doc['longitude'], app=app), whole_seconds=True)
    except KeyError as exc:
        raise Malformed(f'schedule.solar needs the member {exc.args[0]!r}') from exc
    except ImproperlyConfigured as exc:
        raise Malformed('schedule.solar needs the package ephem: pip install "celery[solar]"') from exc
    except (ValueError, TypeError) as exc:
        raise Malformed(f'schedule.solar is not valid: {exc}') from exc


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
