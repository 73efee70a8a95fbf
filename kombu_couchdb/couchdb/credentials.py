"""The source of user and password: the address, environment variables, or a function of the application."""

from __future__ import annotations

import os
from pathlib import Path

from kombu.utils.imports import symbol_by_name

from ..errors import ConfigurationError
from .address import Address

__all__ = ['environment', 'from_source', 'user_and_password']


def user_and_password(address: Address) -> tuple[str, str] | None:
    """Return user and password of an address, from their source if there is one; None without a user.

    *Raises* `ConfigurationError` if the option `credentials` is wrong, and whatever the source raises.
    """
    if address.credentials:
        return from_source(address.credentials)
    password = address.password() if callable(address.password) else address.password
    return (address.user, password or '') if address.user else None


def environment() -> tuple[str, str]:
    """Return user and password from environment variables.

    `COUCHDB_USER` contains the user, and `COUCHDB_PASSWORD` the password. `COUCHDB_PASSWORD_FILE` contains instead the
    path of a file with the password, which is read at each call.

    *Raises* `ConfigurationError` if a variable is missing, `OSError` if the file cannot be read.
    """
    user, file = os.environ.get('COUCHDB_USER'), os.environ.get('COUCHDB_PASSWORD_FILE')
    if not user or not (file or 'COUCHDB_PASSWORD' in os.environ):
        raise ConfigurationError(
            'credentials="environment" needs the environment variables COUCHDB_USER, and COUCHDB_PASSWORD or '
            'COUCHDB_PASSWORD_FILE'
        )
    return user, Path(file).read_text('utf-8').rstrip('\r\n') if file else os.environ['COUCHDB_PASSWORD']


def from_source(source: str) -> tuple[str, str]:
    """Return user and password from the function that the option `credentials` names."""
    try:
        found = environment if source == 'environment' else symbol_by_name(source)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigurationError(
            f'credentials={source!r} does not name a function that can be imported: {exc}'
        ) from exc
    if callable(found):
        pair = found()
        if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
            return pair[0], pair[1]
        del pair  # recorded tracebacks show the variables of their frames
    raise ConfigurationError(f'credentials={source!r} must name a function that returns two strings, user and password')
