"""Parser for `couchdb://` and `couchdbs://` URLs and lists of them, and masks for the passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kombu.utils.url import parse_url

from ..errors import ConfigurationError
from .address import Address

#: The TLS parameters in the query of a URL with their values; None means any value.
_PARAMETERS: dict[str, tuple[str, ...] | None] = {
    'ssl': ('true', 'false'),
    'ssl_ca_certs': None,
    'ssl_certfile': None,
    'ssl_keyfile': None,
    'ssl_cert_reqs': ('required', 'optional', 'none', 'CERT_REQUIRED', 'CERT_OPTIONAL', 'CERT_NONE'),
}

#: Replaces a password; kombu uses the same mask.
MASK = '**'

#: Scheme, user and colon, then everything up to the last `@` before the next URL of a list, because a password that is
#: not percent-encoded may contain any other character.
_PASSWORD = re.compile(
    r'(\b[a-z][a-z0-9+.-]*://(?:(?!;[a-z][a-z0-9+.-]*://)[^:@])*:)(?:(?!;[a-z][a-z0-9+.-]*://).)*@',
    re.IGNORECASE | re.DOTALL,
)

#: Characters that Python ignores when it splits a URL.
_IGNORED = dict.fromkeys(map(ord, '\t\r\n'))


def wrong_scheme(setting: str, scheme: str) -> ConfigurationError:
    """Return the error for a URL in `setting` with another scheme than `couchdb` or `couchdbs`."""
    if scheme in ('http', 'https'):
        ours = scheme.replace('http', 'couchdb')
        return ConfigurationError(f'{setting}: write {ours}:// instead of {scheme}:// if CouchDB is meant')
    # The error does not contain the scheme: after a semicolon in a password, it would be a part of the password.
    return ConfigurationError(
        f'{setting}: unknown scheme; write couchdb://, or couchdbs:// for TLS, before each host, and '
        f'percent-encode user and password'
    )


def check(url: str, setting: str) -> None:
    """Validate a `couchdb://` or `couchdbs://` URL before kombu parses it; `setting` is the name of its setting.

    *Raises* `ConfigurationError` if kombu cannot parse the URL or would misread it. Neither the error nor its cause
    contains user, password or host.
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
                f'{setting}: unknown parameter {name!r:.80} in the URL; known are {", ".join(_PARAMETERS)}; '
                f'options belong in broker_transport_options or result_backend_transport_options'
            )
        if known and value not in known and not (name == 'ssl' and value in ('True', 'False', '1', '0')):
            raise ConfigurationError(f'{setting}: the parameter {name} in the URL must be one of {", ".join(known)}')
    names = {name for name, _ in given}
    if 'ssl' in names and len(names) > 1:
        raise ConfigurationError(
            f'{setting}: the URL has the parameter ssl and other TLS parameters; leave ssl out, the others imply TLS'
        )


def _is_readable(url: str) -> bool:
    rest = url.translate(_IGNORED).partition(':')[2]
    if not rest.startswith('//'):
        return False
    rest = rest[2:]
    try:
        parts = urlsplit(f'http://{rest}')
        parts.hostname, parts.port  # noqa: B018 - the properties raise if they are not valid
    except ValueError:
        return False
    # Versions of Python treat brackets differently. After a '/', '?' or '#' in a password, the '@' is not in the
    # netloc.
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
    """Return the address in a `couchdb://` or `couchdbs://` URL.

    `setting` is the name of the setting that contains the URL, for error texts. `tls` is the value of TLS settings
    outside the URL, and `credentials` and `auth` are the options of these names.

    *Raises* `ConfigurationError`, without user and password in its text.
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
    """Return the address in the first URL, with the other URLs as further nodes of the cluster.

    The other arguments are those of `parse`.
    """
    first, *others = (parse(url, setting, default_database, **given) for url in urls)
    return joined(first, others, setting)


def joined(first: Address, others: Sequence[Address], setting: str) -> Address:
    """Return `first` with `others` as further nodes of the cluster.

    *Raises* `ConfigurationError` if some addresses use TLS and others do not.
    """
    if any(other.tls != first.tls for other in others):
        raise ConfigurationError(
            f'{setting}: some of the URLs ask for TLS and some do not; write couchdbs:// for all of the '
            f'nodes, or couchdb:// for all'
        )
    return replace(first, others=tuple(others))


def redacted(text: str, mask: str = MASK) -> str:
    """Return `text`, one URL or several separated by semicolons, with `mask` in place of each password."""
    return _PASSWORD.sub(lambda found: f'{found[1]}{mask}@', text)
