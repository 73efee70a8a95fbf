"""Where the results are: what a `couchdb://` or `couchdbs://` URL says."""

from __future__ import annotations

from kombu.utils.url import parse_url

from kombu_couchdb.address import Address
from kombu_couchdb.errors import ConfigurationError

__all__ = ['address_of']


def address_of(url: str) -> Address:
    """Return what a `couchdb://` or `couchdbs://` URL says; *raises* `ConfigurationError`, without the URL's text."""
    try:
        parts = parse_url(url)
    except (ValueError, KeyError, TypeError):
        parts = {}
    # A '/' or '#' in a password ends the host too early: a piece of the password would be taken for the port.
    if not parts or ('@' in url and not parts['userid']):
        raise ConfigurationError('result_backend: the URL cannot be read; write couchdb://user:password@host:port/db, '
                                 'with user and password percent-encoded, or couchdbs://… for TLS')
    scheme, host, port, user, password, database = (
        parts.pop(name) for name in ('transport', 'hostname', 'port', 'userid', 'password', 'virtual_host'))
    tls = parts.pop('ssl', None)
    if scheme not in ('couchdb', 'couchdbs'):
        raise ConfigurationError(f'result_backend: unknown scheme {scheme!r}; write couchdb://, or couchdbs:// for TLS')
    if parts:
        raise ConfigurationError(f'result_backend: unknown option {min(parts)!r} in the URL')
    return Address.of(scheme=scheme, host=host, port=port, database=database, default_database='celery_results',
                      user=user, password=password, tls=tls)
