"""Parser of `couchdb://` and `couchdbs://` URLs, and of lists of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kombu.utils.url import parse_url

from ..errors import ConfigurationError
from .address import Address

__all__ = ['check', 'joined', 'parse', 'parse_list', 'wrong_scheme']

#: What may be said of TLS behind the `?` of a URL, and which values it may have; None is any.
_PARAMETERS: dict[str, tuple[str, ...] | None] = {
    'ssl': ('true', 'false'),
    'ssl_ca_certs': None,
    'ssl_certfile': None,
    'ssl_keyfile': None,
    'ssl_cert_reqs': ('required', 'optional', 'none', 'CERT_REQUIRED', 'CERT_OPTIONAL', 'CERT_NONE'),
}


#: What Python leaves out when it splits a URL.
_IGNORED = dict.fromkeys(map(ord, '\t\r\n'))


def wrong_scheme(setting: str, scheme: str) -> ConfigurationError:
    """Return the error for a URL in `setting` with a scheme that is not ours."""
    if scheme in ('http', 'https'):
        ours = scheme.replace('http', 'couchdb')
        return ConfigurationError(f'{setting}: write {ours}:// instead of {scheme}:// if CouchDB is meant')
    # Not the scheme itself: after an unquoted semicolon in a password it is what follows that.
    return ConfigurationError(
        f'{setting}: unknown scheme; write couchdb://, or couchdbs:// for TLS, before each host, and '
        f'percent-encode user and password'
    )


def check(url: str, setting: str) -> None:
    """Refuse a `couchdb://` or `couchdbs://` URL, written in `setting`, that kombu cannot read, or would read amiss.

    *Raises* `ConfigurationError` without any part of user, password and host, and without an error that has one.
    """
    if not _is_readable(url):
        raise ConfigurationError(
            f'{setting}: the URL cannot be read; write couchdb://user:password@host:port/db, or couchdbs:// '
            f'for TLS, with user and password percent-encoded'
        )
    given = parse_qsl(url.partition('?')[2].partition('#')[0], keep_blank_values=True)
    for name, value in given:
        known = _PARAMETERS.get(name, ())
        if known == ():
            raise ConfigurationError(
                f'{setting}: unknown parameter {name!r:.80} in the URL; known are {", ".join(_PARAMETERS)}; options belong in '
                f'broker_transport_options or result_backend_transport_options'
            )
        if known and value not in known and not (name == 'ssl' and value in ('True', 'False', '1', '0')):
            raise ConfigurationError(f'{setting}: the parameter {name} in the URL must be one of {", ".join(known)}')
    names = {name for name, _ in given}
    if 'ssl' in names and len(names) > 1:
        raise ConfigurationError(
            f'{setting}: the URL has ssl beside other parameters of TLS: leave ssl out, for they ask for TLS, too'
        )


def _is_readable(url: str) -> bool:
    rest = url.translate(_IGNORED).partition(':')[2]
    if not rest.startswith('//'):
        return False
    rest = rest[2:]
    try:
        parts = urlsplit(f'http://{rest}')
        parts.hostname, parts.port  # noqa: B018 - they are read now
    except ValueError:
        return False
    # Versions of Python differ in brackets. A '/', '?' or '#' in a password ends the host too early, and the '@' comes after it.
    return not set('[]') & set(parts.netloc.rpartition('@')[0]) and '@' not in re.sub(r'\A[^/?#]*', '', rest)


def parse(
    url: str,
    setting: str,
    default_database: str,
    *,
    tls: Any = None,
    credentials: str | None = None,
    auth: str | None = None,
) -> Address:
    """Return what one `couchdb://` or `couchdbs://` URL says; *raises* `ConfigurationError`, without user and password.

    `setting` is where the user wrote it; `tls` is what other settings say of TLS, and `credentials` and `auth` are the options.
    """
    scheme = url.partition(':')[0].lower()
    if scheme not in ('couchdb', 'couchdbs'):
        raise wrong_scheme(setting, scheme)
    check(url, setting)
    parts = parse_url(url)
    return Address.of(
        scheme=scheme,
        host=parts['hostname'],
        port=parts['port'],
        database=parts['virtual_host'],
        default_database=default_database,
        user=parts['userid'],
        password=parts['password'],
        tls=parts.get('ssl', tls),
        credentials=credentials,
        auth=auth,
    )


def parse_list(urls: Sequence[str], setting: str, default_database: str, **given: Any) -> Address:
    """Return the address of the first of these URLs, with the others as the nodes to ask if that does not answer; see `parse`."""
    first, *others = (parse(url, setting, default_database, **given) for url in urls)
    return joined(first, others, setting)


def joined(first: Address, others: Sequence[Address], setting: str) -> Address:
    """Return an address with others to ask if it does not answer; *raises* `ConfigurationError` if only some have TLS."""
    if any(other.tls != first.tls for other in others):
        raise ConfigurationError(
            f'{setting}: some of the URLs ask for TLS and some do not; write couchdbs:// for all of the '
            f'nodes, or couchdb:// for all'
        )
    return replace(first, others=tuple(others))
