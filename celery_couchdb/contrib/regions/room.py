"""The room of regions: see `celery_couchdb.room`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any
from uuid import uuid4

from celery import states
from celery.canvas import Signature

from kombu_couchdb.contrib.parcels.parcel import FROM_REGION, GIVER
from kombu_couchdb.contrib.regions.region import ANY, Giver, named, returned
from kombu_couchdb.errors import ConfigurationError
from kombu_couchdb.leases.leader import Led

from ...room import Elsewhere, Room
from ...rooms import header_of
from ..parcels import ends

__all__ = ['RegionsRoom']


def _part(name: str) -> Any:
    return import_module(f'{__package__}.{name}')


class RegionsRoom(Room):
    """Gives tasks to other regions, takes theirs, and brings results back."""

    headers, command_name, has_page = (FROM_REGION, GIVER), 'regions', True

    def on_result(self, backend: Any, request: Any, task_id: str, doc: Any, *, is_result: bool) -> Elsewhere:
        """Return how a result returns to other regions, and whether it is stored here, too.

        It returns to the region where the first task was sent. The result of a task that was given away also returns to
        its giver, and is stored here only if the first task was sent here. Results of the tasks that it sends are
        stored here. The member `region` of a result that returns says where the task ran.
        """
        giver, sent_in = Giver.of({GIVER: header_of(request, GIVER)}), header_of(request, FROM_REGION)
        if giver is None:
            return [], True
        is_given = giver.task_id == task_id
        is_from_elsewhere = isinstance(sent_in, str) and sent_in != giver.own
        record_in: dict[str, str | None] = {str(sent_in): None} if is_from_elsewhere and is_result else {}
        if is_given:
            record_in[giver.region] = giver.record
        result = {**doc, 'region': giver.own, 'status': doc['status'] if is_result else states.IGNORED}
        docs = [returned(home, task_id, uuid4().hex, result, record, doc['date']) for home, record in record_in.items()]
        return [(giver.database, document) for document in docs], not is_given or sent_in == giver.own

    def check_header(self, app: Any, tasks: Iterable[Signature], options: Mapping[str, Any]) -> None:
        """Check the tasks of a chord's header; `options` override those of the tasks.

        The results of a header are counted in one region: nobody would count a task that ends in another one, and the
        body would never run. *Raises* `ConfigurationError` if one would run in another region. (One that may run in any
        region runs at home.)
        """
        if own := (app.conf.broker_transport_options or {}).get('region'):
            for step in tasks:
                route = app.amqp.router.route({**step.options, **options}, step.task, step.args, step.kwargs)
                region = named(route, route.get('headers'))
                if region not in (None, own, ANY):
                    raise ConfigurationError(
                        f'task {step.task!r:.200} of the header of a chord names region {region!r:.80}: the header of '
                        f'a chord runs in the region where the chord is sent'
                    )

    def prepare_worker(self, app: Any) -> None:
        """Let tasks of other regions that end without a result be told, if the app has the option `region`."""
        if (app.conf.broker_transport_options or {}).get('region'):
            ends.connect()

    def services(self, app: Any, concurrency: int) -> Mapping[str, Led]:
        """Return the loop of the leader of a region, if the app has the option `region`."""
        if not (app.conf.broker_transport_options or {}).get('region'):
            return {}
        return {'celery-couchdb-region': _part('link').loop(app, concurrency)}

    def command(self) -> Any:
        """Return the command `regions`."""
        return _part('cli').command

    def page(self) -> Any:
        """Return the page of regions."""
        return _part('page').page

    def vacuum_part(self, app: Any, admin: Any) -> Any:
        """Return what the command `vacuum` does for the database of regions; None if the app has none."""
        return _part('cli').vacuum_part(app, admin)

    def whereabouts(self, jobs: Any, start: str) -> list[Any]:
        """Return the tasks that were given to other regions."""
        found: list[Any] = _part('cli').whereabouts(jobs, start)
        return found

    def retry(self, jobs: Any, task_id: str) -> None:
        """Ask the region in which a task has failed to retry it."""
        _part('cli').retry(jobs, task_id)
