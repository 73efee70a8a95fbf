"""Checks of parcels before they are moved: their form, and which tasks, queues and headers are accepted.

A parcel contains either a Celery message (`checked`), or, if a program wrote it without Celery, a call (`call_in`).

A message contains the signatures of the tasks that follow its task. Celery would also accept the mere name of a task as
a signature, and some of its tasks run other tasks (`celery.map`, for example). So signatures are accepted only in
exactly the form in which Celery writes callbacks, chains, groups and chords, and only with options that choose nothing
but when and how their own tasks are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from inspect import signature as parameters_of
from typing import Any, NamedTuple

from celery import Celery
from celery.app.amqp import AMQP
from celery.app.task import Context, Task
from kombu.exceptions import DecodeError
from kombu.serialization import prepare_accept_content
from kombu.utils.json import dumps, loads

from kombu_couchdb.contrib.parcels.parcel import FROM_REGION, GIVER, MESSAGE, REGION_HEADER, REGION_PROPERTY
from kombu_couchdb.documents import validation
from kombu_couchdb.documents.body import decoded, loaded
from kombu_couchdb.documents.concurrency import CONCURRENCY_KEY, CONCURRENCY_LIMIT
from kombu_couchdb.documents.ids import JOB_KEY
from kombu_couchdb.documents.rates import RATE_KEY
from kombu_couchdb.documents.task_message import (
    EMBEDDED,
    HEADERS,
    HIGHEST,
    OPTIONS,
    STAMPS,
    body_problem,
    is_line,
    is_task,
    type_problem,
)
from kombu_couchdb.documents.validation import check_names, check_value
from kombu_couchdb.errors import Unstorable
from kombu_couchdb.values import is_whole

from .room import PARCEL

Document = dict[str, Any]

#: Headers that a publisher may not set: they say where a result goes. Celery's requests have a member `headers` with
#: those that are not Celery's own: if a message has this header, the others are found in it, and a retry sends them.
RESERVED = (PARCEL, FROM_REGION, GIVER, 'headers')

#: Other headers that a publisher may not set. Those of limits and of unique jobs concern the tasks of others, too. Each
#: header becomes an attribute of Celery's request: `callbacks`, `chain` and others of them say what the worker does
#: next. Celery writes only those in `HEADERS` into headers. Time limits are attributes since Celery 5.7, which a worker
#: may have although the mover has an older one.
_FORBIDDEN = {JOB_KEY, CONCURRENCY_KEY, CONCURRENCY_LIMIT, RATE_KEY, 'time_limit', 'soft_time_limit'} | (
    {*dir(Context)} - HEADERS.keys()
)

#: Headers that Celery only prints. The mover makes them printable: they contain line breaks if the arguments do.
PRINTED = frozenset({'argsrepr', 'kwargsrepr'})

#: Members with one signature, and members with a list of them. The others have either.
_SINGLE, _SEVERAL = ('chord', 'body'), ('callbacks', 'errbacks', 'chain', 'tasks')

#: The members of a signature.
_MEMBERS = {'task', 'args', 'kwargs', 'options', 'subtask_type', 'immutable'}

#: Options of a signature that choose its queue.
_DESTINATIONS = ('exchange', 'queue', 'routing_key')

#: Options of a signature that contain signatures.
_LINKS = ('chain', 'chord', 'link', 'link_error')

#: Members of stored results. With `result_extended`, a stamp of the same name replaces them.
_OF_RESULTS = ('status', 'result', 'traceback', 'children', 'date_done', 'worker')

#: Parameters of what sends a chain, a group or a chord in Celery 5.4 to 5.7, and of `LimitedTask`, which get stamps as
#: options. With a stamp of such a name, most of them cannot be sent: the next tasks, or the retry, would be lost.
_OF_SENDERS = (
    *('app', 'body', 'eager', 'header', 'header_delay', 'immutable', 'p', 'partial_args', 'rate', 'subtask_type'),
    *('tasks', 'type'),
)

#: What stamps may not be called. A retry gives each stamp to Celery's `apply_async`, as an option of that name: a stamp
#: `stamped_headers` would replace the list of stamps, and those called `chain` or `task_id`, for example, would act.
_NOT_STAMPS = {
    *parameters_of(Task.apply_async).parameters,
    *parameters_of(Celery.send_task).parameters,
    *parameters_of(AMQP.as_task_v2).parameters,
    *(*Context().as_execution_options(), *HEADERS, *OPTIONS, *_LINKS, *RESERVED, *_FORBIDDEN, *_OF_RESULTS),
    *_OF_SENDERS,
}

#: What a publisher may choose as a name or an id.
_LINE = 'printable text of at most 255 characters'
ID = f'{_LINE} that does not begin with {MESSAGE!r}'

#: Signatures that contain others: for each type the name of the task, and the arguments with signatures.
_COMPOSITES = {
    'chain': ('celery.chain', ('tasks',)),
    'group': ('celery.group', ('tasks',)),
    'chord': ('celery.chord', ('header', 'body')),
}

#: The properties that a publisher may set. The others belong to transports and remote control, and are removed.
_PROPERTIES = ('correlation_id', 'delivery_mode', 'expiration', 'priority')

#: Properties that the transport of the broker sets.
_OF_TRANSPORTS = ('body_encoding', 'delivery_info', 'delivery_tag')

#: Headers that are removed: the task's own time limits and number of retries hold.
_REMOVED = (*RESERVED, 'timelimit', 'retries')

#: Content types that are never accepted: decoding pickle runs code of the publisher, and 400 bytes of YAML with merge
#: keys take minutes.
UNSAFE_CONTENT = frozenset({'application/x-python-serialize', 'pickle', 'application/x-yaml', 'yaml'})

#: The maximum length of the id of a document that has a call.
_MAX_ID_CHARACTERS = 255


class ParcelRefused(Exception):
    """A parcel is not moved; the text says why. The mover writes the text into the parcel and does not retry."""


class TaskCall(NamedTuple):
    """A call of a task that a program wrote without Celery."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    #: Other keyword arguments of Celery's `send_task`.
    options: dict[str, Any]


