"""Regions for tests: databases on one server, which replicate to each other as regions on several servers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import permutations
from typing import Any

import requests
from celery import Celery

import celery_couchdb.design
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.parcels.replications import endpoint
from kombu_couchdb.regions import region_status
from kombu_couchdb.regions.region import design_document
from tests.conftest import PATIENT, PATIENT_BROKER, wait_for
from tests.support import end


class Region:
    """One region: an app, and clients for its three databases."""

    def __init__(self, name: str, server: Server, stack: ExitStack) -> None:
        self.name, self.server = name, server
        names = [stack.enter_context(server.fresh_database()) for _ in range(3)]
        self.broker, self.results, self.regions = (self._database(name, stack) for name in names)
        documents = (design.documents(), [celery_couchdb.design.document()], [design_document()])
        for client, docs in zip((self.broker, self.results, self.regions), documents, strict=True):
            for step in plan(Wanted(client, docs)):
                if step.do:
                    step.do()
        self.options: dict[str, Any] = {}
        self.app = Celery(
            name,
            set_as_current=False,
            broker=server.couchdb_url(names[0]),
            backend=server.couchdb_url(names[1]),
        )
        stack.callback(end, self.app)

    def _database(self, name: str, stack: ExitStack) -> Client:
        client = self.server.client(name)
        stack.callback(client.close)
        return client

    def know(self, regions: list[Region], **options: Any) -> None:
        """Configure the app; `options` are more transport options."""
        urls = {other.name: other.server.couchdb_url(other.regions.address.database) for other in regions}
        self.options = {**PATIENT_BROKER, 'region': self.name, 'regions': urls, **options}
        self.app.conf.update(broker_transport_options=self.options, result_backend_transport_options=PATIENT)


class Regions:
    """Regions by name, and the replications between them."""

    def __init__(self, servers: dict[str, Server], stack: ExitStack, **options: Any) -> None:
        self.all = [Region(name, server, stack) for name, server in servers.items()]
        for region in self.all:
            region.know(self.all, **options)
        self._running: list[tuple[Server, dict[str, Any]]] = []
        stack.callback(self.disconnect)

    def __getitem__(self, name: str) -> Region:
        return next(region for region in self.all if region.name == name)

    def replicate(self) -> None:
        """Replicate once, from each region to each other one, as CouchDB's replicator does it."""
        for to, source in permutations(self.all, 2):
            parcels, results = pulls(to, source)
            copy(source.regions, to.regions, parcels)
            copy(source.results, to.results, results)

    def connect(self) -> None:
        """Replicate from each region to each other one until the regions are disconnected."""
        for to, source in permutations(self.all, 2):
            for body in pulls(to, source):
                self._running.append((to.server, {**body, 'continuous': True}))
                post(*self._running[-1])

    def disconnect(self) -> None:
        """End all replications."""
        while self._running:
            server, body = self._running.pop()
            post(server, {**body, 'cancel': True})


def pulls(to: Region, source: Region) -> list[dict[str, Any]]:
    """Return the replications by which a region gets parcels and results from another one."""
    docs = (
        region_status.pulled_parcels(
            to.name, source.name, endpoint(source.regions.address), endpoint(to.regions.address)
        ),
        region_status.pulled_results(
            to.name, source.name, endpoint(source.results.address), endpoint(to.results.address)
        ),
    )
    return [{member: doc[member] for member in ('source', 'target', 'selector')} for doc in docs]


def copy(source: Client, target: Client, body: dict[str, Any]) -> None:
    """Replicate once. The embedded server has no replicator that reaches URLs, and that of CouchDB needs seconds."""
    changes = source.request('POST', '/_changes', {'filter': '_selector'}, {'selector': body['selector']}, repeat=True)
    wanted = [{'id': row['id'], 'rev': change['rev']} for row in changes['results'] for change in row['changes']]
    if not wanted:
        return
    found = source.request('POST', '/_bulk_get', {'revs': True, 'attachments': True}, {'docs': wanted}, repeat=True)
    docs = [part['ok'] for result in found['results'] for part in result['docs'] if 'ok' in part]
    target.request('POST', '/_bulk_docs', {}, {'docs': docs, 'new_edits': False})


def post(server: Server, body: dict[str, Any]) -> None:
    """Start or cancel a replication on a server."""
    answer = requests.post(f'{server.url}/_replicate', json=body, timeout=60)
    assert answer.ok, answer.text


@contextmanager
def regions_on(server: Server, *names: str, **options: Any) -> Iterator[Regions]:
    """Provide regions on one server; `options` are more transport options."""
    with ExitStack() as stack:
        yield Regions(dict.fromkeys(names, server), stack, **options)


def await_death(step: Callable[[], object]) -> None:
    """Call `step` until it raises `ServerUnavailable`, as a test lets it at the point where the process is killed."""

    def dies() -> bool:
        try:
            step()
        except ServerUnavailable:
            return True
        return False

    wait_for(dies, 'the ferry is killed')
