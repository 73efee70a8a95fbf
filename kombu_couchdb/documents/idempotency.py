"""Idempotent publishing: a message has one id from its first publish on, so whoever repeats that stores it once.

Whoever publishes the message writes the same first revision. CouchDB ignores a revision that it has already stored,
even if the document was deleted since, and however late the request arrives: see `Client.create_once`.

* kombu repeats a publish without a response with the same properties. They have the message's id.
* Celery 5.7 makes a new message for each attempt to publish the next step of a chain, and a program may do the same
  after an error. A message with the same content as one whose publish has failed gets the id of that one.
* A process repeats the work of a killed one. Within `idempotent(key)` the id of a message is made of the key and of the
  id of its task, instead of the time.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, NamedTuple

from ..errors import ServerUnavailable
from . import workitem
from .ids import ONCE

#: The most messages that are remembered because their publish has failed; the oldest are forgotten first.
_MAX_FAILED = 1000


#: The name of the `Attempt` among the properties of a message that is being published.
_ATTEMPT = 'kombu_couchdb_attempt'


class Attempt(NamedTuple):
    """The publish of a message that has begun and not succeeded: whoever tries again publishes the same message."""

    id: str


class _Context(NamedTuple):
    key: str
    repeated: bool


_context: ContextVar[_Context | None] = ContextVar('kombu_couchdb_idempotent', default=None)

#: The ids of the tasks whose publish has failed in this process, by `_content`.
_failed: OrderedDict[str, str] = OrderedDict()


@contextmanager
def idempotent(key: str, *, repeated: bool = False) -> Iterator[None]:
    """Publish messages in this context under fixed ids; a message whose id was used before is not published again.

    `repeated` says that another process has begun the same work. The result backend then looks for what that process
    has stored (`is_repeated`).
    """
    token = _context.set(_Context(key, repeated))
    try:
        yield
    finally:
        _context.reset(token)


@contextmanager
def attempt(
    database: str, message: Mapping[str, Any], exchange: str, routing_key: str, now: float
) -> Iterator[dict[str, Any]]:
    """Give the message with its id as `delivery_tag`, while it is published in the database with this URL.

    The properties of `message` itself have an `Attempt` until it is published. After a success they have the id, too,
    and the next publish with them is another message.
    """
    properties = message['properties']
    found = _failed.pop(_content(database, message, exchange, routing_key), None) if _failed else None
    earlier = properties.pop(_ATTEMPT, None)
    if found is None and isinstance(earlier, Attempt):
        found = earlier.id
    tag = found or fixed_id(message) or workitem.new_id(now)
    try:
        yield {**message, 'properties': {**properties, 'delivery_tag': tag}}
    except BaseException as exc:
        properties[_ATTEMPT] = Attempt(tag)
        if isinstance(exc, ServerUnavailable) and (message.get('headers') or {}).get(
            'id'
        ):  # without it, an equal message may be another one
            _failed[_content(database, message, exchange, routing_key)] = tag
            while len(_failed) > _MAX_FAILED:
                _failed.popitem(last=False)
        raise
    properties['delivery_tag'] = tag


def _content(database: str, message: Mapping[str, Any], exchange: str, routing_key: str) -> str:
    """Return what the attempts to publish the message of a task have in common."""
    headers, body = message.get('headers') or {}, message['body']
    known = [database, exchange, routing_key, *(str(headers.get(name)) for name in ('id', 'retries', 'eta'))]
    digest = sha256(json.dumps(known).encode())
    digest.update(body if isinstance(body, bytes) else str(body).encode('utf-8', 'surrogatepass'))
    return digest.hexdigest()


def fixed_id(message: Mapping[str, Any]) -> str | None:
    """Return the id of a message in this context; None outside of `idempotent`, or if it has no task id."""
    context = _context.get()
    # Celery's message protocol 1 has no headers.
    task_id = (message.get('headers') or {}).get('id') or (message.get('properties') or {}).get('correlation_id')
    if context is None or not isinstance(task_id, str):
        return None
    return ONCE + sha256(f'{context.key}\0{task_id}'.encode()).hexdigest()[:32]


def copy_id(tag: str, queue: str) -> str:
    """Return the id of the copy of a message for one queue of an exchange.

    It depends only on the delivery tag and the queue. So a publisher that repeats a request without a response stores
    each copy once, even if queues were bound or unbound in the meantime.
    """
    return f'{tag}-{sha256(queue.encode()).hexdigest()[:12]}'


def is_repeated() -> bool:
    """Tell whether another process has begun the work of this context."""
    context = _context.get()
    return context is not None and context.repeated
