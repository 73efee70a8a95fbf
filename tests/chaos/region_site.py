"""The site of regions: databases, workers, and links, by which the worker of a region reads it and the other ones.

Every region has three databases on its own server, which may be a cluster, or all regions have theirs on one server.
Between two regions there are two links, one for each direction.
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

from celery import Celery

import celery_couchdb.design
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.admin.status import status
from kombu_couchdb.couchdb.address import parse_list
from kombu_couchdb.couchdb.call import HTTPOptions
from kombu_couchdb.couchdb.client import Client, chunks
from kombu_couchdb.errors import CouchDBError, DatabaseMissing, NotFound
from kombu_couchdb.queues.databases import broadcasts_of

from .crew import Place
from .ledger import Ledger
from .proxy import Proxy
from .server import Server
from .site import celery_settings, merged

__all__ = ['NAMES', 'Link', 'RegionSite', 'Regions']

#: The regions in the order of their servers.
NAMES = ('eu', 'us', 'asia')

#: The design documents of each of the databases of a region.
_DESIGNS = {'broker': design.documents(), 'results': [celery_couchdb.design.document()], 'regions': []}

#: How long a request of the suite itself may take, in seconds.
_PATIENCE = 60.0

#: How many results are read in a request.
_PART = 1000

#: Transport options of all processes: a message waits only briefly before it is lent.
_OPTIONS = {'lend_after': 0.5}

#: Settings of Celery of all processes: what a worker cannot run at once waits, so that it can be lent.
_SETTINGS = {'worker_prefetch_multiplier': 1}


class RegionSite:
    """One region: its servers, a client for each of its databases, and an app that sends tasks."""

    def __init__(self, name: str, servers: Sequence[Server], prefix: str) -> None:
        self.name = name
        #: The nodes of its cluster, or one server.
        self.servers = servers
        self.database = {kind: f'{prefix}-{name}-{kind}' for kind in _DESIGNS}
        self.client = {
            kind: Client(
                parse_list(self.url(kind).split(';'), 'REGION_URLS', 'celery'), HTTPOptions(_PATIENCE, _PATIENCE)
            )
            for kind in _DESIGNS
        }
        self.app = Celery(name, set_as_current=False)

    def url(self, kind: str) -> str:
        """Return the `couchdb://` URL of a database; one for each node."""
        return self.url_through(kind, [server.port for server in self.servers])

    def url_through(self, kind: str, ports: Sequence[int]) -> str:
        """Return the `couchdb://` URL of a database through proxies, one for each node."""
        nodes = zip(self.servers, ports, strict=True)
        return ';'.join(server.url_through(port, self.database[kind]) for server, port in nodes)

    def set_up(self) -> None:
        """Create the databases."""
        for kind, docs in _DESIGNS.items():
            for step in plan(Wanted(self.client[kind], docs)):
                if step.do:
                    step.do()

    def given(self) -> list[str]:
        """Return the ids of records of tasks that were given away, and of results for other regions."""
        return [row['id'] for prefix in ('p:', 'r:') for row in self.client['regions'].id_range(prefix)]

    def stored(self, keys: Sequence[str]) -> list[str]:
        """Return the keys of those tasks that have a result of success here."""
        found: list[str] = []
        for part in chunks(keys, _PART):
            docs = self.client['results'].fetch([f'celery-task-meta-{key}' for key in part])
            found += [key for key, doc in zip(part, docs, strict=True) if doc and doc.get('status') == 'SUCCESS']
        return found

    def remains(self) -> list[str]:
        """Return, in sentences, what is left over of its messages."""
        queues = status(self.client['broker'], temporary=True)['queues']
        found = [
            f'{count} messages are {state} in queue {name} of {self.name}'
            for name, queue in queues.items()
            for state in ('ready', 'scheduled', 'prefetched', 'running', 'dead')
            if (count := queue[state])
        ]
        docs = [row['doc'] for row in self.client['broker'].id_range('', docs=True)]
        return found + [f'{doc["_id"]} is still lent by {self.name}' for doc in docs if doc.get('type') == 'LentItem']

    def delete(self) -> None:
        """Delete the databases."""
        for client in (*self.client.values(), broadcasts_of(self.client['broker'])):
            with suppress(NotFound, DatabaseMissing):
                client.delete()


class Link:
    """The way by which the worker of region `to` reads region `source`: a proxy for each of its servers."""

    def __init__(self, to: RegionSite, source: RegionSite) -> None:
        self.to = to
        self.source = source
        #: A fault of the link holds it until the fault is healed.
        self.lock = threading.Lock()
        self.proxies = [Proxy(server.host, server.port) for server in source.servers]

    @property
    def url(self) -> str:
        """The URL of the other region's database of regions."""
        return self.source.url_through('regions', [proxy.port for proxy in self.proxies])


class Regions:
    """A context manager. On exit the processes end, and the databases are deleted; the folder stays.

    `servers` are the nodes of each region, and `changes` settings of Celery for all workers; dictionaries are merged.
    """

    def __init__(
        self,
        servers: Sequence[Sequence[Server]],
        folder: Path,
        changes: Mapping[str, Any] | None = None,
        pool: tuple[str, int] = ('threads', 4),
        tasks: str = 'tests.chaos.tasks',
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f'chaos-{uuid.uuid4().hex[:12]}'
        self.ledger = Ledger(folder / 'ledger.jsonl')
        self.all = [RegionSite(name, nodes, prefix) for name, nodes in zip(NAMES, servers, strict=False)]
        self.links = [Link(to, source) for to, source in permutations(self.all, 2)]
        #: The ways by which the workers of the regions reach their own servers.
        self.own = [Link(region, region) for region in self.all]
        self.places: list[Place] = []
        for region, own in zip(self.all, self.own, strict=True):
            urls = {link.source.name: link.url for link in self.links if link.to is region}
            options = {**_OPTIONS, 'region': region.name, 'regions': {**urls, region.name: region.url('regions')}}
            settings = celery_settings(region.url('broker'), region.url('results'))
            settings = merged(merged(settings, {**_SETTINGS, 'broker_transport_options': options}), changes or {})
            region.app.conf.update(settings)
            ports = [proxy.port for proxy in own.proxies]
            urls = {'broker_url': region.url_through('broker', ports)}
            urls['result_backend'] = region.url_through('results', ports)
            environment = {
                'CHAOS_LEDGER': str(self.ledger.path),
                'CHAOS_SETTINGS': json.dumps({**settings, **urls}),
            }
            self.places.append(Place(region.name, pool, own.proxies[0], environment, folder, tasks))

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

    def remains(self, excused: set[str]) -> list[str]:
        """Return, in sentences, what is left over. Records of tasks in `excused`, which were lost, may be left."""
        found: list[str] = []
        for region in self.all:
            found += region.remains()
            ids = [doc_id for doc_id in region.given() if doc_id.split(':')[2] not in excused]
            found += [f'{doc_id} is left in {region.name}' for doc_id in ids]
        return found

    def __enter__(self) -> Regions:
        for region in self.all:
            region.set_up()
        for place in self.places:
            place.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for place in self.places:
            place.kill()
        for link in self.links + self.own:
            for proxy in link.proxies:
                with proxy:
                    pass
        for region in self.all:
            region.app.close()
            with suppress(CouchDBError):
                region.delete()