def call_in(doc: Mapping[str, Any], accept: Accept, default_id: str) -> TaskCall:
    """Return the call in a parcel without a message; *raises* `ParcelRefused` if it is malformed or not accepted.

    Without an id in the parcel, the task's id is `default_id`, that of its message, so that it is the same in each try.
    """
    if not isinstance(doc.get('task'), str):
        raise ParcelRefused('it has neither a message nor the name of a task')
    if len(doc['_id']) > _MAX_ID_CHARACTERS:
        raise ParcelRefused(f'the id of the document has more than {_MAX_ID_CHARACTERS} characters')
    args, kwargs = doc.get('args', []), doc.get('kwargs', {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ParcelRefused('args must be a list and kwargs an object')
    try:
        check_value('the arguments', [args, kwargs])
        read = loads(dumps([args, kwargs]))  # the worker decodes them: an object with `__type__` may fail
    except Unstorable as exc:
        raise ParcelRefused(str(exc)) from exc
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as exc:
        raise ParcelRefused(f'the arguments cannot be read: {exc}'[:500]) from exc
    if not isinstance(read[1], dict):  # the whole object was a date, for example
        raise ParcelRefused('args must be a list and kwargs an object')
    options: dict[str, Any] = {'task_id': default_id if doc.get('id') is None else doc['id']}
    if options['task_id'] != default_id and not is_id(options['task_id']):
        raise ParcelRefused(f'id must be {ID}')
    if (queue := doc.get('queue')) is not None:
        if reason := accept.wrong_queue(queue):
            raise ParcelRefused(reason)
        options['queue'] = queue
    for name, option in (('date', 'eta'), ('expires', 'expires')):
        if (date := doc.get(name)) is not None:
            options[option] = _datetime(name, date)
    if (priority := doc.get('priority')) is not None:
        if not is_whole(priority, 0, HIGHEST):
            raise ParcelRefused(f'priority must be a whole number from 0 to {HIGHEST}')
        options['priority'] = priority
    if reason := accept.refusal(doc['task']):
        raise ParcelRefused(reason)
    return TaskCall(doc['task'], args, kwargs, options)


def message_of(doc: Mapping[str, Any], body: bytes | None) -> Document:
    """Return the message in a parcel, with its body as the publisher sent it; `body` is the attachment, if it has one.

    This is all that is checked between regions, which trust each other as workers of one database do: any task, queue
    and content type is accepted, but the parcel must be a message that workers can read.

    *Raises* `ParcelRefused` if the parcel is malformed.
    """
    if 'message' not in doc:
        raise ParcelRefused('it has no message')
    if reason := validation.malformed_reason({**doc, 'attempts': 0, 'date': None, 'claimed': None}):
        raise ParcelRefused(reason)
    message = doc['message']
    if body is None and message['body'] is None:
        raise ParcelRefused('its body is missing')
    if not is_task(message['headers']):
        raise ParcelRefused('its headers name no task, or no id')
    properties = {name: value for name, value in message['properties'].items() if name not in _OF_TRANSPORTS}
    try:
        check_names(exchange=doc.get('exchange'), routing_key=doc.get('routing_key'))
        check_value('the message', {**message, 'body': None})
        sent = decoded(message['body'] if body is None else body, message['properties'].get('body_encoding'))
    except (Unstorable, ValueError, TypeError) as exc:
        raise _unreadable(exc) from exc
    return {**message, 'body': sent, 'properties': properties}


def checked(doc: Mapping[str, Any], body: bytes | None, accept: Accept, content: Any) -> Document:
    """Return the message in a parcel of a publisher, with its body as it was sent; `body` as in `message_of`.

    `content` is the app's `accept_content`. *Raises* `ParcelRefused` if the message is malformed or not accepted.
    """
    message = message_of(doc, body)
    headers = message['headers']
    if JOB_KEY in headers:
        raise ParcelRefused('a unique job has to be published to the database of the broker')
    if not is_id(headers['id']):
        raise ParcelRefused(f'id must be {ID}')
    own = {name: value for name, value in headers.items() if name not in _REMOVED}
    for name, value in own.items():
        if reason := wrong_header(name, value):
            raise ParcelRefused(reason)
    if not (own.get('stamps') or {}).keys() <= {*(own.get(STAMPS) or ())}:  # Celery before 5.7 obeys the others, too
        raise ParcelRefused(f'the header stamps has names that are not in {STAMPS}')
    accepted = prepare_accept_content(set(content) - UNSAFE_CONTENT)
    if message.get('content-type') not in accepted:  # kombu also decodes `application/data`, whatever is accepted
        raise ParcelRefused(f'the content type {message.get("content-type")!r:.80} is not accepted')
    try:
        task_body = loaded(message, message['body'], accepted)
    except (DecodeError, Unstorable, ValueError, TypeError, AttributeError, LookupError, RecursionError) as exc:
        raise _unreadable(exc) from exc
    if reason := body_problem(task_body) or accept.refusal(headers['task'], task_body[2]):
        raise ParcelRefused(reason)
    properties = {name: value for name, value in message['properties'].items() if name in _PROPERTIES}
    return {**message, 'headers': own, 'properties': properties}


def _unreadable(exc: Exception) -> ParcelRefused:
    return ParcelRefused(f'its body or its headers cannot be read: {exc}'[:500])


def _datetime(name: str, date: Any) -> datetime:
    try:
        if isinstance(date, bool):
            raise TypeError
        return datetime.fromtimestamp(date, timezone.utc)
    except (TypeError, ValueError, OverflowError, OSError):
        raise ParcelRefused(f'{name} must be a number of seconds since 1970') from None


# -- what is accepted


class _Malformed(Exception):
    """A value is not a signature."""


class Accept:
    """The accepted tasks, as names or patterns, and the accepted queues, as names."""

    def __init__(self, tasks: Sequence[str], queues: Collection[str]) -> None:
        self._tasks, self._queues = tasks, queues

    def refusal(self, task: Any, embedded: Any = None) -> str | None:
        """Return one sentence that says why a task, or a task that follows it, is not accepted; None if all are.

        `embedded` is the third part of a task's body: callbacks, errbacks, chain and chord.
        """
        if not self._is_listed(task):
            return _not_listed(task)
        try:
            for signature in _signatures(embedded):
                if not signature.get('subtask_type') and not self._is_listed(signature.get('task')):
                    return _not_listed(signature.get('task'))
                options = signature.get('options') or {}
                if reason := _wrong_options(options):
                    return f'its callbacks, chain or chord are not accepted: {reason}'
                for destination in filter(None, map(options.get, _DESTINATIONS)):
                    if reason := self.wrong_queue(destination):
                        return reason
        except _Malformed:
            return 'its callbacks, chain or chord are not written as Celery writes them'
        return None

    def wrong_queue(self, queue: Any) -> str | None:
        """Return one sentence that says why a queue is not accepted; None if it is."""
        if isinstance(queue, str) and queue in self._queues:
            return None
        return f'queue {queue!r:.80} is not in task_queues of the app that moves parcels'

    def _is_listed(self, task: Any) -> bool:
        return bool(task) and is_line(task) and any(fnmatchcase(task, pattern) for pattern in self._tasks)


def is_id(value: Any) -> bool:
    """Tell whether a publisher may choose a task id: workers log it, and a result's document id contains it.

    The ids of tasks of parcels without an id begin with `parcel:`. Nobody may choose one: a task that ends first would
    store its result under the id.
    """
    return bool(value) and is_line(value) and not value.startswith(MESSAGE)


def wrong_header(name: Any, value: Any) -> str | None:
    """Return why a publisher may not set this header; None if it may. Those that are `RESERVED` are removed instead."""
    if name in _FORBIDDEN:
        return f'the header {name} is not for publishers'
    if name not in HEADERS:
        return None
    if name not in PRINTED and isinstance(value, str) and not is_line(value):
        return f'the header {name} must be {_LINE}'
    return type_problem(name, value) or (_wrong_stamps(value) if name in (STAMPS, 'stamps') else None)


def _wrong_options(options: dict[str, Any]) -> str | None:
    """Return what a publisher may not write into the options of a signature; None if nothing."""
    stamps = options.get(STAMPS)
    if reason := type_problem(STAMPS, stamps) or _wrong_stamps(stamps):
        return reason
    for name, value in options.items():
        if name in _LINKS or name in (stamps or ()):
            continue
        if name not in OPTIONS:
            return f'the option {name!r:.80} is not for publishers'
        if isinstance(value, str) and not is_line(value):
            return f'the option {name} must be {_LINE}'
        if reason := type_problem(name, value, OPTIONS):
            return reason
    if (own_id := options.get('task_id')) is not None and not is_id(own_id):
        return f'the option task_id must be {ID}'
    # These headers replace those that Celery writes, the name of the task, for example.
    for name in options.get('headers') or {}:
        if name in HEADERS or name in RESERVED or name in (*_FORBIDDEN, REGION_HEADER):
            return f'the header {name!r:.80} is not for publishers'
    return None


def _wrong_stamps(names: Iterable[str] | None) -> str | None:
    """Return which of these names a publisher may not give to a stamp; None if it may choose all of them."""
    for name in names or ():
        if name in _NOT_STAMPS or name in (REGION_HEADER, REGION_PROPERTY):
            return f'the stamp {name!r:.80} is not for publishers'
    return None


def _not_listed(task: Any) -> str:
    return f'task {task!r:.200} is not in parcels_accept'


def _signatures(embedded: Any) -> Iterator[dict[str, Any]]:
    """Yield all signatures at any depth; *raises* `_Malformed` for a value that is not a signature."""
    pending = _contained(embedded or {}, EMBEDDED)  # a list, because nesting must not exhaust Python's stack
    while pending:
        signature = pending.pop()
        if not isinstance(signature, dict) or not signature.keys() <= _MEMBERS:
            raise _Malformed
        args, kwargs, options = (signature.get(name) for name in ('args', 'kwargs', 'options'))
        if not all(map(isinstance, (args or [], kwargs or {}, options or {}), (list, dict, dict))):
            raise _Malformed
        yield signature
        pending += _contained(options or {}, _LINKS)
        if kind := signature.get('subtask_type'):
            task, names = _COMPOSITES.get(kind, (None, ())) if isinstance(kind, str) else (None, ())
            if task is None or signature.get('task') != task or args or not kwargs:
                raise _Malformed
            pending += _contained(kwargs, names)


def _contained(holder: dict[str, Any], names: Collection[str]) -> list[Any]:
    """Return the signatures in these members; Celery would take the keys of an object as names of tasks."""
    found = list[Any]()
    for name in names:
        if isinstance(value := holder.get(name), list) and name not in _SINGLE:
            found += value
        elif isinstance(value, dict) and name not in _SEVERAL:
            found.append(value)
        elif value is not None:
            raise _Malformed
    return found
