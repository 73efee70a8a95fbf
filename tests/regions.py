"""Regions for tests: databases on one server, or on several, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import permutations
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from celery import Celery

import celery_couchdb.design
from celery_couchdb.contrib.regions.link import Link, RegionLeader
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.errors import ServerUnavailable
from tests.chaos.proxy import Proxy
from tests.conftest import PATIENT, PATIENT_BROKER
from tests.support import end, items


class Region:
    """One region: an app, and clients for its three databases."""

    def __init__(self, name: str, server: Server, stack: ExitStack) -> None:
        self.name, self.server = name, server
        names = [stack.enter_context(server.fresh_database()) for _ in range(3)]
        self.broker, self.results, self.regions = (self._database(name, stack) for name in names)
        documents: list[list[Document]] = [design.documents(), [celery_couchdb.design.document()], []]
        for client, docs in zip((self.broker, self.results, self.regions), documents, strict=True):
            for step in plan(Wanted(client, docs)):
                if step.do:
                    step.do()
        target = urlsplit(server.url)
        #: The way to this region's database of regions.
        self.road = stack.enter_context(Proxy(str(target.hostname), target.port or 5984))
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
        urls = {other.name: other.url() for other in regions}
        self.options = {**PATIENT_BROKER, 'region': self.name, 'regions': urls, **options}
        self.app.conf.update(broker_transport_options=self.options, result_backend_transport_options=PATIENT)

    def url(self) -> str:
        """Return the URL of the database of regions, by the road that a test can cut."""
        direct = self.server.couchdb_url(self.regions.address.database)
        return direct.replace(f':{urlsplit(self.server.url).port}/', f':{self.road.port}/')

    def records(self, other: str = '') -> list[Document]:
        """Return the records of the tasks that the region has given away, to region `other` or to all."""
        return [row['doc'] for row in self.regions.id_range(f'p:{other}', docs=True)]

    def returning(self) -> list[Document]:
        """Return the results that have not been fetched by other regions."""
        return [row['doc'] for row in self.regions.id_range('r:', docs=True)]

    def tasks(self) -> list[str]:
        """Return the ids of the tasks in the broker's database."""
        return sorted(item['message']['headers']['id'] for item in items(self.broker))


class LeaderAndLink(RegionLeader):
    """A process that leads a region, and its link with one other region, in one thread."""

    def __init__(self, app: Celery, transport: Any, other: str) -> None:
        super().__init__(app, transport, lambda: None, 1)
        self._others = []
        self._leader = cast(
            Any, SimpleNamespace(term=1, leads=False, next_in=1.0, renewal=1.0, step=lambda: 1, release=lambda: None)
        )
        self._lead._lease = self._leader
        self.link = Link(app, transport, lambda: None, self._lead, other)

    def begin(self) -> None:
        """Forget what a former term knew."""
        super().begin()
        self.link.begin()

    def step(self) -> float:
        """Do all that is due."""
        seconds = self.link.step()
        return min(seconds, super().step())

    def close(self) -> None:
        """Close the connections."""
        self.link.close()
        super().close()


class Regions:
    """Regions by name, and the links between them, which work when a test says so."""

    def __init__(self, servers: dict[str, Server], stack: ExitStack, **options: Any) -> None:
        self.all = [Region(name, server, stack) for name, server in servers.items()]
        for region in self.all:
            region.know(self.all, **options)
        self._links: dict[tuple[str, str], LeaderAndLink] = {}
        self._stack = stack

    def __getitem__(self, name: str) -> Region:
        return next(region for region in self.all if region.name == name)

    def link(self, own: str, other: str) -> LeaderAndLink:
        """Return the link of the region `own` with `other`, in a process that leads."""
        if (own, other) not in self._links:
            self._links[own, other] = self._stack.enter_context(new_link(self[own].app, other))
        return self._links[own, other]

    def cut(self) -> None:
        """Let no region reach another one, until `restore`."""
        for region in self.all:
            region.road.refuse()

    def restore(self) -> None:
        """Let all regions reach each other again."""
        for region in self.all:
            region.road.restore()

    def work(self, own: str = '', other: str = '') -> None:
        """Let the links of a region, or of all, do what is due, as those of a new leader."""
        for pair in permutations([region.name for region in self.all], 2):
            if (own or pair[0], other or pair[1]) == pair:
                link = self.link(*pair)
                link.begin()
                while not link.step():
                    pass


@contextmanager
def new_link(app: Celery, other: str) -> Iterator[LeaderAndLink]:
    """Provide a process that leads the region of an app, with a link with another one."""
    connection = app.connection_for_write()
    link = LeaderAndLink(app, connection.connection, other)
    yield link
    link.close()
    connection.release()


@contextmanager
def regions_on(server: Server, *names: str, **options: Any) -> Iterator[Regions]:
    """Provide regions on one server; `options` are more transport options."""
    with ExitStack() as stack:
        yield Regions(dict.fromkeys(names, server), stack, **options)


@contextmanager
def killed_after(writes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process be killed after so many requests that write documents; what it raises then is caught."""
    done = list[Any]()

    def killing(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_or_die(self: Client, docs: Any, *args: Any, **options: Any) -> Any:
            if docs and len(done) >= writes:
                raise ServerUnavailable('killed')
            done.extend([docs] if docs else [])
            return write(self, docs, *args, **options)

        return write_or_die

    with monkeypatch.context() as patch, suppress(ServerUnavailable):
        for name in ('bulk', 'create_once'):
            patch.setattr(Client, name, killing(getattr(Client, name)))
        yield
