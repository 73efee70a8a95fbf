"""The format of Celery's messages: the types of headers, content and body, the due date, lifetime and priority.

Celery's worker relies on these types: a header of another type raises in the worker's main process, outside the task.
Everything that receives messages checks them here: consumers (`validation`), and the processes that move messages from
other databases, which are stricter about what publishers may write.

A message with the headers `task` and `id` is a task of protocol 2. Other messages, those of protocol 1 and those of
programs that use kombu without Celery, may have any headers. No function here imports Celery.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import MAXYEAR, MINYEAR, datetime, timezone
from typing import Any

from ..schema import OBJECT, TEXT, Kind, list_of
from ..values import MAX_NUMBER, date_of, is_number, is_whole

#: Encodings that a body may have: those of kombu's serializers, and other character sets that are decoded in linear
#: time and memory. Python knows more: `bz2` and `zlib` decode 1 kB to gigabytes, `punycode` and `idna` need quadratic
#: time.
_ENCODINGS = frozenset(
    {
        *('binary', 'ascii-8bit', 'utf-8', 'utf8', 'us-ascii', 'ascii', 'utf-16'),
        *('iso-8859-1', 'iso-8859-15', 'latin-1', 'latin1', 'windows-1252', 'cp1252'),
    }
)


#: The maximum length of an id or a name that a publisher chooses, in characters.
MAX_LINE = 255

#: The header, and the option of a signature, with the names of the stamps.
STAMPS = 'stamped_headers'

#: The members of the third part of a task's body. They contain signatures of other tasks.
EMBEDDED = frozenset({'callbacks', 'chain', 'chord', 'errbacks'})


def _is_count(value: Any) -> bool:
    return is_whole(value, 0, MAX_NUMBER)


def _is_seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MAX_NUMBER


def _is_id(value: Any) -> bool:
    """Tell whether a value is text, or a UUID as kombu writes it."""
    if isinstance(value, dict) and value.keys() == {'__type__', '__value__'} and value['__type__'] == 'uuid':
        inner = value['__value__']
        value = inner.get('hex') if isinstance(inner, dict) and len(inner) == 1 else None
        return isinstance(value, str) and re.fullmatch('[0-9a-f]{32}', value) is not None
    return isinstance(value, str)


def _is_date(value: Any) -> bool:
    """Tell whether Celery can compare a date. It rejects text that is not a date, with an error of its own.

    kombu decodes a date in a body, and leaves one in a header as it is. Celery converts a date without a time zone,
    which fails at both ends of the calendar.
    """
    is_kombus = (
        isinstance(value, dict) and value.keys() == {'__type__', '__value__'} and value['__type__'] == 'datetime'
    )
    given = value['__value__'] if is_kombus else value
    if not isinstance(given, (str, datetime)) or not given:
        return False
    if (date := _parsed(given)) is None:
        return not is_kombus
    return date.tzinfo is not None or MINYEAR < date.year < MAXYEAR


def _parsed(date: Any) -> datetime | None:
    """Return a date that may be ISO text; None if it is no date."""
    if not isinstance(date, str):
        return date if isinstance(date, datetime) else None
    try:
        return date_of(date)
    except ValueError:
        return None


def _is_time_limit(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(each is None or _is_seconds(each) for each in value)


_ID = Kind('text', _is_id, {str})
_DATE = Kind(f'an ISO date; without a time zone, of the years {MINYEAR + 1} to {MAXYEAR - 1}', _is_date)
_COUNT = Kind(f'a whole number from 0 to {MAX_NUMBER}', _is_count)
_SECONDS = Kind(f'a number of seconds from 0 to {MAX_NUMBER}', _is_seconds)
_FLAG = Kind('true or false', lambda value: isinstance(value, int), {bool})

#: The headers that Celery's producers write, and `headers`, which Celery's worker reads. Each may be null, too.
HEADERS: Mapping[str, Kind] = {
    **dict.fromkeys(('lang', 'task', 'shadow', 'argsrepr', 'kwargsrepr', 'origin', 'compression'), TEXT),
    **dict.fromkeys(('id', 'root_id', 'parent_id', 'group'), _ID),
    **dict.fromkeys(('eta', 'expires'), _DATE),
    **dict.fromkeys(('retries', 'group_index', 'replaced_task_nesting'), _COUNT),
    **dict.fromkeys(('stamps', 'headers'), OBJECT),
    'ignore_result': _FLAG,
    'timelimit': Kind(f'a list of two numbers of seconds from 0 to {MAX_NUMBER}, or nulls', _is_time_limit),
    STAMPS: Kind('a list of names', list_of(TEXT).accepts),
}

#: Options of a signature that contain no signatures and that change only how its own task is sent.
OPTIONS: Mapping[str, Kind] = {
    **{name: HEADERS[name] for name in ('eta', 'group_index', 'ignore_result', 'parent_id', 'root_id', 'shadow')},
    **dict.fromkeys(('task_id', 'group_id'), _ID),
    **{name: HEADERS[name] for name in ('argsrepr', 'kwargsrepr', STAMPS)},
    **dict.fromkeys(('compression', 'exchange', 'queue', 'reply_to', 'routing_key', 'serializer'), TEXT),
    **dict.fromkeys(('add_to_parent', 'immediate', 'mandatory', 'retry'), _FLAG),
    **dict.fromkeys(('delivery_mode', 'max_retries', 'priority'), _COUNT),
    **dict.fromkeys(('countdown', 'interval'), _SECONDS),
    'expires': Kind(f'{_SECONDS.words}, or {_DATE.words}', lambda value: _is_seconds(value) or _is_date(value)),
    'headers': OBJECT,
}

#: Headers that may not be null, and one that would replace a function of Celery's request.
_NEEDED, _NEVER = ('task', 'id'), '_get_custom_headers'


def is_task(headers: Mapping[str, Any]) -> bool:
    """Tell whether a message with these headers is a task of protocol 2."""
    return 'task' in headers and 'id' in headers


def message_problem(message: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the content type, the encoding or the headers of a message; None if nothing is.

    The headers and the properties of the message are objects.
    """
    headers = message['headers']
    if (reason := content_problem(message)) or not is_task(headers):
        return reason
    for name in _NEEDED:
        if headers[name] is None:
            return f'the header {name} is null'
    if not message.get('content-type'):
        return 'content-type is missing'
    if _NEVER in headers:
        return f'the header {_NEVER} is not for messages'
    for name, kind in HEADERS.items():
        value = headers.get(name)
        if value is not None and type(value) not in kind.types and not kind.accepts(value):
            return type_problem(name, value)
    return None


