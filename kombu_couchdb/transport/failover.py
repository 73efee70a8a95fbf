"""The failover URLs of a `kombu.Connection`: the nodes that they name, and how they are shown without passwords."""

from __future__ import annotations

from typing import Any

from ..couchdb.address import Address
from ..couchdb.urls import MASK, parse, redacted

__all__ = ['hide_alternates', 'others']


def others(address: Address, client: Any) -> tuple[Address, ...]:
    """Return the other addresses in kombu's failover list, starting with those after `address`."""
    given = [
        parse(url, 'broker_url', 'celery', tls=client.ssl, credentials=address.credentials, auth=address.auth)
        for url in client.alt
    ]
    given = [other for other in given if other.password != MASK]  # the URLs of a pickled connection have no passwords
    at = given.index(address) if address in given else -1
    return tuple(dict.fromkeys(other for other in given[at + 1 :] + given[: at + 1] if other != address))


def hide_alternates(client: Any) -> None:
    """Hide the passwords of the failover URLs in `client.info()`: Celery before 5.7 sends them to remote control.

    The connection itself keeps the passwords: its clones need them, and kombu needs them when it switches to the next
    URL.
    """
    if not client.alt or 'info' in vars(client):
        return
    original = client.info

    def info() -> dict[str, Any]:
        info: dict[str, Any] = original()
        info['alternates'] = [redacted(url) if isinstance(url, str) else url for url in info['alternates']]
        return info

    client.info = info
