"""Every transport option, once: its name, default, unit and meaning."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from .errors import ConfigurationError

__all__ = ['Options', 'checked', 'count', 'credentials', 'option', 'seconds', 'switch', 'text', 'texts', 'word']

#: What makes of a value that was given the one that is used; *raises* `ConfigurationError` with the option's name.
Check = Callable[[str, Any], Any]

#: Options that kombu itself reads from the same dictionary (`Connection._extract_failover_opts` and the virtual channel).
_KOMBU = frozenset(
    {
        'max_retries',
        'interval_start',
        'interval_step',
        'interval_max',
        'connect_retries_timeout',
        'errback',
        'callback',
        'deadletter_queue',
    }
)

#: Above that Python cannot wait.
_MOST = 1e9


# -- kinds of options: each returns a field of a dataclass


def option(check: Check, default: Any = MISSING, **how: Any) -> Any:
    """Return an option that is checked by a function."""
    return field(default=default, metadata={'check': check}, **how)


def seconds(default: float) -> Any:
    """Return an option that is a duration, above 0."""
    return option(lambda name, value: float(_number(name, value, 'a number of seconds', (int, float))), default)


def count(default: int, *, may_be_zero: bool = False) -> Any:
    """Return an option that is a whole number above 0, or from 0 on, where 0 is without limit."""
    return option(lambda name, value: _number(name, value, 'a whole number', int, may_be_zero), default)


def switch(default: bool) -> Any:
    """Return an option that is True or False."""

    def check(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ConfigurationError(f'transport option {name} must be True or False, not {value!r:.80}')
        return value

    return option(check, default)


def word(*known: str) -> Any:
    """Return an option that is one of these words, or not given: None."""

    def check(name: str, value: Any) -> Any:
        if value not in known:
            raise ConfigurationError(f'transport option {name} must be one of {", ".join(known)}')
        return value

    return option(check, None)


def text() -> Any:
    """Return an option that is text, or not given: None."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f'transport option {name} must be text, not {value!r:.80}')
        return value

    return option(check, None)


def texts() -> Any:
    """Return an option that is a list of texts, by default an empty one."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise ConfigurationError(f'transport option {name} must be a list of texts, not {value!r:.80}')
        return tuple(value)

    return option(check, ())


def credentials() -> Any:
    """Return an option that names a source of user and password, or is not given: None."""

    def check(name: str, value: Any) -> str:
        # A function itself could not be told in `inspect stats`, nor the value here: a password may stand there.
        if not isinstance(value, str) or not value:
            raise ConfigurationError(
                f'transport option {name} must be "environment" or the dotted path of a function, as text, '
                f'such as "shop.secrets:couchdb"'
            )
        return value

    return option(check, None)


def _number(name: str, value: Any, kind: str, accepted: Any, may_be_zero: bool = False) -> Any:
    if (
        isinstance(value, bool)
        or not isinstance(value, accepted)
        or not 0 <= value <= _MOST
        or (value == 0 and not may_be_zero)
    ):
        least = 'from 0 on' if may_be_zero else 'above 0'
        raise ConfigurationError(
            f'transport option {name} must be {kind} {least}, not {value!r:.80}; the most is {_MOST:.0f}'
        )
    return value


@dataclass(frozen=True)
class Options:
    """The value of `broker_transport_options`, checked. Durations are seconds."""

    #: How long a consumer may stay silent before its messages are given to others. Its heartbeat, one write
    #: for all it holds, is sent every third of this.
    visibility_timeout: float = seconds(60.0)
    #: How long one HTTP request may take to be answered once it was sent, from the first byte to the last; a large one has a
    #: second more for each 100 kB of it and of its answer. Less than `visibility_timeout`; by default at most a third of it.
    request_timeout: float = seconds(8.0)
    #: How long the TCP and TLS handshakes may take, and sending 16 kB of a request; with the same bounds.
    connect_timeout: float = seconds(4.0)
    #: The floor below the push of `_changes`: the queues are read this often even if nothing is announced.
    polling_interval: float = seconds(300.0)
    #: How many waiting messages are read ahead from the view in one request.
    read_ahead: int = count(1024)
    #: The most messages claimed in one request.
    claim_batch: int = count(128)
    #: The most messages claimed ahead for a consumer without a prefetch limit. It begins with one, and the number doubles when
    #: the consumer finds nothing left.
    unlimited_prefetch: int = count(256)
    #: How long a broadcast is kept for listeners that were cut off.
    fanout_retention: float = seconds(60.0)
    #: How often a message is delivered before it is set aside as a dead letter; 0 is without limit. (20 as in RabbitMQ's
    #: quorum queues, documentation of release 4.)
    delivery_limit: int = count(20, may_be_zero=True)
    #: Create the database and its design document when they are missing and the user may.
    create_database: bool = switch(True)
    #: Where user and password come from, instead of the URL: 'environment', or the dotted path of a function that returns both.
    #: It is asked at first, and again when they are refused.
    credentials: str | None = credentials()
    #: How they are sent: 'basic', with each request, or 'cookie', once for a session. None is 'cookie' with `credentials`, else
    #: 'basic'.
    auth: str | None = word('basic', 'cookie')
    #: The database of parcels, on the same server, from which workers move tasks into the broker's database; None is without.
    parcels: str | None = text()
    #: The tasks that may come from there: names, or patterns such as `shop.*`.
    parcels_accept: Sequence[str] = texts()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the options in `given`; *raises* `ConfigurationError` that names an unknown or ill-typed one.

        So it does for a request that may hang as long as the lease lasts: its consumer would lose all it holds each time.
        """
        options = checked(cls, given, ignored=_KOMBU)
        lease = options.get('visibility_timeout', cls.visibility_timeout)
        for name in ('request_timeout', 'connect_timeout'):
            # With a third, the pause between two heartbeats, the next one after a request that hung is in time.
            if options.setdefault(name, min(getattr(cls, name), lease / 3)) >= lease:
                raise ConfigurationError(
                    f'transport option {name} ({options[name]:g} s) must be less than visibility_timeout '
                    f'({lease:g} s): while a request hangs no heartbeat is sent'
                )
        return cls(**options)


def checked(options: Any, given: Mapping[str, Any], ignored: Container[str] = ()) -> dict[str, Any]:
    """Return what is `given` of the options that are fields of a dataclass, each as its own check has it.

    *Raises* `ConfigurationError` that names an option whose value is wrong, or one that is neither known nor `ignored`.
    """
    checks: dict[str, Check] = {one.name: one.metadata['check'] for one in fields(options)}
    unknown = sorted(name for name in given if name not in checks and name not in ignored)
    if unknown:
        raise ConfigurationError(
            f'unknown transport option {unknown[0]!r:.80} for couchdb://; known are: {", ".join(sorted(checks))}'
        )
    return {name: check(name, given[name]) for name, check in checks.items() if name in given}
