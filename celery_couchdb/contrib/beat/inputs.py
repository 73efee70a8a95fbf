"""The members of an entry as people give them: by the options of a command, or in the form of the page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...resources.fields import Field
from ...resources.inputs import choice, duration, json_value, whole
from .entries import DEFAULT_GRACE_SECONDS, MISSED
from .schedules import LEAST_SECONDS

#: The kinds of rules that people can give.
KINDS = ('every', 'crontab', 'at', 'solar')

_MISSED = 'What is sent if no beat ran for longer than the grace: "once" (the latest due date) or "skip" (none).'
_GRACE = f'After a shorter interruption everything is sent. Default: {DEFAULT_GRACE_SECONDS:.0f} seconds.'
_interval = partial(duration, least=LEAST_SECONDS)
_list, _object = (partial(json_value, kind=kind) for kind in (list, dict))

#: The members of an entry beside its name and task: the options of the commands and the fields of the form.
FIELDS = (
    Field('every', 'Every', hint='An interval: 30 (seconds), 15m, 1h or 1d.', read=_interval, kinds=('every',)),
    Field('crontab', 'Crontab', hint='Minute, hour, day, month, weekday: "30 3 * * mon-fri".', kinds=('crontab',)),
    Field('at', 'At', hint='One date, such as 2027-01-01T09:00.', kinds=('at',)),
    Field('solar', 'Event and place', hint='Such as "sunset 48.1 11.6", latitude and longitude.', kinds=('solar',)),
    Field('timezone', 'Time zone', hint="Default: the app's.", kinds=('crontab', 'at')),
    Field('args', 'Arguments', '', 'A list in JSON.', 'area', (), _list, is_argument=True),
    Field('kwargs', 'Named arguments', '', 'An object in JSON.', 'area', (), _object, is_argument=True),
    Field('options', 'Options', '', 'Options of apply_async, an object in JSON.', 'area', (), _object),
    Field('missed', 'Missed', '', _MISSED, 'select', MISSED, partial(choice, known=MISSED)),
    Field('start', 'Start', hint='Nothing is due until this date, and intervals count from it. Default: now.'),
    Field('until', 'Until', hint='Nothing is due after this date.'),
    Field('times', 'Times', hint='How many due dates are sent at most.', read=whole),
    Field('grace', 'Grace', hint=_GRACE, read=duration),
)


def members_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an entry for what somebody has given; None was not given.

    `every`, `crontab`, `at`, `solar` (an event, a latitude and a longitude) and `timezone` become its schedule.
    *Raises* `ValueError`, with a sentence.
    """
    schedule = {kind: given[kind] for kind in KINDS if given.get(kind) is not None}
    if (solar := schedule.pop('solar', None)) is not None:
        try:
            event, latitude, longitude = solar.split()
            schedule |= {'solar': event, 'latitude': float(latitude), 'longitude': float(longitude)}
        except ValueError:
            raise ValueError('solar must be an event, a latitude and a longitude, such as "sunset 48.1 11.6"') from None
    if (zone := given.get('timezone')) is not None:
        if not schedule:
            raise ValueError('a time zone needs a crontab or a date')
        schedule['timezone'] = zone
    members = {name: value for name, value in given.items() if value is not None and name not in (*KINDS, 'timezone')}
    return {**members, **({'schedule': schedule} if schedule else {})}


def typed_rule(schedule: Any) -> tuple[str, str, str]:
    """Return kind, rule and time zone of a schedule as it is in a document, as people type them; '' for what is not."""
    schedule = schedule if isinstance(schedule, Mapping) else {}
    kind = next((kind for kind in KINDS if kind in schedule), '')
    parts = [kind, *(['latitude', 'longitude'] if kind == 'solar' else [])]
    rule = ' '.join(_text(schedule[part]) for part in parts if part in schedule)
    return kind, rule, str(schedule.get('timezone') or '')


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
