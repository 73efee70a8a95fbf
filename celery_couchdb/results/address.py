"""The address of the result database, from the setting `result_backend`."""

from __future__ import annotations

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.urls import parse_list

__all__ = ['address_of']


def address_of(url: str, credentials: str | None = None, auth: str | None = None) -> Address:
    """Return the address in `url`: a `couchdb://` or `couchdbs://` URL, or one for each node, separated by semicolons.

    `credentials` and `auth` are the transport options of the same names. *Raises* `ConfigurationError` for an invalid
    URL; its text does not contain the URL, which may have a password in it.
    """
    return parse_list(url.split(';'), 'result_backend', 'celery_results', credentials=credentials, auth=auth)
