"""Requests to views, and why CouchDB does not respond to one: the index is being built, or a document is harmful."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .. import errors
from .http import Http
from .shapes import Shape, flag, members, number, rows

__all__ = ['query']

#: The shape of CouchDB's information about an index, and how long to wait for it, in seconds.
_INFO = members(view_index=members(updater_running=flag, updates_pending=members(total=number)))
_INFO_SECONDS = 2.0

#: An index that lacks more changes than this is built before a command reads it: the request for rows waits for at most
#: 60 seconds. A request with these parameters starts that, and returns at once.
_FEW_CHANGES, _START = 10_000, {'limit': 0, 'reduce': False, 'update': 'lazy'}

#: The pause between two questions how far the index is, in seconds.
_PAUSE_SECONDS = 0.5


def query(
    client: Http,
    design: str,
    method: str,
    view: str,
    params: Mapping[str, Any] | None,
    body: Any = None,
    *,
    shape: Shape,
) -> Any:
    """Send a request to the view `view` in the design document `design`, or to a path below the view.

    *Raises* `IndexNotReady` if the time limit was exceeded while CouchDB builds the index, and `ViewFailed` if the view
    server has failed twice. `client.failed_views` then counts it, see `queues.quarantine`.
    """
    path = f'/_design/{design}/_view/{view}'
    if client.waits_for_indexes and design not in client.built_indexes:
        _wait(client, design, view.partition('/')[0])
    try:
        try:
            return client.request(method, path, params, body, repeat=True, shape=shape)
        except errors.ViewFailed:
            return client.request(method, path, params, body, repeat=True, shape=shape)
    except errors.ViewFailed as exc:
        client.failed_views += 1
        raise errors.ViewFailed(
            f'{exc}; one of the documents may be the reason: the workers look for it and set it aside'
        ) from None
    except errors.ServerUnavailable as exc:
        if exc.was_cut or exc.status not in (None, 500) or not (pending := _pending(client, design, if_running=True)):
            raise
        raise errors.IndexNotReady(
            f'{client.address.url}: CouchDB builds the index {design}, and {pending:,} changes remain'
        ) from None


def _wait(client: Http, design: str, view: str) -> None:
    """Let CouchDB build an index that lacks many changes, and wait until it has."""
    while (pending := _pending(client, design)) > _FEW_CHANGES:
        client.building_index(design, pending)
        client.request('GET', f'/_design/{design}/_view/{view}', _START, repeat=True, shape=rows())
        time.sleep(_PAUSE_SECONDS)
    client.built_indexes.add(design)


def _pending(client: Http, design: str, *, if_running: bool = False) -> int:
    """Return how many changes an index lacks; with `if_running`, 0 if CouchDB does not work on it just now."""
    try:
        info = client.get_within(f'/_design/{design}/_info', _INFO_SECONDS, shape=_INFO)['view_index']
    except errors.CouchDBError:
        return 0
    return int(info['updates_pending']['total']) if info['updater_running'] or not if_running else 0
