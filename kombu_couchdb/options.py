"""Every transport option, once: its name, default, unit and meaning."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigurationError

__all__ = ['Options', 'checked']

#: Options that kombu itself reads from the same dictionary (`Connection._extract_failover_opts` and the virtual channel).
_KOMBU = frozenset({
    'max_retries', 'interval_start', 'interval_step', 'interval_max', 'connect_retries_timeout',
    'errback', 'callback', 'deadletter_queue',
})


#: Where one of some words is expected.
_WORDS = {'auth': ('basic', 'cookie')}

#: Where 0 means without.
_MAY_BE_ZERO = frozenset({'delivery_limit'})


#: Above that Python cannot wait.
_MOST = 1e9


@dataclass(frozen=True)
class Options:
    """The value of `broker_transport_options`, checked. Durations are seconds."""

    #: How long a consumer may stay silent before its messages are given to others. Its heartbeat, one write
    #: for all it holds, is sent every third of this.
    visibility_timeout: float = 60.0
    #: How long one HTTP request may take to be answered once it was sent, from the first byte to the last; a large one has a
    #: second more for each 100 kB of it and of its answer. Less than `visibility_timeout`; by default at most a third of it.
    request_timeout: float = 8.0
    #: How long the TCP and TLS handshakes may take, and sending 16 kB of a request; with the same bounds.
    connect_timeout: float = 4.0
    #: The floor below the push of `_changes`: the queues are read this often even if nothing is announced.
    polling_interval: float = 300.0
    #: How many waiting messages are read ahead from the view in one request.
    read_ahead: int = 1024
    #: The most messages claimed in one request.
    claim_batch: int = 128
    #: The most messages claimed ahead for a consumer without a prefetch limit. It begins with one, and the number doubles when
    #: the consumer finds nothing left.
    unlimited_prefetch: int = 256
    #: How long a broadcast is kept for listeners that were cut off.
    fanout_retention: float = 60.0
    #: How often a message is delivered before it is set aside as a dead letter; 0 is without limit. (20 as in RabbitMQ's
    #: quorum queues, documentation of release 4.)
    delivery_limit: int = 20
    #: Create the database and its design document when they are missing and the user may.
    create_database: bool = True
    #: Where user and password come from, instead of the URL: 'environment', or the dotted path of a function that returns both.
    #: It is asked at first, and again when they are refused.
    credentials: str | None = None
    #: How they are sent: 'basic', with each request, or 'cookie', once for a session. None is 'cookie' with `credentials`, else
    #: 'basic'.
    auth: str | None = None
    #: The database of parcels, on the same server, from which workers move tasks into the broker's database; None is without.
    parcels: str | None = None
    #: The tasks that may come from there: names, or patterns such as `shop.*`.
    parcels_accept: Sequence[str] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the options in `given`; *raises* `ConfigurationError` that names an unknown or ill-typed one.

        So it does for a request that may hang as long as the lease lasts: its consumer would lose all it holds each time.
        """
        options = checked({f.name: f.default for f in fields(cls)}, given, ignored=_KOMBU)
        lease = options.get('visibility_timeout', cls.visibility_timeout)
        for name in ('request_timeout', 'connect_timeout'):
            # With a third, the pause between two heartbeats, the next one after a request that hung is in time.
            if options.setdefault(name, min(getattr(cls, name), lease / 3)) >= lease:
                raise ConfigurationError(f'transport option {name} ({options[name]:g} s) must be less than visibility_timeout '
                                         f'({lease:g} s): while a request hangs no heartbeat is sent')
        return cls(**options)


def checked(known: Mapping[str, Any], given: Mapping[str, Any], ignored: Container[str] = ()) -> dict[str, Any]:
    """Return what is `given` of the `known` options, each of the type of its default.

    *Raises* `ConfigurationError` that names an ill-typed one, or one that is neither known nor `ignored`.
    """
    unknown = sorted(name for name in given if name not in known and name not in ignored)
    if unknown:
        raise ConfigurationError(
            f'unknown transport option {unknown[0]!r:.80} for couchdb://; known are: {", ".join(sorted(known))}')
    return {name: _checked(name, given[name], default) for name, default in known.items() if name in given}


def _checked(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigurationError(f'transport option {name} must be True or False, not {value!r:.80}')
        return value
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise ConfigurationError(f'transport option {name} must be one of {", ".join(_WORDS[name])}')
        return value
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise ConfigurationError(f'transport option {name} must be a list of text, not {value!r:.80}')
        return tuple(value)
    if default is None:
        # A function itself could not be told in `inspect stats`, nor the value here: a password may stand there.
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f'transport option {name} must be "environment" or the dotted path of a function, as text, '
                                     f'such as "shop.secrets:couchdb"')
        return value
    kind = 'a whole number' if isinstance(default, int) else 'a number of seconds'
    accepted = int if isinstance(default, int) else (int, float)
    least = 'from 0 on' if name in _MAY_BE_ZERO else 'above 0'
    if isinstance(value, bool) or not isinstance(value, accepted) or not 0 <= value <= _MOST \
            or (value == 0 and name not in _MAY_BE_ZERO):
        raise ConfigurationError(f'transport option {name} must be {kind} {least}, not {value!r:.80}; the most is {_MOST:.0f}')
    return type(default)(value)
