"""What `couchdb://` and `couchdbs://` URLs say, and lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kombu.utils.url import parse_url

from .address import Address
from .errors import ConfigurationError

__all__ = ['parse', 'parse_list']


def parse(url: str, setting: str, default_database: str, *, tls: Any = None, credentials: str | None = None,
          auth: str | None = None) -> Address:
    """Return what one `couchdb://` or `couchdbs://` URL says; *raises* `ConfigurationError`, without the URL's text.

    `setting` is where the user wrote it; `tls` is what other settings say of TLS, and `credentials` and `auth` are the options.
    """
    try:
        parts = parse_url(url)
    except (ValueError, KeyError, TypeError):
        parts = {}
    # A '/' or '#' in a password ends the host too early: a piece of the password would be taken for the port.
    if not parts or ('@' in url and not parts['userid']):
        raise ConfigurationError(f'{setting}: the URL cannot be read; write couchdb://user:password@host:port/db, '
                                 f'with user and password percent-encoded, or couchdbs://… for TLS')
    scheme, host, port, user, password, database = (
        parts.pop(name) for name in ('transport', 'hostname', 'port', 'userid', 'password', 'virtual_host'))
    tls = parts.pop('ssl', tls)
    if scheme not in ('couchdb', 'couchdbs'):
        raise ConfigurationError(f'{setting}: unknown scheme {scheme!r}; write couchdb://, or couchdbs:// for TLS')
    if parts:
        raise ConfigurationError(f'{setting}: unknown option {min(parts)!r} in the URL')
    return Address.of(scheme=scheme, host=host, port=port, database=database, default_database=default_database,
                      user=user, password=password, tls=tls, credentials=credentials, auth=auth)


def parse_list(urls: Sequence[str], setting: str, default_database: str, **given: Any) -> Address:
    """Return the address of the first of these URLs, with the others as the nodes to ask if that does not answer; see `parse`."""
    first, *others = (parse(url, setting, default_database, **given) for url in urls)
    return replace(first, others=tuple(others))
