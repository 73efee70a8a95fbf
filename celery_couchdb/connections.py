"""Connections to the broker and the result backend of an app, as the app's CouchDB user or as another one.

The user of a client acts: what is sent and stored for the client needs the rights of this user, not those of the app.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ssl import CERT_NONE
from typing import Any
from urllib.parse import quote

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.options import login_options
from kombu_couchdb.transport import Transport

from .backend import CouchDBBackend

#: What kombu and Celery raise if the package that a transport or a result backend needs is missing.
_NOT_LOADED = (ImportError, AttributeError)

#: How long a request of an operator may take, in seconds: an index is brought up to date first, which may take long.
REQUEST_SECONDS = 120.0


# -- of the app


def backend_of(app: Any) -> Any:
    """Return the result backend of an app; *raises* `ConfigurationError` if it cannot be loaded."""
    try:
        return app.backend
    except _NOT_LOADED as exc:
        raise ConfigurationError(
            f'the result backend of this app cannot be loaded ({exc}): install the package that it needs, or correct '
            f'result_backend'
        ) from exc


def transport_of(app: Any) -> Any:
    """Return kombu's transport class for the broker of an app; *raises* `ConfigurationError` if there is none."""
    try:
        with app.connection_for_write() as connection:
            return connection.get_transport_cls()
    except KeyError as exc:
        raise ConfigurationError(f'{exc.args[0]}; broker_url must be couchdb://…') from exc
    except _NOT_LOADED as exc:
        raise ConfigurationError(
            f'the transport of broker_url cannot be loaded ({exc}): install the package that it needs, or set '
            f'broker_url to couchdb://…'
        ) from exc


def has_our_broker(app: Any) -> bool:
    """Tell whether the broker of an app is CouchDB; *raises* `ConfigurationError` if its transport cannot be loaded."""
    return issubclass(transport_of(app), Transport)


def client_of(app: Any) -> Client:
    """Return a client for the database of an app's broker.

    *Raises* `ConfigurationError` if the app's broker is not CouchDB.
    """
    transport = transport_of(app)
    if not issubclass(transport, Transport):
        raise ConfigurationError(
            f'the broker of this app is {transport.driver_type}, not CouchDB: '
            f'set broker_url to couchdb://…, or name the app with celery -A'
        )
    return Client(_address_of(app), HTTPOptions(REQUEST_SECONDS))


def _address_of(app: Any) -> Address:
    with app.connection_for_write() as connection:
        address: Address = connection.transport.address
    return address


# -- of the user of a client


def backend_as(app: Any, results: Client | None) -> Any:
    """Return a result backend that works as the user of `results`; that of the app for None, and for its own user.

    *Raises* `ConfigurationError` if the backend of the app cannot be loaded.
    """
    backend = backend_of(app)
    if results is None or not isinstance(backend, CouchDBBackend) or results.address == backend.client.address:
        return backend
    return CouchDBBackend(app, backend.url, address=results.address)


@contextmanager
def producer_as(app: Any, broker: Client | None) -> Iterator[Any]:
    """Yield a producer of kombu that publishes as the user of `broker`; one of the app for None or its own user."""
    if broker is None or broker.address == _address_of(app):
        with app.producer_or_acquire() as producer:
            yield producer
    else:
        with _connection(app, broker.address) as connection, app.amqp.Producer(connection) as producer:
            yield producer


@contextmanager
def control_as(app: Any, broker: Client) -> Iterator[Any]:
    """Yield kombu's mailbox for remote control of the app's workers, which sends and receives as the user of `broker`.

    See `kombu.pidbox.Mailbox` for its methods `cast`, `abcast`, `call` and `multi_call`.
    """
    if broker.address == _address_of(app):
        with app.connection_or_acquire() as connection:
            yield app.control.mailbox(connection)
    else:
        with _connection(app, broker.address) as connection:
            mailbox = app.control.mailbox(connection)
            mailbox.producer_pool = None  # its connections have the app's user
            yield mailbox


def _connection(app: Any, address: Address) -> Any:
    """Return kombu's connection to an address."""
    connection = app.connection_for_write(
        [_url(node) for node in (address, *address.others)],
        ssl=_tls(address) if address.tls else False,
        transport_options=login_options(address),
    )
    given = connection.transport_options
    connection.transport_options = {name: value for name, value in given.items() if value is not None}
    return connection


def _url(node: Address) -> str:
    """Return the URL of a database with user and password."""
    parts = [quote(str(part or ''), safe='') for part in (node.user, node.password)]
    user = f'{":".join(parts)}@' if any(parts) else ''
    scheme, _, server = node.server.partition('://')
    return f'{scheme.replace("http", "couchdb")}://{user}{server}/{quote(node.database, safe="")}'


def _tls(address: Address) -> Any:
    """Return an address's TLS options, as `broker_use_ssl` has them."""
    found = dict[str, Any]()
    if isinstance(address.verify, str):
        found['ca_certs'] = address.verify
    elif not address.verify:
        found['cert_reqs'] = CERT_NONE
    if address.cert:
        names = ('certfile', 'keyfile')
        found |= zip(names, (address.cert,) if isinstance(address.cert, str) else address.cert, strict=False)
    return found or True
