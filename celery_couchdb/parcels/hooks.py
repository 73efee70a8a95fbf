"""What the core asks of parcels: the member of a result, inherited headers, and the mover of a worker."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .origin_headers import parcel_of, pass_on

__all__ = ['members_of_result', 'pass_on', 'prepare_worker', 'start_in_worker']


def members_of_result(app: Any, request: Any, task_id: str) -> dict[str, Any]:
    """Return the member `parcel` of a result, if its task came from a parcel with a receipt."""
    parcel = parcel_of(request, task_id)
    return {'parcel': parcel} if parcel else {}


def prepare_worker() -> None:
    """Let the mover start in each worker that is ready, see `moving`."""
    import_module('celery_couchdb.parcels.moving')


def start_in_worker(worker: Any) -> None:
    """Start the mover in a worker that is ready."""
    import_module('celery_couchdb.parcels.moving').on_worker_ready(worker)
