"""Queue documents: the limits and the lifetime of a queue, and whether it is temporary or internal.

A queue is *temporary* if it has a lifetime: it is deleted when it was unused for so long. It is *internal* if it is
Celery's own, for replies, events or remote control: it is deleted with its last consumer, and `x-expires` says when in
any case.

Limits come from the arguments of a queue, with RabbitMQ's meanings:

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
from .ids import QUEUE
from .shared_documents import Queue

#: If a later declaration has one of these arguments, its arguments are merged into those of the stored queue. The first
#: three are limits; `x-expires` is a lifetime.
LIMITS = ('x-message-ttl', 'x-max-length', 'x-delivery-limit', 'x-expires')

#: The lifetime of a queue that is deleted with its last consumer: it applies if that consumer could not delete it.
_AUTO_DELETE_SECONDS = 3600.0


class Limit(NamedTuple):
    """The limits of one queue; None means no limit."""

    ttl: float | None = None  #: seconds
    length: int | None = None  #: ready messages
    deliveries: int | None = None


NO_LIMIT = Limit()


def new(name: str, arguments: Mapping[str, Any], auto_delete: bool, now: float) -> Queue:
    """Return the document of a queue that is declared at the server's time `now`.

    *Raises* `ConfigurationError` if a limit or lifetime is not a number from 0 on.
    """
    for argument in LIMITS:
        if arguments.get(argument) is not None and _number(arguments[argument]) is None:
            raise ConfigurationError(
                f'queue {name!r}: the argument {argument} must be a number from 0 on, not {arguments[argument]!r}'
            )
    expires = arguments.get('x-expires')
    lifetime = expires / 1000 if is_number(expires) and expires > 0 else _AUTO_DELETE_SECONDS if auto_delete else None
    return {
        '_id': QUEUE + name,
        'type': 'Queue',
        'name': name,
        'arguments': dict(arguments),
        'auto_delete': auto_delete,
        'lifetime': lifetime,
        'expires': now + lifetime if lifetime else None,
    }


def arguments_of(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments in a Queue document; {} if they are malformed."""
    arguments = doc.get('arguments')
    return arguments if isinstance(arguments, dict) else {}


def limit_of(doc: Mapping[str, Any]) -> Limit:
    """Return the limits in a Queue document; a value that is not a number of at least 0 is ignored."""
    arguments = arguments_of(doc)
    ttl, length, deliveries = (_number(arguments.get(name)) for name in LIMITS[:3])
    return Limit(
        None if ttl is None else ttl / 1000,
        None if length is None else int(length),
        None if deliveries is None else int(deliveries),
    )


def lifetime_of(doc: Mapping[str, Any]) -> float:
    """Return the lifetime in a Queue document in seconds; 0 if it has none or a malformed one."""
    return float(_number(doc.get('lifetime')) or 0.0)


def is_internal(doc: Mapping[str, Any]) -> bool:
    """Tell whether a Queue document is that of a queue for replies, events or remote control."""
    return bool(doc.get('auto_delete')) and 'x-expires' in arguments_of(doc)


def _number(value: Any) -> float | None:
    return value if is_number(value) and value >= 0 else None
