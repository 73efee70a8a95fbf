"""The address of a database: host, port, name, user, password and TLS, checked."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import quote

from ..errors import ConfigurationError

__all__ = ['Address']

#: What CouchDB accepts as the name of a database (its documentation of `PUT /{db}`).
_DATABASE = re.compile(r'[a-z][a-z0-9_$()+/-]*\Z')


@dataclass(frozen=True)
class Address:
    """One database on one server. The password is kept out of `repr` and of every error text."""

    host: str = 'localhost'
    port: int = 5984
    database: str = 'celery'
    user: str | None = None
    password: str | Callable[[], str] | None = field(default=None, repr=False)
    tls: bool = False
    #: A file of CA certificates, or True for those that `requests` trusts; False only if asked for by name.
    verify: bool | str = True
    #: The client's certificate: one file, or certificate and key.
    cert: str | tuple[str, str] | None = None
    #: Where user and password come from, if not from here: the option of that name.
    credentials: str | None = None
    #: How they are sent: 'basic' or 'cookie'.
    auth: str = 'basic'
    #: The same database on other nodes of its cluster, which are asked in turn while this one does not answer.
    others: tuple[Address, ...] = ()

    def __post_init__(self) -> None:
        try:
            ':'.join(map(str, (self.host, self.user, self.password))).encode('utf-8')
        except UnicodeEncodeError:
            raise ConfigurationError(
                'host, user or password has half of a surrogate pair in it, which is no text'
            ) from None
        if '@' in self.database:
            # Part of a password would stand here: it is not quoted.
            raise ConfigurationError(
                'the name of the database has an @ in it, as if the URL had a / # or ? in its password: '
                'percent-encode user and password'
            )
        if not _DATABASE.match(self.database):
            raise ConfigurationError(
                f'{self.database!r:.80} is not a CouchDB database name: lower-case letters, digits and _$()+-/ only, '
                f'starting with a letter'
            )
        if self.credentials and (self.user or self.password):
            raise ConfigurationError(
                'user and password are given twice, in the URL or the settings and by the option '
                'credentials: leave one of the two out'
            )

    @property
    def server(self) -> str:
        """The server's URL, without user and password."""
        host = f'[{self.host}]' if ':' in self.host else self.host
        return f'{"https" if self.tls else "http"}://{host}:{self.port}'

    @property
    def url(self) -> str:
        """The database's URL, without user and password: fit for logs."""
        return f'{self.server}/{quote(self.database, safe="")}'

    @property
    def root(self) -> Address:
        """The server itself, as if it were a database: for what concerns it as a whole."""
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
        """Return the address for the parts that kombu's URL parser gives.

        `tls` is `broker_use_ssl` or what `ssl_*` in the URL's query gave: True, or a mapping with `ca_certs`,
        `certfile`, `keyfile` and `cert_reqs`, each with or without the prefix `ssl_`.
        *Raises* `ConfigurationError`.
        """
        secure = scheme == 'couchdbs' or (tls.lower() in ('true', '1') if isinstance(tls, str) else bool(tls))
        given = {str(k).removeprefix('ssl_'): v for k, v in tls.items()} if isinstance(tls, Mapping) else {}
        unknown = sorted(set(given) - {'ca_certs', 'certfile', 'keyfile', 'cert_reqs'})
        if unknown:
            raise ConfigurationError(
                f'unknown TLS option {unknown[0]!r}; known are ca_certs, certfile, keyfile, cert_reqs'
            )
        verify = given.get('ca_certs') or given.get('cert_reqs', ssl.CERT_REQUIRED) != ssl.CERT_NONE
        certfile, keyfile = given.get('certfile'), given.get('keyfile')
        if keyfile and not certfile:
            raise ConfigurationError('keyfile is given without certfile')
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
            # With `basic` each process would send a password that was changed once more, and five lock the user.
            auth=auth or ('cookie' if credentials or callable(password) else 'basic'),
        )


class _Root(Address):
    """A server."""

    @property
    def url(self) -> str:
        return self.server
