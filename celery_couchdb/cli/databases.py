"""The databases that a command works on: those of the app's configuration, as its user or as an administrator."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client

from ..backend import CouchDBBackend
from ..jobs import Jobs, client_of

__all__ = ['administrator', 'app_of', 'broker_of', 'jobs_of', 'lease_of', 'parcels_of', 'results_of']

F = TypeVar('F', bound=Callable[..., Any])

#: How long one request of a command may take, in seconds: bringing an index up to date may take longer than a worker would wait.
_PATIENCE = 120.0

#: The environment variable with an administrator's password: a command line can be seen by other users.
_PASSWORD = 'COUCHDB_ADMIN_PASSWORD'


def app_of(ctx: click.Context) -> Any:
    """Return the Celery app that `celery -A` named."""
    return ctx.find_root().obj.app


def broker_of(app: Any, admin: tuple[str, str] | None = None) -> Client:
    """Return a client for the broker's database; with `admin`, a user and password, as that user."""
    return _client(client_of(app), admin)


def lease_of(app: Any) -> float:
    """Return the visibility timeout that the app gives its workers, in seconds."""
    with app.connection_for_write() as connection:
        return float(connection.transport.options.visibility_timeout)


def jobs_of(ctx: click.Context) -> Jobs:
    """Return the jobs in the broker's database of the app that `celery -A` named."""
    return Jobs(app_of(ctx), broker_of(app_of(ctx)))


def results_of(app: Any, admin: tuple[str, str] | None = None) -> Client | None:
    """Return a client for the database of results, or None if the app keeps its results elsewhere, or not at all."""
    return _client(app.backend.store.client, admin) if isinstance(app.backend, CouchDBBackend) else None


def parcels_of(app: Any, admin: tuple[str, str] | None = None) -> Client | None:
    """Return a client for the database of parcels, or None if the app has none; its broker is CouchDB."""
    name = (app.conf.broker_transport_options or {}).get('parcels')
    return _client(client_of(app).beside(name), admin) if name else None


def administrator(command: F) -> F:
    """Give a command the option `--admin`, and the argument `admin`: user and password, or None."""

    def asked(ctx: click.Context, param: click.Parameter, user: str | None) -> tuple[str, str] | None:
        if not user:
            return None
        return user, os.environ.get(_PASSWORD) or click.prompt(f'Password of {user}', hide_input=True, err=True)

    return click.option(
        '--admin',
        metavar='USER',
        callback=asked,
        help='Work as this administrator of CouchDB instead of the '
        'user in the URL. The password is asked for, or taken from ' + _PASSWORD,
    )(command)


def _client(client: Client, admin: tuple[str, str] | None) -> Client:
    return Client(_as(client.address, *admin) if admin else client.address, _PATIENCE)


def _as(address: Address, user: str, password: str) -> Address:
    others = tuple(_as(other, user, password) for other in address.others)
    return replace(address, user=user, password=password, credentials=None, others=others)
