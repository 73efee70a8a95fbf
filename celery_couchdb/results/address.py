"""The address of the result database, from the setting `result_backend`."""

from __future__ import annotations

from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.urls import parse_list

__all__ = ['address_of']


def address_of(url: str, credentials: str | None = None, auth: str | None = None) -> Address:
    """Return what a `couchdb://` or `couchdbs://` URL says, or a list of them with semicolons between, one for each node.

    `credentials` and `auth` are the options that say who asks. *Raises* `ConfigurationError`, without the URL's text.
    """
    return parse_list(url.split(';'), 'result_backend', 'celery_results', credentials=credentials, auth=auth)
