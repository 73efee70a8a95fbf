"""Requests to views, and why CouchDB does not respond to one: the index is being built, or a document is harmful."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import errors
from .http import Http
from .shapes import Shape, flag, members, number

__all__ = ['query']

#: The shape of CouchDB's information about an index, and how long to wait for it, in seconds.
_INFO = members(view_index=members(updater_running=flag, updates_pending=members(total=number)))
_INFO_SECONDS = 2.0


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
    server has failed twice. `client.failed_views` then counts it, see `queues.harmful`.
    """
    path = f'/_design/{design}/_view/{view}'
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
        if exc.was_cut or exc.status not in (None, 500) or not (pending := _pending(client, design)):
            raise
        raise errors.IndexNotReady(
            f'{client.address.url}: CouchDB builds the index {design}, and {pending:,} changes remain'
        ) from None


def _pending(client: Http, design: str) -> int:
    """Return how many changes an index lacks while CouchDB builds it, otherwise 0."""
    try:
        info = client.get_within(f'/_design/{design}/_info', _INFO_SECONDS, shape=_INFO)['view_index']
    except errors.CouchDBError:
        return 0
    return int(info['updates_pending']['total']) if info['updater_running'] else 0
