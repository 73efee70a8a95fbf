"""Messages that may be stored although their publisher got an error: published again, they get the same ids.

kombu retries a message with its properties, which contain its id. But Celery 5.7 makes a new message for each attempt
to publish the next step of a chain, and a program may do the same after an error. The first attempt may have been
stored, and the second one would be another message.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ..couchdb.fork_safety import Shared

__all__ = ['Republished']

#: The most messages that are remembered; the oldest are forgotten first.
_MAX_MESSAGES = 1000


class Republished:
    """The ids of messages of one database whose publishing has failed. Only tasks are remembered: they have ids."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, str] = OrderedDict()

    @classmethod
    def of(cls, url: str) -> Republished:
        """Return the object of this process for a database."""
        return _shared.of(url, cls)

    def note(self, message: Mapping[str, Any], exchange: str, routing_key: str, message_id: str) -> None:
        """Remember the id of a message whose publishing has failed."""
        if (key := _key(message, exchange, routing_key)) is not None:
            self._ids[key] = message_id
            while len(self._ids) > _MAX_MESSAGES:
                self._ids.popitem(last=False)

    def take(self, message: Mapping[str, Any], exchange: str, routing_key: str) -> str | None:
        """Return the id of an equal message whose publishing has failed, and forget it."""
        if not self._ids:
            return None
        key = _key(message, exchange, routing_key)
        return None if key is None else self._ids.pop(key, None)


def _key(message: Mapping[str, Any], exchange: str, routing_key: str) -> str | None:
    """Return what two attempts to publish one message have in common; None for a message without a task's id."""
    headers = message.get('headers') or {}
    if not headers.get('id'):
        return None
    body = message['body']
    content = [exchange, routing_key, str(headers['id']), str(headers.get('retries')), str(headers.get('eta'))]
    digest = hashlib.sha256(json.dumps(content).encode())
    digest.update(body if isinstance(body, bytes) else str(body).encode('utf-8', 'surrogatepass'))
    return digest.hexdigest()


_shared: Shared[str, Republished] = Shared({})
