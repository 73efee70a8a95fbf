"""The other URLs in the list of a `kombu.Connection`: which nodes they name, and how they are shown."""

from __future__ import annotations

from typing import Any

from ..couchdb.address import Address
from ..couchdb.redaction import MASK, redacted
from ..couchdb.urls import parse

__all__ = ['hide_alternates', 'others']


def others(address: Address, client: Any) -> tuple[Address, ...]:
    """Return the other addresses in kombu's failover list, those first that come after this one."""
    given = [
        parse(url, 'broker_url', 'celery', tls=client.ssl, credentials=address.credentials, auth=address.auth)
        for url in client.alt
    ]
    given = [other for other in given if other.password != MASK]  # of a connection that was pickled
    at = given.index(address) if address in given else -1
    return tuple(dict.fromkeys(other for other in given[at + 1 :] + given[: at + 1] if other != address))


def hide_alternates(client: Any) -> None:
    """Let the passwords be hidden in what a connection tells of itself: before 5.7 Celery sends it to whoever asks a worker.

    The connection itself goes on with what it was given: its clones, and kombu when it moves to the next URL, need it.
    """
    if not client.alt or 'info' in vars(client):
        return
    told = client.info

    def info() -> dict[str, Any]:
        info: dict[str, Any] = told()
        info['alternates'] = [redacted(url) if isinstance(url, str) else url for url in info['alternates']]
        return info

    client.info = info
