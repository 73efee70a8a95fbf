"""The site of regions: databases, workers, and replications whose links lead through proxies.

Every region has three databases on its own server, or all regions have theirs on one server. Between two regions there
are two links, one for each direction; a link carries the replications by which one region pulls from the other.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from types import TracebackType
from typing import Any

import requests
from celery import Celery

import celery_couchdb.design
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.admin.status import status
from kombu_couchdb.errors import CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.regions import region_status
from kombu_couchdb.regions.region import arriving, design_document

from .crew import Place
from .ledger import Ledger
from .proxy import Proxy
from .server import Server
from .site import celery_settings, merged

__all__ = ['NAMES', 'Link', 'RegionSite', 'Regions']

#: The regions in the order of their servers.
NAMES = ('eu', 'us', 'asia')

#: The kinds of databases of a region.
_KINDS = ('broker', 'results', 'regions')


class RegionSite:
    """One region: its server, a client for each of its databases, a worker, and an app that sends tasks."""

    def __init__(self, name: str, server: Server, prefix: str) -> None:
        self.name, self.server = name, server
        self.database = {kind: f'{prefix}-{name}-{kind}' for kind in _KINDS}
        self.client = {kind: server.client(database) for kind, database in self.database.items()}
        self.app = Celery(name, set_as_current=False)

    def url(self, kind: str) -> str:
        """Return the `couchdb://` URL of a database."""
        return self.server.url_through(self.server.port, self.database[kind])

    def set_up(self) -> None:
        """Create the databases."""
        wanted = (design.documents(), [celery_couchdb.design.document()], [design_document()])
        for kind, docs in zip(_KINDS, wanted, strict=True):
            for step in plan(Wanted(self.client[kind], docs)):
                if step.do:
                    step.do()

    def parcels(self) -> list[str]:
        """Return the ids of the parcels in its database of regions."""
        return [row['id'] for row in self.client['regions'].id_range('p:')]

    def parcels_left(self) -> bool:
        """Tell whether there are parcels in its database of regions."""
        return bool(self.client['regions'].id_range('p:', limit=1))

    def stored(self, keys: Sequence[str]) -> list[str]:
        """Return the keys of those tasks that have a result of success here."""
        docs = self.client['results'].fetch([f'celery-task-meta-{key}' for key in keys])
        return [key for key, doc in zip(keys, docs, strict=True) if doc and doc.get('status') == 'SUCCESS']

    def delete(self) -> None:
        """Delete the databases."""
        for client in self.client.values():
            with suppress(NotFound, DatabaseMissing):
                client.delete()


class Link:
    """The link by which region `to` pulls from region `source`; `proxy` is on the way."""

    def __init__(self, to: RegionSite, source: RegionSite, prefix: str) -> None:
        self.to, self.source = to, source
        #: A fault of the link holds it until the fault is healed.
        self.lock = threading.Lock()
        self.proxy = Proxy(source.server.host, source.server.port)
        self._docs = []
        for kind, pull in (('regions', region_status.pulled_parcels), ('results', region_status.pulled_results)):
            source_url = self._http(source.server, self.proxy.port, source.database[kind])
            target_url = self._http(to.server, to.server.port, to.database[kind])
            doc = pull(to.name, source.name, {'url': source_url}, {'url': target_url})
            self._docs.append({**doc, '_id': f'{prefix}-{doc["_id"]}'})

    def write(self) -> None:
        """Write the replications. If they exist, that resets how long the replicator waits after its failures."""
        self.drop()
        for doc in self._docs:
            requests.put(self._replicator(doc), json=doc, timeout=60).raise_for_status()

    def drop(self) -> None:
        """Delete the replications."""
        for doc in self._docs:
            found = requests.get(self._replicator(doc), timeout=60)
            if found.ok:
                requests.delete(
                    self._replicator(doc), params={'rev': found.json()['_rev']}, timeout=60
                ).raise_for_status()

    def _replicator(self, doc: Mapping[str, Any]) -> str:
        return f'{self.to.server.url}/_replicator/{doc["_id"]}'

    def _http(self, server: Server, port: int, database: str) -> str:
        login, at, _ = server.parts.netloc.rpartition('@')
        return f'http://{login}{at}127.0.0.1:{port}/{database}'


class Regions:
    """A context manager. On exit the processes end, and the databases and replications are deleted; the folder stays.

    `changes` are settings of Celery for all workers; dictionaries are merged.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        folder: Path,
        changes: Mapping[str, Any] | None = None,
        pool: tuple[str, int] = ('threads', 4),
        tasks: str = 'chaos.tasks',
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f'chaos-{uuid.uuid4().hex[:12]}'
        self.ledger = Ledger(folder / 'ledger.jsonl')
        self.all = [RegionSite(name, server, prefix) for name, server in zip(NAMES, servers, strict=False)]
        self.links = [Link(to, source, prefix) for to, source in permutations(self.all, 2)]
        urls = {region.name: region.url('regions') for region in self.all}
        self.places: list[Place] = []
        for region in self.all:
            options = {'region': region.name, 'regions': urls}
            settings = celery_settings(region.url('broker'), region.url('results'))
            settings = merged(merged(settings, {'broker_transport_options': options}), changes or {})
            region.app.conf.update(settings)
            proxy = Proxy(region.server.host, region.server.port)
            environment = {
                'CHAOS_LEDGER': str(self.ledger.path),
                'CHAOS_SETTINGS': json.dumps(settings),
            }
            self.places.append(Place(region.name, pool, proxy, environment, folder, tasks))

    def __getitem__(self, name: str) -> RegionSite:
        return next(region for region in self.all if region.name == name)

    def links_of(self, name: str) -> list[Link]:
        """Return the links that begin or end in a region."""
        return [link for link in self.links if name in (link.to.name, link.source.name)]

    def stored(self, keys: Sequence[str]) -> list[str]:
        """Return the keys of tasks with a result in the region that sent them, with which a key begins."""
        return [
            key
            for region in self.all
            for key in region.stored([key for key in keys if key.startswith(f'{region.name}-')])
        ]

    def remains(self) -> list[str]:
        """Return, in sentences, the messages and parcels that are left over."""
        found: list[str] = []
        for region in self.all:
            found += [
                f'{count} messages are {state} in queue {name} of {region.name}'
                for name, queue in status(region.client['broker'], temporary=True)['queues'].items()
                for state in ('ready', 'scheduled', 'prefetched', 'running', 'dead')
                if (count := queue[state])
            ]
            for doc_id in region.parcels():
                arrived = doc_id.startswith(arriving(region.name))
                found.append(f'parcel {doc_id} is left in {region.name}, {"and arrived" if arrived else "and leaves"}')
        return found

    def __enter__(self) -> Regions:
        for region in self.all:
            region.set_up()
        for link in self.links:
            link.write()
        for place in self.places:
            place.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for place in self.places:
            place.kill()
            with place.proxy:
                pass
        for link in self.links:
            with link.proxy, suppress(requests.RequestException):
                link.drop()
        for region in self.all:
            region.app.close()
            with suppress(CouchDBError):
                region.delete()
