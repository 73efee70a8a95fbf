"""Every result transport option, once: its name, default, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kombu_couchdb.couchdb.shapes import number
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.options import checked, credentials, option, seconds, switch, word

__all__ = ['Options']

#: How writes are tried again while the server is away: at once, then every second, about 20 seconds in all.
_RETRY_POLICY: Mapping[str, float] = {'max_retries': 20, 'interval_start': 0, 'interval_step': 1, 'interval_max': 1}


def _retry_policy(name: str, policy: Any) -> Mapping[str, float]:
    policy = policy or {}
    if not isinstance(policy, Mapping) or not set(policy) <= set(_RETRY_POLICY):
        raise ConfigurationError(f'transport option {name} must be a dictionary with any of {", ".join(_RETRY_POLICY)}')
    for part, value in policy.items():
        # Without a limit it is tried for ever.
        if not (part == 'max_retries' and value is None) and not (number(value) and value >= 0):
            raise ConfigurationError(f'transport option {name}: {part} must be a number from 0 on, not {value!r:.80}')
    return {**_RETRY_POLICY, **policy}


def _prefix(name: str, prefix: Any) -> str | None:
    # CouchDB keeps ids that begin with an underscore for itself.
    if prefix is not None and (not isinstance(prefix, str) or prefix.startswith('_')):
        raise ConfigurationError(
            f'transport option {name} must be text that does not begin with "_", not {prefix!r:.80}'
        )
    return prefix


@dataclass(frozen=True)
class Options:
    """The value of `result_backend_transport_options`, checked. Durations are seconds."""

    #: How long one HTTP request may take to be answered.
    request_timeout: float = seconds(8.0)
    #: How long the TCP and TLS handshakes may take.
    connect_timeout: float = seconds(4.0)
    #: How often a worker looks for expired results and for chords that were left unfinished, at the most.
    sweep_interval: float = seconds(45.0)
    #: Give the results of a chord's header to its body in the order of the header, not in that of their arrival.
    result_chord_ordered: bool = switch(True)
    #: Create the database and its design document when they are missing and the user may.
    create_database: bool = switch(True)
    #: Where user and password come from, instead of the URL: 'environment', or the dotted path of a function that returns both.
    credentials: str | None = credentials()
    #: How they are sent: 'basic', with each request, or 'cookie', once for a session. None is 'cookie' with `credentials`, else
    #: 'basic'.
    auth: str | None = word('basic', 'cookie')
    #: The arguments of `kombu.utils.functional.retry_over_time` for writes.
    retry_policy: Mapping[str, float] = option(_retry_policy, default_factory=lambda: _RETRY_POLICY)
    #: What each id begins with; Celery's base class puts it there.
    global_keyprefix: str | None = option(_prefix, None)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return the options in `given`; *raises* `ConfigurationError` that names an unknown or ill-typed one."""
        return cls(**checked(cls, given))
