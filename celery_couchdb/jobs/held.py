"""A check that the worker of a running task still holds its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ConfigurationError

__all__ = ['holds']


def holds(client: Client, task: Any) -> bool:
    """Tell whether the claim of the message of a running task is still there; see `Jobs.held`."""
    request = task.request
    if request.called_directly or request.is_eager:
        return True  # there is no message that another worker could get
    if not task.acks_late:
        raise ConfigurationError(
            f'the task {task.name} is acknowledged before it runs, so its worker holds no lease: set acks_late=True'
        )
    properties = getattr(request, 'properties', None)
    tag = properties.get('delivery_tag') if isinstance(properties, Mapping) else None
    doc_id, colon, rev = str(tag).rpartition(':')
    if not colon:
        raise ConfigurationError(f'the message of task {task.name} did not come from CouchDB')
    doc = client.get_or_none(doc_id)
    if doc is None or doc.get('removed'):
        return False
    # Publishers may change a unique job while it runs: the claim is the same, and the revision is not.
    info = properties.get('delivery_info') if isinstance(properties, Mapping) else None
    claim = info.get('claimed') if isinstance(info, Mapping) else None
    return bool(doc['_rev'] == rev or (workitem.is_unique(doc) and claim is not None and doc.get('claimed') == claim))
