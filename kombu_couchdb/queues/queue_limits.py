"""Limits from the arguments of a queue, with RabbitMQ's meanings: message TTL, length, deliveries.

* `x-message-ttl` (milliseconds): a message is dropped when it has been ready for this long;
* `x-max-length`: if a queue has more ready messages than this, the first ones are dropped;
* `x-delivery-limit`: after this many deliveries a message becomes a dead letter. It overrides the transport option.

A publisher that knows the limits of a queue drops the messages over its length. Consumers drop messages that are too
old instead of delivering them. The sweep drops the rest. A queue without limits costs no request and no write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from ..values import is_number

#: If a later declaration has one of these arguments, its arguments are merged into those of the stored queue. The first
#: three are limits; `x-expires` is a lifetime.
LIMITS = ('x-message-ttl', 'x-max-length', 'x-delivery-limit', 'x-expires')


class Limit(NamedTuple):
    """The limits of one queue; None means no limit."""

    ttl: float | None = None  #: seconds
    length: int | None = None  #: ready messages
    deliveries: int | None = None


class Limits:
    """The limits of the queues of one database, as far as this process knows them; its connections share them."""

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


def check_limits(queue: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` if a limit in the arguments of a queue is not a number of at least 0."""
    for name in LIMITS[:3]:
        if arguments.get(name) is not None and _number(arguments[name]) is None:
            raise ConfigurationError(
                f'queue {queue!r}: the argument {name} must be a number from 0 on, not {arguments[name]!r}'
            )


def limit_in(doc: Mapping[str, Any]) -> Limit:
    """Return the limits in a Queue document; a value that is not a number of at least 0 is ignored."""
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
    return value if is_number(value) and value >= 0 else None