def type_problem(name: str, value: Any, kinds: Mapping[str, Kind] = HEADERS) -> str | None:
    """Return what is wrong with the value of one of the `HEADERS`, or of another mapping; None if nothing is."""
    what = 'header' if kinds is HEADERS else 'option'
    problem = None if value is None else kinds[name].problem(f'the {what} {name}', value)
    return problem and f'{problem}, not {value!r:.80}'


def content_problem(message: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the content type or encoding of a message; None if the body may be decoded."""
    content_type, encoding = message.get('content-type'), message.get('content-encoding')
    if content_type is not None and not isinstance(content_type, str):
        return f'content-type must be text, not {content_type!r:.80}'
    if encoding is not None and not (isinstance(encoding, str) and encoding.lower() in _ENCODINGS):
        return f'content-encoding must be binary, utf-8 or us-ascii, not {encoding!r:.80}'
    return None


def body_problem(body: Any) -> str | None:
    """Return what is wrong with the decoded body of a task; None if it is exactly what Celery writes.

    Celery's worker takes the members that the third part lacks from the headers, and all that it has beside these four
    replace headers.
    """
    if not isinstance(body, list) or [type(part) for part in body] != [list, dict, dict]:
        return 'its body must be a list of the arguments, the keyword arguments, and an object'
    if body[2].keys() != EMBEDDED:
        return f'the third part of its body must have exactly the members {", ".join(sorted(EMBEDDED))}'
    return None


def is_line(value: Any) -> bool:
    """Tell whether a value is text that may be logged: printable, at most 255 characters."""
    return isinstance(value, str) and len(value) <= MAX_LINE and value.isprintable()


#: The highest of AMQP's priorities, which go from 0 to 9; 9 is delivered first. Views contain it: another one needs a
#: new `design.NAME`.
HIGHEST = 9


def headers_of(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the headers of the message in a document that somebody may have changed; {} if they are malformed."""
    message = doc.get('message')
    headers = message.get('headers') if isinstance(message, dict) else None
    return headers if isinstance(headers, dict) else {}


def arguments_in(headers: Mapping[str, Any]) -> str:
    """Return the arguments as Celery writes them into the headers, in one short line; '' if there are none.

    They are Python's `repr`, and at most about 1,000 characters each. No body is read or decoded for them.
    """
    shown = (headers.get('argsrepr'), headers.get('kwargsrepr'))
    return ' '.join(text for text in shown if isinstance(text, str) and text not in ('()', '[]', '{}'))


def mentions(doc: Mapping[str, Any], searched: str) -> bool:
    """Tell whether the arguments of a task contain a text, see `arguments_in`.

    A message without these headers is searched in its body, if that is text in the document.
    """
    headers, message = headers_of(doc), doc.get('message')
    shown = [value for name in ('argsrepr', 'kwargsrepr') if isinstance(value := headers.get(name), str)]
    body = str(message.get('body')) if isinstance(message, dict) else ''
    return any(searched in value for value in shown or [body])


def due_date(message: Mapping[str, Any]) -> float | None:
    """Return when a Celery message with an `eta` header is due, in seconds since the epoch; None for at once.

    A header that is not a date is ignored: Celery refuses the task with a clear error of its own. So is that of a
    message without the header `task`: it belongs to a program that uses kombu without Celery.
    """
    headers = message.get('headers') or {}
    eta = _parsed(headers.get('eta')) if 'task' in headers else None
    if eta is None:
        return None
    # Celery takes a date without a time zone as UTC (celery.utils.time.maybe_make_aware).
    return (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)).timestamp()


def lifetime(message: Mapping[str, Any]) -> float | None:
    """Return for how many seconds a message may wait to be delivered; None: forever."""
    try:
        return int(message['properties']['expiration']) / 1000  # AMQP has it as a string, in milliseconds
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def priority(message: Mapping[str, Any]) -> int:
    """Return the priority of a message; 0 if it has none."""
    try:
        return max(0, min(HIGHEST, int(message['properties']['priority'])))
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0
