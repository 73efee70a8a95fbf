"""What the core asks of regions: the member of a result, inherited headers, the check of chords, and the mover."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from celery import signals
from celery.canvas import Signature

from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.parcels.parcel import FROM_REGION
from kombu_couchdb.regions.region import ANY, named, origin

from ..parcels.origin_headers import header_of, inherit


def members_of_result(app: Any, request: Any, task_id: str) -> dict[str, Any]:
    """Return the member `to` of a result that is returned to another region, where the task was sent."""
    own = (app.conf.broker_transport_options or {}).get('region')
    to = origin({FROM_REGION: header_of(request, FROM_REGION)}, own) if own else None
    return {'to': to} if to else {}


def pass_on(headers: dict[str, Any]) -> None:
    """Give a message the header `x-from-region` of the running task, if there is one."""
    inherit(headers, FROM_REGION)


@signals.before_task_publish.connect
def _inherit(headers: Any = None, **_: Any) -> None:
    if isinstance(headers, dict):
        pass_on(headers)


def check_header(app: Any, tasks: Iterable[Signature], options: Mapping[str, Any]) -> None:
    """Check the tasks of a chord's header; `options` override those of the tasks.

    The results of a header are counted in one region: nobody would count a task that ends in another one, and the body
    would never run. *Raises* `ConfigurationError` if one would run in another region. (One that may run in any region
    runs at home.)
    """
    if own := (app.conf.broker_transport_options or {}).get('region'):
        for step in tasks:
            route = app.amqp.router.route({**step.options, **options}, step.task, step.args, step.kwargs)
            region = named(route, route.get('headers'))
            if region not in (None, own, ANY):
                raise ConfigurationError(
                    f'task {step.task!r:.200} of the header of a chord names region {region!r:.80}: the header of a '
                    f'chord runs in the region where the chord is sent'
                )


def prepare_worker() -> None:
    """Let the mover of the region start in each worker that is ready, beside that of parcels."""
    kinds = import_module('celery_couchdb.parcels.moving').KINDS
    kinds['region'] = import_module('celery_couchdb.regions.region_mover').RegionMover
