"""Transport options: names, defaults, units and checks.

The functions that return fields (`seconds`, `count`, `switch`, …) are also used for the options of the result backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from .couchdb.address import SECRETS
from .couchdb.call import HTTPOptions
from .errors import ConfigurationError
from .rooms import rooms
from .values import MAX_NUMBER, storable

#: Called with an option's name and the given value; returns the value to use, or raises `ConfigurationError`.
Check = Callable[[str, Any], Any]

#: Options that kombu reads from the same dictionary (in `Connection._extract_failover_opts` and the virtual channel).
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

#: Celery's setting with the options. A program without Celery gives them to its connection, as `transport_options`.
_SETTING = 'broker_transport_options'

#: How often a consumer writes a heartbeat during its lease: one may be late without the loss of the lease. All that
#: follows from it is computed, here and in `leases.lease`.
HEARTBEATS_PER_LEASE = 3

#: How alike an unknown name and a known one must be so that the error suggests the latter: from 0, not at all, to 1.
#: With less, `connect_timeout` would be suggested for `socket_timeout` of Redis, which is `request_timeout` here.
_LIKENESS = 0.8

#: The most characters of an error about all options.
_MAX_ERROR_CHARACTERS = 480


def heartbeat_interval(lease: float) -> float:
    """Return the seconds between two heartbeats of a consumer whose lease lasts for so many seconds."""
    return lease / HEARTBEATS_PER_LEASE


# -- kinds of options: each function returns a field for a dataclass


def option(check: Check, default: Any = MISSING, **field_arguments: Any) -> Any:
    """Return a field whose value the function `check` checks; `field_arguments` are those of `dataclasses.field`."""
    return field(default=default, metadata={'check': check}, **field_arguments)


def seconds(default: float, *, may_be_zero: bool = False) -> Any:
    """Return a field for a duration in seconds, above 0; with `may_be_zero` also 0."""
    return _field(*_number('a number of seconds', (int, float), may_be_zero), default, float)


def count(default: int, *, may_be_zero: bool = False) -> Any:
    """Return a field for a whole number above 0; with `may_be_zero` also 0, which means no limit."""
    return _field(*_number('a whole number', int, may_be_zero), default)


def _number(kind: str, types: Any, may_be_zero: bool) -> tuple[str, Callable[[Any], bool]]:
    """Return the words for numbers up to `MAX_NUMBER`, and what tells them from other values."""

    def accepts(value: Any) -> bool:
        is_number = isinstance(value, types) and not isinstance(value, bool)
        return is_number and 0 <= value <= MAX_NUMBER and (value != 0 or may_be_zero)

    return f'{kind} {"from 0 on" if may_be_zero else "above 0"}, at most {MAX_NUMBER:,}', accepts


def _field(
    words: str,
    accepts: Callable[[Any], bool],
    default: Any,
    convert: Callable[[Any], Any] = lambda value: value,
    *,
    is_secret: bool = False,
) -> Any:
    """Return a field for the values that `accepts` accepts; `words` say which these are.

    The error does not quote a value that may be, or contain, a password (`is_secret`).
    """

    def check(name: str, value: Any) -> Any:
        if not accepts(value):
            shown = '' if is_secret else f', not {value!r:.80}'
            raise ConfigurationError(f'transport option {name} must be {words}{shown}')
        return convert(value)

    return option(check, default)


def switch(default: bool) -> Any:
    """Return a field for True or False."""
    return _field('True or False', lambda value: isinstance(value, bool), default)


def of_room(name: str, **field_arguments: Any) -> Any:
    """Return a field whose value an optional room checks; None by default."""

    def checked(option_name: str, value: Any) -> Any:
        for room in rooms():
            if option_name in room.options:
                return room.check(option_name, value)
        raise ConfigurationError(f'transport option {option_name} needs the package kombu_couchdb.contrib.{name}')

    return option(checked, None, **field_arguments)


def word(*known: str) -> Any:
    """Return a field for one of the words in `known`; None by default."""
    return _field(f'one of {", ".join(known)}', lambda value: value in known, None)


def text() -> Any:
    """Return a field for text that is not empty; None by default."""
    return _field('text', lambda value: isinstance(value, str) and bool(value), None)


def texts() -> Any:
    """Return a field for a list of texts; empty by default."""

    def accepts(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)

    return _field('a list of texts', accepts, (), tuple)


def credentials() -> Any:
    """Return a field for a source of user and password; None by default."""
    # A dotted path, because `inspect stats` could not show a function. The value may be a password.
    return _field(
        '"environment", "file:" with a path, or the dotted path of a function, as text, such as "shop.secrets:couchdb"',
        lambda value: isinstance(value, str) and bool(value),
        None,
        is_secret=True,
    )


def token_url() -> Any:
    """Return a field for the URL of a server of tokens; None by default."""
    return _field(
        'a URL https://host/path, without user and password',
        lambda value: isinstance(value, str) and bool(re.fullmatch(r'https?://[^/?#@\s]+(/[^?#\s]*)?', value)),
        None,
        is_secret=True,
    )


#: The options about the login, which `couchdb.address.Address` has, too.
LOGIN_OPTIONS = ('credentials', 'auth', 'token_url', 'proxy_roles')


def login_options(options: Any) -> dict[str, Any]:
    """Return the options about the login; `options` is a dataclass that has them."""
    return {name: getattr(options, name) for name in LOGIN_OPTIONS}


@dataclass(frozen=True)
class Options:
    """The values of `broker_transport_options`, checked. Durations are seconds."""

    #: The lease: how long a consumer may send no heartbeat before its unacknowledged messages go to other consumers.
    #: It sends a heartbeat, one write for all its messages, every third of this time.
    visibility_timeout: float = seconds(60.0)
    #: How long an HTTP request may take, from the last byte sent to the last byte of the response. Large requests and
    #: responses get one second more for each 100 kB. It must be less than `visibility_timeout`, and is by default at
    #: most a third of it.
    request_timeout: float = seconds(HTTPOptions.request_timeout)
    #: How long the TCP handshake, the TLS handshake and sending 16 kB of a request may take. The same bounds apply.
    connect_timeout: float = seconds(HTTPOptions.connect_timeout)
    #: How often the queues are read if the `_changes` feed announces nothing.
    polling_interval: float = seconds(300.0)
    #: The maximum number of waiting messages that one request reads from the view.
    read_ahead: int = count(1024)
    #: The maximum number of messages that one request claims.
    claim_batch: int = count(128)
    #: The maximum number of messages claimed ahead for a consumer without a prefetch limit. The number starts at 1 and
    #: doubles each time the consumer has worked off its messages.
    unlimited_prefetch: int = count(256)
    #: How long a broadcast is kept for receivers that were disconnected.
    fanout_retention: float = seconds(60.0)
    #: How often a message is delivered before it becomes a dead letter; 0 means no limit. (20 is the default of
    #: RabbitMQ's quorum queues, see the documentation of release 4.)
    delivery_limit: int = count(20, may_be_zero=True)
    #: How long completed messages of tasks are kept as documents with the status `done`; 0: they are deleted at once.
    #: An attribute `keep_done` of a task, or an argument of `apply_async`, overrides it.
    keep_done: float = seconds(0.0, may_be_zero=True)
    #: How long the messages of tasks that failed for good are kept, as dead letters; 0: they are not kept.
    keep_failed: float = seconds(7 * 86_400.0, may_be_zero=True)
    #: Let each task of a worker that is acknowledged early begin only after its acknowledgement is stored.
    confirm_acks: bool = switch(False)
    #: Create the database and its design documents if they are missing and the user has the right.
    create_database: bool = switch(True)
    #: The source of user and password if they are not in the URL: 'environment', 'file:' with a path, or the dotted
    #: path of a function that returns both. It is read at the start, after a refusal, and before a token ends.
    credentials: str | None = credentials()
    #: What the password is, and how it is sent: 'basic' with each request, 'cookie' once for a session, 'jwt' for a
    #: token, 'iam' for an API key that is exchanged for tokens, 'proxy' for the token of a proxy. The default, None,
    #: means 'cookie' if `credentials` is set, and 'basic' otherwise.
    auth: str | None = word(*SECRETS)
    #: With `auth` 'iam', the server that exchanges API keys for tokens. None means that of IBM Cloud.
    token_url: str | None = token_url()
    #: With `auth` 'proxy', the roles of the user.
    proxy_roles: Sequence[str] = texts()
    #: The database of parcels, on the same server, from which workers move tasks into the broker's database. None
    #: means that there is no such database.
    parcels: str | None = text()
    #: The tasks that parcels may contain: names, or patterns such as `shop.*`.
    parcels_accept: Sequence[str] = texts()
    #: How long the receipts of parcels that were written without Celery are kept after the task has ended, or, while it
    #: has not, after it was moved; 0: such parcels are deleted when they are moved.
    receipts_retention: float = seconds(7 * 86_400.0, may_be_zero=True)
    #: The name of the region of this app, if regions work for each other. It must be one of `regions`.
    region: str | None = of_room('regions')
    #: All regions, this one too: for each name the URL of the region's database of regions, as other regions reach it.
    #: Of the own URL, only the name of the database is used: it is on the server of the broker.
    regions: Mapping[str, str] | None = of_room('regions', repr=False)
    #: How long a task with the region `any` waits at home before it may be lent to a region that has nothing to do.
    lend_after: float = seconds(1.0)
    #: Keep the numbers of tasks and queues of the last day, minute by minute. One of the workers does that.
    task_history: bool = switch(True)
    #: The name of the schedule that `celery beat -S couchdb` runs. Apps that share a database need different ones.
    schedule_name: str | None = text()

    @property
    def http(self) -> HTTPOptions:
        """How requests are sent."""
        return HTTPOptions(self.request_timeout, self.connect_timeout)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the options in the dictionary `given`, with defaults for the others.

        *Raises* `ConfigurationError` for an unknown option or a wrong value, for a region that is not in `regions`, and
        for a timeout that is not less than `visibility_timeout`: a request that hangs so long would cost the consumer
        its lease and all its messages.
        """
        options = checked(cls, given, _SETTING, ignored=_KOMBU)
        lease = options.get('visibility_timeout', cls.visibility_timeout)
        for name in ('request_timeout', 'connect_timeout'):
            # A third of the lease is the pause between heartbeats: after a request that hung, the next one is in time.
            if options.setdefault(name, min(getattr(cls, name), heartbeat_interval(lease))) >= lease:
                raise ConfigurationError(
                    f'{_SETTING}: transport option {name} ({options[name]:g} s) must be less than visibility_timeout '
                    f'({lease:g} s): while a request hangs no heartbeat is sent'
                )
        if (options.get('region') is None) != (options.get('regions') is None):
            raise ConfigurationError(
                f'{_SETTING}: transport options region and regions need each other: set both, or none'
            )
        if options.get('region') not in options.get('regions', (None,)):
            raise ConfigurationError(
                f'{_SETTING}: transport option regions has no URL for region {options["region"]!r}'
            )
        return cls(**options)


