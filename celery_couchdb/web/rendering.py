"""The templates of pages, and the environment in which they are rendered.

All values are shown as text: HTML in them is escaped, and so are control characters, line breaks and characters that
change the direction of text. The filter `lines` keeps the line breaks of a long text, and `exact` all characters.
"""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kombu_couchdb.log import printable

from ..resources.columns import format_duration
from .tables import no_value, points, title

#: In the line of a frame: it is Celery's, or of what Celery uses.
_FOREIGN = re.compile(r'[/\\](celery|kombu|billiard|vine)[/\\]')

#: The maximum length of a long text; the rest is cut.
_MAX_CHARACTERS = 100_000


def environment() -> Environment:
    """Return the environment of the templates."""
    found = Environment(
        loader=PackageLoader('celery_couchdb.web'),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    found.filters |= {'lines': _lines, 'points': points, 'exact': _exact, 'frames': _frames}
    found.filters |= {'moment': _moment, 'age': _age, 'title_of': title, 'duration': format_duration}
    found.tests |= {'no_value': no_value}
    return found


def _shown(value: Any) -> Any:
    """Return a value as templates show it: text without control characters."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _exact(text: str) -> Markup:
    """Return a value of a form, which must come back as it is: unprintable characters as references."""
    return Markup('').join(char if char.isprintable() else Markup(f'&#{ord(char)};') for char in text)


def _lines(text: str) -> Markup:
    """Return a text with its line breaks."""
    cut = text if len(text) <= _MAX_CHARACTERS else f'{text[:_MAX_CHARACTERS]}\n… the rest is cut'
    return Markup('\n').join(escape(printable(line)) for line in cut.splitlines())


def _frames(traceback: str) -> list[tuple[bool, list[str]]]:
    """Return the parts of a traceback: whether a part is of the app, and its lines; those of Celery are folded."""
    parts, is_own = list[tuple[bool, list[str]]](), True
    for line in traceback.splitlines():
        if line.startswith('  File "'):
            is_own = _FOREIGN.search(line) is None
        elif not line.startswith('  '):
            is_own = True
        if not parts or parts[-1][0] is not is_own:
            parts.append((is_own, []))
        parts[-1][1].append(line)
    return parts


def _age(seconds: float) -> Markup:
    """Return how long ago a date is, or in how long; the date itself is its title."""
    distance = time.time() - seconds
    return _date(seconds, f'{format_duration(distance)} ago' if distance >= 0 else f'in {format_duration(-distance)}')


def _moment(seconds: float) -> Markup:
    """Return a date itself, where people compare it with a calendar or a log."""
    return _date(seconds, None)


def _date(seconds: float, text: str | None) -> Markup:
    """Return a date, which the script of the page gives in the time zone of the browser."""
    try:
        date = datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return escape(f'{seconds:g}')
    exact, shown = date.isoformat(timespec='seconds'), f'{date:%Y-%m-%d %H:%M:%S} UTC'
    kind = Markup('') if text else Markup(' class="exact"')
    return Markup('<time datetime="{}" title="{}"{}>{}</time>').format(exact, shown, kind, text or shown)
