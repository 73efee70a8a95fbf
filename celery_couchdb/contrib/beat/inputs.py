"""The members of an entry as people give them: by the options of a command, or in the form of the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The kinds of rules that people can give.
KINDS = ('every', 'crontab', 'at', 'solar')


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