def checked(
    options: Any, given: Mapping[str, Any], setting: str, ignored: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Return the checked values of the `given` options; `options` is the dataclass with a field for each option.

    Names in `ignored` are skipped. *Raises* `ConfigurationError`, which names the `setting` that has the options, and
    all unknown options and wrong values in it.
    """
    checks: dict[str, Check] = {item.name: item.metadata['check'] for item in fields(options)}
    flaws = list[str]()
    values: dict[str, Any] = {}
    for name, check in checks.items():
        if name in given:
            try:
                values[name] = check(name, given[name])
            except ConfigurationError as exc:
                flaws.append(str(exc))
    flaws += unknown('transport option', (name for name in given if name not in ignored), checks)
    if flaws:  # the list of the known names is last: it may be cut
        raise ConfigurationError(storable(f'{setting}: {"; ".join(flaws)}', _MAX_ERROR_CHARACTERS))
    return values


def unknown(what: str, names: Iterable[Any], known: Collection[str]) -> Iterator[str]:
    """Yield a phrase about those of `names` that are not `known`; none if all are.

    It suggests the known name that is meant probably, and lists the known ones if there is none.
    """
    if wrong := sorted(str(name) for name in names if name not in known):
        likely = {name: get_close_matches(name, known, 1, _LIKENESS) for name in wrong}
        shown = (f'{name!r:.80}' + ''.join(f' (did you mean {other}?)' for other in likely[name]) for name in wrong)
        others = '' if all(likely.values()) else f'; known are: {", ".join(sorted(known))}'
        yield f'unknown {what}{"s" * (len(wrong) > 1)} {", ".join(shown)}{others}'
