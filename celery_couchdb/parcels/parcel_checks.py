"""Validation of parcels before they are moved.

A parcel contains either a Celery message (`checked`), or, if a program wrote it without Celery, a call (`call_in`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple

from kombu.exceptions import DecodeError
from kombu.serialization import prepare_accept_content

from kombu_couchdb.documents import validation
from kombu_couchdb.documents.body import decoded, loaded
from kombu_couchdb.documents.ids import JOB_KEY
from kombu_couchdb.documents.task_message import HIGHEST, body_flaw, is_task
from kombu_couchdb.documents.validation import check_names, check_value
from kombu_couchdb.errors import Unstorable
from kombu_couchdb.parcels import parcel
from kombu_couchdb.values import is_whole

from .accept import ID, RESERVED, Accept, is_id, wrong_header

Document = dict[str, Any]

#: The properties that a publisher may set. The others belong to transports and remote control, and are removed.
_PROPERTIES = ('body_encoding', 'correlation_id', 'delivery_mode', 'expiration', 'priority')

#: Headers that are removed: the task's own time limits and number of retries hold.
_REMOVED = (*RESERVED, 'timelimit', 'retries')

#: Content types that are never accepted: decoding pickle runs code of the publisher, and 400 bytes of YAML with merge
#: keys take minutes.
UNSAFE_CONTENT = frozenset({'application/x-python-serialize', 'pickle', 'application/x-yaml', 'yaml'})

#: The maximum length of the id of a document that has a call.
_MAX_ID_CHARACTERS = 255


class ParcelRefused(Exception):
    """A parcel is not moved; the text says why. The mover writes the text into the parcel and does not retry."""


class Call(NamedTuple):
    """A call of a task that a program wrote without Celery."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    #: Other keyword arguments of Celery's `send_task`.
    options: dict[str, Any]


def call_in(doc: Mapping[str, Any], accept: Accept) -> Call:
    """Return the call in a parcel without a message; *raises* `ParcelRefused` if it is malformed or not accepted.

    Without an id in the parcel, the task's id is that of its message, so that it is the same in each try.
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
    except Unstorable as exc:
        raise ParcelRefused(str(exc)) from exc
    default_id = parcel.moved_id(doc['_id'])
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
    return Call(doc['task'], args, kwargs, options)


def checked(doc: Mapping[str, Any], body: bytes | None, accept: Accept, content: Any) -> Document:
    """Return the message in a parcel, with its body as the publisher sent it.

    `body` is the attachment, or None if the parcel has none; `content` is the app's `accept_content`. *Raises*
    `ParcelRefused` if the message is malformed or not accepted.
    """
    if reason := validation.flaw({**doc, 'attempts': 0, 'date': None, 'claimed': None}):
        raise ParcelRefused(reason)
    message, headers = doc['message'], doc['message']['headers']
    properties = {name: message['properties'][name] for name in _PROPERTIES if name in message['properties']}
    if JOB_KEY in headers:
        raise ParcelRefused('a unique job has to be published to the database of the broker')
    if not is_task(headers):
        raise ParcelRefused('its headers name no task, or no id')
    if not is_id(headers['id']):
        raise ParcelRefused(f'id must be {ID}')
    own = {name: value for name, value in headers.items() if name not in _REMOVED}
    for name, value in own.items():
        if reason := wrong_header(name, value):
            raise ParcelRefused(reason)
    accepted = prepare_accept_content(set(content) - UNSAFE_CONTENT)
    if message.get('content-type') not in accepted:  # kombu also decodes `application/data`, whatever is accepted
        raise ParcelRefused(f'the content type {message.get("content-type")!r:.80} is not accepted')
    try:
        check_names(exchange=doc.get('exchange'), routing_key=doc.get('routing_key'))
        check_value('the message', {**message, 'body': None})
        sent = decoded(message['body'] if body is None else body, properties.pop('body_encoding', None))
        task_body = loaded(message, sent, accepted)
    except (
        DecodeError,
        Unstorable,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        LookupError,
        RecursionError,
    ) as exc:
        raise ParcelRefused(f'its body or its headers cannot be read: {exc}'[:500]) from exc
    if reason := body_flaw(task_body) or accept.refusal(headers['task'], task_body[2]):
        raise ParcelRefused(reason)
    return {**message, 'body': sent, 'headers': own, 'properties': properties}


def _datetime(name: str, date: Any) -> datetime:
    try:
        if isinstance(date, bool):
            raise TypeError
        return datetime.fromtimestamp(date, timezone.utc)
    except (TypeError, ValueError, OverflowError, OSError):
        raise ParcelRefused(f'{name} must be a number of seconds since 1970') from None
