"""Limits from a queue's arguments, with RabbitMQ's meanings: message TTL, length, deliveries.

* `x-message-ttl` (milliseconds): a message that has waited for so long, from when it was due, is dropped;
* `x-max-length`: of more ready messages than this those first in line are dropped;
* `x-delivery-limit`: how often a message is delivered before it is a dead letter, instead of the transport option.

A publisher that declared a queue keeps it within its length; consumers deliver nothing that is too old; and their sweep drops
what neither met. A queue without limits costs no request and no write.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..couchdb.fork_safety import Shared
from ..errors import ConfigurationError

__all__ = ['LIMITS', 'Limit', 'Limits', 'check_limits', 'limit_in', 'limits_of']

#: The arguments that can be declared anew with another value.
LIMITS = ('x-message-ttl', 'x-max-length', 'x-delivery-limit', 'x-expires')


class Limit(NamedTuple):
    """The limits of one queue; None is no limit."""

    #: Seconds.
    ttl: float | None = None
    length: int | None = None
    deliveries: int | None = None


class Limits:
    """The limits of the queues of one database, as far as this process knows; shared by its connections."""

    def __init__(self) -> None:
        self._queues: dict[str, Limit] = {}

    def seen(self, doc: Mapping[str, Any]) -> None:
        """Take in a Queue document."""
        if (limit := limit_in(doc)) != _NONE:
            self._queues[str(doc.get('name'))] = limit
        else:
            self._queues.pop(str(doc.get('name')), None)

    def of(self, queue: str) -> Limit:
        """Return the limits of a queue."""
        return self._queues.get(queue, _NONE)


_NONE = Limit()
_known: Shared[tuple[int, str], Limits] = Shared({})


def limits_of(url: str) -> Limits:
    """Return this process's knowledge of the database at `url`."""
    return _known.of((os.getpid(), url), Limits)


def check_limits(queue: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` if an argument of a queue that limits it is no number from 0 on."""
    for name in LIMITS[:3]:
        if arguments.get(name) is not None and _number(arguments[name]) is None:
            raise ConfigurationError(
                f'queue {queue!r}: the argument {name} must be a number from 0 on, not {arguments[name]!r}'
            )


def limit_in(doc: Mapping[str, Any]) -> Limit:
    """Return the limits that a Queue document has; what is no number from 0 on is none."""
    arguments = doc.get('arguments')
    ttl, length, deliveries = (
        _number(arguments.get(name)) if isinstance(arguments, dict) else None for name in LIMITS[:3]
    )
    return Limit(
        None if ttl is None else ttl / 1000,
        None if length is None else int(length),
        None if deliveries is None else int(deliveries),
    )


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf else None
