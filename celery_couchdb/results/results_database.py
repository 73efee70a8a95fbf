"""The result database: its address, and its creation, with the design document, when it is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.couchdb.urls import parse_list
from kombu_couchdb.errors import AccessDenied, DatabaseMissing, NotFound, access_denied

from .. import design

T = TypeVar('T')
A = TypeVar('A')


def address_of(url: str, credentials: str | None = None, auth: str | None = None) -> Address:
    """Return the address in `url`: a `couchdb://` or `couchdbs://` URL, or one for each node, separated by semicolons.

    `credentials` and `auth` are the transport options of the same names. *Raises* `ConfigurationError` for an invalid
    URL; its text does not contain the URL, which may have a password in it.
    """
    return parse_list(url.split(';'), 'result_backend', 'celery_results', credentials=credentials, auth=auth)


class Database:
    """One result database. `may_create` is the transport option `create_database`.

    *Every* method raises the errors of `kombu_couchdb.errors`.
    """

    def __init__(self, client: Client, may_create: bool) -> None:
        self._client, self._may_create = client, may_create

    def set_up(self) -> None:
        """Create the database and its design document if they do not exist; one request if both exist.

        *Raises* `AccessDenied` if the user may not create them, and `DatabaseMissing` or `NotFound` if they are missing
        and the transport option `create_database` is off.
        """
        wanted = design.document()
        try:
            self.call(self._client.get, wanted['_id'])
        except NotFound:
            if not self._may_create:
                raise
            try:
                self.call(self._client.try_put, wanted)  # a conflict means that another process has stored it
            except AccessDenied as exc:
                raise access_denied(
                    self._client.address.url,
                    self._client.user,
                    'write the design document',
                    'let an administrator run "celery -A your_app couchdb setup"',
                ) from exc

    def call(self, request: Callable[[A], T], argument: A) -> T:
        """Make a request; if the database is missing, create it and make the request again."""
        try:
            return request(argument)
        except DatabaseMissing as missing:
            address = self._client.address
            if not self._may_create:
                raise DatabaseMissing(
                    f'{address.url}: the database does not exist, and the transport option create_database is off'
                ) from missing
            try:
                self._client.create()
            except AccessDenied as exc:
                raise access_denied(
                    address.url,
                    self._client.user,
                    'create the database, which does not exist',
                    'let an administrator run "celery -A your_app couchdb setup", or name an existing one in '
                    'result_backend',
                ) from exc
        return request(argument)
