"""Options of the result backend: names, defaults, units and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery.app.defaults import DEFAULTS

from kombu_couchdb.couchdb.address import SECRETS
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.shapes import number
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.options import checked, credentials, option, seconds, switch, texts, token_url, unknown, word

#: How writes are retried if the server does not respond: at once, then every second, about 20 seconds in all.
_RETRY_POLICY: Mapping[str, float] = {'max_retries': 20, 'interval_start': 0, 'interval_step': 1, 'interval_max': 1}


def _retry_policy(name: str, policy: Any) -> Mapping[str, float]:
    policy = policy or {}
    if not isinstance(policy, Mapping):
        raise ConfigurationError(f'transport option {name} must be a dictionary with any of {", ".join(_RETRY_POLICY)}')
    flaws = [f'transport option {name}: {flaw}' for flaw in unknown('member', policy, _RETRY_POLICY)]
    for part in _RETRY_POLICY.keys() & policy.keys():
        value = policy[part]
        # `max_retries` None means no limit.
        if not (part == 'max_retries' and value is None) and not (number(value) and value >= 0):
            flaws.append(f'transport option {name}: {part} must be a number from 0 on, not {value!r:.80}')
    if flaws:
        raise ConfigurationError('; '.join(flaws))
    return {**_RETRY_POLICY, **policy}


def _prefix(name: str, prefix: Any) -> str | None:
    # CouchDB reserves ids that begin with an underscore.
    if prefix is not None and (not isinstance(prefix, str) or prefix.startswith('_')):
        raise ConfigurationError(
            f'transport option {name} must be text that does not begin with "_", not {prefix!r:.80}'
        )
    return prefix


def refuse_settings_of_redis(conf: Any) -> None:
    """*Raise* `ConfigurationError` if an app has settings for results in Redis, which would be ignored.

    As with unknown options, whoever set one expects an effect.
    """
    names = {name for name in (*DEFAULTS, *conf) if name.startswith('redis_')}  # `conf` may have names of Celery 3
    if found := sorted(name for name in names if conf.get(name) != DEFAULTS.get(name)):
        raise ConfigurationError(
            f'{", ".join(found)}: settings for results in Redis have no effect on results in CouchDB; remove them, or '
            f'set what replaces them (see the page "Move from Redis" of the documentation)'
        )


@dataclass(frozen=True)
class ResultOptions:
    """The values of `result_backend_transport_options`, checked. Durations are seconds."""

    #: Let each task of a worker wait until its result is stored, instead of handing it over to the worker's process.
    confirm_results: bool = switch(False)
    #: How long an HTTP request may take, from the last byte sent to the last byte of the response.
    request_timeout: float = seconds(HTTPOptions.request_timeout)
    #: How long the TCP handshake, the TLS handshake and sending 16 kB of a request may take.
    connect_timeout: float = seconds(HTTPOptions.connect_timeout)
    #: The longest pause between two searches of a worker for expired results and unfinished chords.
    sweep_interval: float = seconds(45.0)
    #: Pass the results of a chord's header to its body in the order of the header; otherwise in the order of arrival.
    result_chord_ordered: bool = switch(True)
    #: Create the database and its design documents if they are missing and the user has the right.
    create_database: bool = switch(True)
    #: The source of user and password if they are not in the URL, as for the broker.
    credentials: str | None = credentials()
    #: What the password is, and how it is sent, as for the broker.
    auth: str | None = word(*SECRETS)
    #: With `auth` 'iam', the server that exchanges API keys for tokens. None means that of IBM Cloud.
    token_url: str | None = token_url()
    #: With `auth` 'proxy', the roles of the user.
    proxy_roles: Sequence[str] = texts()
    #: How writes are retried if the server does not respond: arguments of `kombu.utils.functional.retry_over_time`.
    retry_policy: Mapping[str, float] = option(_retry_policy, default_factory=lambda: _RETRY_POLICY)
    #: The prefix of all document ids. Celery's base class adds it.
    global_keyprefix: str | None = option(_prefix, None)

    @property
    def http(self) -> HTTPOptions:
        """How requests are sent."""
        return HTTPOptions(self.request_timeout, self.connect_timeout)

    @classmethod
    def of(cls, given: Mapping[str, Any], of_broker: Mapping[str, Any] | None = None) -> ResultOptions:
        """Return the options in `given`, with those of the broker for the others, and defaults.

        *Raises* `ConfigurationError` for an unknown option or a wrong value.
        """
        inherited = checked(cls, of_broker or {}, 'broker_transport_options')
        return cls(**{**inherited, **checked(cls, given, 'result_backend_transport_options')})
