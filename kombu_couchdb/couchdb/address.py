"""The address of a database: host, port, name, user, password and TLS, validated."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import quote

from ..errors import ConfigurationError

#: What CouchDB accepts as the name of a database (its documentation of `PUT /{db}`).
_DATABASE = re.compile(r'[a-z][a-z0-9_$()+/-]*\Z')


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
    #: How user and password are sent: 'basic' or 'cookie', see `couchdb.auth`.
    auth: str = 'basic'
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
        if self.credentials and (self.user or self.password):
            raise ConfigurationError(
                'user and password are given twice, in the URL or settings and by the option credentials; '
                'remove one of the two'
            )

    @property
    def server(self) -> str:
        """The URL of the server, without user and password."""
        host = f'[{self.host}]' if ':' in self.host else self.host
        return f'{"https" if self.tls else "http"}://{host}:{self.port}'

    @property
    def url(self) -> str:
        """The URL of the database, without user and password, so that logs may contain it."""
        return f'{self.server}/{quote(self.database, safe="")}'

    @property
    def root(self) -> Address:
        """The address of the server itself, for requests that do not concern one database."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return _Root(**{**given, 'others': tuple(other.root for other in self.others)})

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
        credentials: str | None = None,
        auth: str | None = None,
    ) -> Address:
        """Return the address that consists of the parts that kombu's URL parser returns.

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
            auth=auth or ('cookie' if credentials or callable(password) else 'basic'),
        )


class _Root(Address):
    """The address of a server, without a database."""

    @property
    def url(self) -> str:
        return self.server
