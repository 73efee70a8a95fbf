"""The address of a database, validated; the parser for `couchdb://` URLs and lists of them, and masks for passwords."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from kombu.utils.url import parse_url

from ..errors import ConfigurationError

#: The ways to authenticate (`Address.auth`), with what each sends in the place of a password.
SECRETS = {'basic': 'password', 'cookie': 'password', 'jwt': 'token', 'iam': 'API key', 'proxy': 'token'}

#: Those with tokens, for which CouchDB needs no document of the user.
TOKENS = ('jwt', 'iam', 'proxy')

#: Those with bearer tokens, which may contain the name of the user.
BEARER = ('jwt', 'iam')

#: What CouchDB accepts as the name of a database (its documentation of `PUT /{db}`).
_DATABASE = re.compile(r'[a-z][a-z0-9_$()+/-]*\Z')


#: The parameters in the query of a URL with their values; None means any value. All but the last are about TLS.
_PARAMETERS: dict[str, tuple[str, ...] | None] = {
    'ssl': ('true', 'false'),
    'ssl_ca_certs': None,
    'ssl_certfile': None,
    'ssl_keyfile': None,
    'ssl_cert_reqs': ('required', 'optional', 'none', 'CERT_REQUIRED', 'CERT_OPTIONAL', 'CERT_NONE'),
    'login_method': tuple(SECRETS),
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


@dataclass(frozen=True)
class Address:
    """One database on one server. `repr` and error texts do not contain the password.

    *Raises* `ConfigurationError` if a field is not valid.
    """

    host: str = 'localhost'
    port: int = 5984
    database: str = 'celery'
    user: str | None = None
    password: str | Callable[[], str] | None = field(default=None, repr=False)
    tls: bool = False
    #: The path of a file with CA certificates, True for those that `requests` trusts, or False: no verification.
    verify: bool | str = True
    #: The client's certificate: the path of one file with certificate and key, or the paths of both.
    cert: str | tuple[str, str] | None = None
    #: The source of user and password if they are not given here, see the transport option `credentials`.
    credentials: str | None = None
    #: What the password is and how it is sent, one of `SECRETS`, see `couchdb.auth`.
    auth: str = 'basic'
    #: With 'iam', the URL of the server that exchanges API keys for tokens; None is that of IBM Cloud.
    token_url: str | None = None
    #: With 'proxy', the roles of the user.
    proxy_roles: tuple[str, ...] = ()
    #: The same database on other nodes of the cluster. The client uses them in turn when this node is unavailable.
    others: tuple[Address, ...] = ()

    def __post_init__(self) -> None:
        try:
            ':'.join(map(str, (self.host, self.user, self.password))).encode('utf-8')
        except UnicodeEncodeError:
            raise ConfigurationError(
                'host, user or password contains half of a surrogate pair, which cannot be encoded as UTF-8'
            ) from None
        if set('/?#@') & set(self.host):
            raise ConfigurationError(
                'the host is not valid; write couchdb://user:password@host:port/db, or couchdbs:// for TLS, with user '
                'and password percent-encoded'
            )
        if '@' in self.database:
            # The error does not quote the name, which may contain a part of the password.
            raise ConfigurationError(
                'the database name contains an @, probably because the password in the URL contains '
                'a /, # or ?; percent-encode user and password'
            )
        if not _DATABASE.match(self.database):
            raise ConfigurationError(
                f'{self.database!r:.80} is not a CouchDB database name: lower-case letters, digits and _$()+-/ only, '
                f'starting with a letter'
            )
        if self.auth not in SECRETS:
            raise ConfigurationError(f'login_method must be one of {", ".join(SECRETS)}, not {self.auth!r:.80}')
        if self.credentials and (self.user or self.password):
            raise ConfigurationError(
                'user and password are given twice, in the URL or settings and by the option credentials; '
                'remove one of the two'
            )

    @cached_property
    def server(self) -> str:
        """The URL of the server, without user and password."""
        host = f'[{self.host}]' if ':' in self.host else self.host
        return f'{"https" if self.tls else "http"}://{host}:{self.port}'

    @cached_property
    def url(self) -> str:
        """The URL of the database, without user and password, so that logs may contain it."""
        return f'{self.server}/{quote(self.database, safe="")}'

    def beside(self, database: str) -> Address:
        """Return the address of another database on the same server, with the same user."""
        return replace(self, database=database, others=tuple(other.beside(database) for other in self.others))

    @classmethod
    def of(
        cls,
        *,
        scheme: str,
        host: str | None,
        port: int | None,
        database: str | None,
        default_database: str,
        user: str | None,
        password: Any,
        tls: Any = None,
        login_method: str | None = None,
        credentials: str | None = None,
        auth: str | None = None,
        token_url: str | None = None,
        proxy_roles: Sequence[str] = (),
    ) -> Address:
        """Return the address that consists of the parts that kombu's URL parser returns.

        The last four arguments are the transport options of these names; `login_method` takes precedence over `auth`.

        `tls` is `broker_use_ssl` or the `ssl_*` parameters of the URL: True, or a mapping with `ca_certs`,
        `certfile`, `keyfile` and `cert_reqs`, each with or without the prefix `ssl_`.

        *Raises* `ConfigurationError` if a part is not valid.
        """
        secure = scheme == 'couchdbs' or (tls.lower() in ('true', '1') if isinstance(tls, str) else bool(tls))
        given = {str(k).removeprefix('ssl_'): v for k, v in tls.items()} if isinstance(tls, Mapping) else {}
        unknown = sorted(set(given) - {'ca_certs', 'certfile', 'keyfile', 'cert_reqs'})
        if unknown:
            raise ConfigurationError(
                f'unknown TLS option {unknown[0]!r}; the options are ca_certs, certfile, keyfile, cert_reqs'
            )
        verify = given.get('ca_certs') or given.get('cert_reqs', ssl.CERT_REQUIRED) != ssl.CERT_NONE
        certfile, keyfile = given.get('certfile'), given.get('keyfile')
        if keyfile and not certfile:
            raise ConfigurationError('the TLS option keyfile needs the option certfile')
        return cls(
            host=host or 'localhost',
            port=port or (6984 if secure else 5984),
            database=(database or '').strip('/') or default_database,
            user=user or None,
            password=password or None,
            tls=secure,
            verify=verify,
            cert=(certfile, keyfile) if certfile and keyfile else certfile,
            credentials=credentials,
            # If the password changes, each process with `basic` would send the old one once more, and CouchDB locks
            # the user after five wrong passwords.
            auth=login_method or auth or ('cookie' if credentials or callable(password) else 'basic'),
            token_url=token_url,
            proxy_roles=tuple(proxy_roles),
        )


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
    names = {name for name, _ in given} - {'login_method'}
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
    **login: Any,
) -> Address:
    """Return the address in a `couchdb://` or `couchdbs://` URL.

    `setting` is the name of the setting that contains the URL, for error texts. `tls` is the value of TLS settings
    outside the URL, and `login` has the transport options about the login, see `options.login_options`.

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
        login_method=parts.get('login_method'),
        **login,
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
