"""Regions in a model: their databases, two leaders in each, and what may happen to records, in any order.

The code of `RegionLeader`, `Link`, `Inbox`, `Taker`, `Home`, `Lender` and the rules of records run as they are.
Databases are dictionaries that know which revisions each document had, as CouchDB does. A leader is killed, or loses
its connection, before or after any of its writes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from celery import states

from celery_couchdb.backend import CouchDBBackend
from celery_couchdb.contrib.parcels.inbox import Inbox
from celery_couchdb.contrib.parcels.messages import ParcelMessages
from celery_couchdb.contrib.regions.home import Home
from celery_couchdb.contrib.regions.lending import Lender, Load
from celery_couchdb.contrib.regions.link import Link, RegionLeader, SharedLead
from celery_couchdb.contrib.regions.outcomes import ResultsAtHome
from celery_couchdb.contrib.regions.taker import Taker
from celery_couchdb.results.documents import is_outdated
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.contrib.regions.region import Giver
from kombu_couchdb.couchdb.changes import Changes
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.types import Document
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.outage import Outage

__all__ = ['LATE', 'NAMES', 'Killed', 'ModelFollower', 'ModelLeader', 'ModelMessages', 'Place', 'loads_of']

NAMES = ['us', 'eu', 'asia']

#: The exchange whose queue is declared late.
LATE = 'late'


class Killed(BaseException):
    """The process is killed here."""


class Database:
    """One database: for each document the current revision, and all revisions that it ever had."""

    def __init__(self, name: str, clock: SimpleNamespace) -> None:
        self.address = SimpleNamespace(database=name, url=name)
        self.docs: dict[str, Document] = {}
        self.history: dict[str, set[str]] = {}
        self.replicas, self.clock, self._numbers = 1, clock, itertools.count(1)
        #: The number of the last change of each document, and when it was made.
        self.changed: dict[str, tuple[int, float]] = {}
        #: Called before and after each write; it may raise an error.
        self.on_write: Callable[[], None] = lambda: None

    def live(self, prefix: str = '') -> list[Document]:
        """Return the documents whose ids begin so, in the order of the ids."""
        return [doc for doc_id, doc in sorted(self.docs.items()) if doc_id.startswith(prefix) and not _gone(doc)]

    def put(self, doc: Mapping[str, Any], rev: str) -> None:
        """Store a revision."""
        self.docs[doc['_id']] = {**doc, '_rev': rev}
        self.history.setdefault(doc['_id'], set()).add(rev)
        self.changed[doc['_id']] = next(self._numbers), self.clock.now()

    def purge(self, kept: set[str], before: float) -> None:
        """Forget deleted documents, as a vacuum does."""
        for doc_id in [doc_id for doc_id, doc in self.docs.items() if _gone(doc) and doc_id not in kept]:
            if self.changed[doc_id][1] <= before:
                del self.docs[doc_id], self.history[doc_id], self.changed[doc_id]

    # -- what the links call, see `Client`

    def bulk(self, docs: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
        return self._written(lambda: [self._write(doc) for doc in docs]) if docs else []

    def _write(self, doc: Mapping[str, Any]) -> WriteResult:
        mine = self.docs.get(doc['_id'])
        if (mine is None or _gone(mine)) if '_rev' not in doc else (mine or {}).get('_rev') == doc['_rev']:
            rev = f'{len(self.history.get(doc["_id"], ())) + 1}-{next(self._numbers)}'
            self.put(doc, rev)
            return WriteResult(doc['_id'], WriteStatus.STORED, rev)
        return WriteResult.conflict(doc['_id'])

    def create_once(self, docs: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
        def create() -> list[WriteResult]:
            for doc in docs:
                if '1-first' not in self.history.get(doc['_id'], ()):
                    self.put(doc, '1-first')
            return [WriteResult(doc['_id'], WriteStatus.STORED, '1-first') for doc in docs]

        return self._written(create) if docs else []

    def fetch(self, ids: Sequence[str]) -> list[Document | None]:
        found = [self.docs.get(doc_id) for doc_id in ids]
        return [None if doc is None or _gone(doc) else doc for doc in found]

    find = fetch

    def fetch_leaves(self, ids: Sequence[str], **_: Any) -> list[list[Document]]:
        return [[self.docs[doc_id]] if doc_id in self.docs else [] for doc_id in ids]

    def known(self, ids: Sequence[str]) -> set[str]:
        return self.docs.keys() & set(ids)

    def is_cluster(self) -> bool:
        return False

    def info(self) -> Document:
        return {'instance_start_time': self.address.url, 'cluster': {}}

    def sequence(self) -> int:
        return max((number for number, _ in self.changed.values()), default=0)

    def id_range(
        self, prefix: str, *, docs: bool = False, limit: int | None = None, after: str | None = None
    ) -> list[Document]:
        found = [doc for doc in self.live(prefix) if not after or doc['_id'] > after][:limit]
        return [{'id': doc['_id'], **({'doc': doc} if docs else {})} for doc in found]

    def view(self, name: str, view: str, *_: Any, **arguments: Any) -> list[Document]:
        """Return the rows of `lendable`."""
        docs = self.live()
        if arguments.get('startkey') == [None]:
            return [{'id': doc['_id']} for doc in docs if doc['type'] == 'LentItem']
        return [{'id': doc['_id']} for doc in docs if doc['type'] == 'WorkItem' and not doc['claimed']]

    def _written(self, do: Callable[[], Any]) -> Any:
        self.on_write()
        found = do()
        self.on_write()
        return found


def _gone(doc: Mapping[str, Any]) -> bool:
    return bool(doc.get('_deleted'))


class ModelFollower:
    """Reports changes when it is asked."""

    def __init__(self, client: Any, *_: Any, docs: bool = False, **__: Any) -> None:
        self._client, self._docs = client, docs
        self._since: int | None = None
        self._selector: Any = None

    def follow(self, since: int, selector: Any = None) -> None:
        self._since, self._selector = since, selector

    def pause(self) -> None:
        self._since = None

    def close(self) -> None:
        self.pause()

    def take(self) -> Changes | None:
        if self._since is None:
            return None
        try:
            last = self._client.sequence()
        except ServerUnavailable as exc:
            return Changes((), None, exc)
        changed = sorted((number, doc_id) for doc_id, (number, _) in self._client.changed.items())
        rows = [self._row(doc_id) for number, doc_id in changed if number > self._since and self._matches(doc_id)]
        self._since = None
        return Changes(rows, last) if rows else Changes((), last)

    def _matches(self, doc_id: str) -> bool:
        return any(one['_id']['$gte'] <= doc_id < one['_id']['$lt'] for one in self._selector['$or'])

    def _row(self, doc_id: str) -> Document:
        doc = self._client.docs[doc_id]
        return {'id': doc_id, 'doc': doc if self._docs else None, **({'deleted': True} if _gone(doc) else {})}


class Road:
    """A database as it is reached from another region: not at all while the region is cut off."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._place.regions, name)
        if self._place.is_cut and callable(found):
            raise ServerUnavailable(f'{self._place.name} is cut off')
        return found


class ModelBackend:
    """Results, which are stored by the rules of results."""

    expires = failure_expires = None
    mark_as_failure = lambda *_, **__: None  # noqa: E731
    lifetime_of, error_document = CouchDBBackend.lifetime_of, CouchDBBackend.error_document

    def __init__(self, results: Database) -> None:
        self._results, self.store = results, self

    def get_key_for_task(self, task_id: str) -> str:
        return f'celery-task-meta-{task_id}'

    def prepare_exception(self, error: Exception) -> str:
        return str(error)

    def result_document(self, task_id: str, task: str | None, meta: Mapping[str, Any]) -> Document:
        return {'_id': self.get_key_for_task(task_id), 'type': 'Result', 'status': meta['status'], 'task': task}

    def read_many(self, ids: Sequence[str]) -> list[Document | None]:
        return self._results.fetch(ids)

    def write_batch(self, items: Sequence[Any]) -> list[Any]:
        self._results.on_write()
        for item in items:
            stored = self._results.docs.get(item.id)
            if stored is None or not is_outdated(item.head, stored):
                self._results.put(item.head, f'1-{item.id}')
        self._results.on_write()
        return []


class ModelMessages(ParcelMessages):
    """Messages for the queue of a region."""

    def __init__(self, transport: Any) -> None:
        self._place = self._transport = transport.place
        self.channel: Any = SimpleNamespace(tag='', items=[])
        self.merged = {}

    def publish(self, message: Document, doc: Mapping[str, Any]) -> None:
        if doc.get('exchange') == LATE and not self._place.is_bound:
            return
        properties = {**message['properties'], 'delivery_tag': self.channel.tag, 'body_encoding': 'utf-8'}
        self.channel.items = [workitem.new(self.channel.tag, 'q', {**message, 'properties': properties}, 0.0)]


class ModelLooks:
    """A look is always due."""

    next_at = 1e9

    def begin(self, seconds: float) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class ModelLink(Link):
    """A link."""

    def __init__(self, place: Place, other: Place, lead: SharedLead, app: Any, transport: Any) -> None:
        super(Link, self).__init__(lead)  # type: ignore[arg-type]
        own: Any = place.regions
        self._name, self._other, self._lead, self._own = place.name, other.name, lead, own
        self._foreign = {*NAMES} - {other.name}
        there: Any = Road(other)
        self._there = there
        prefixes = region.results_to(place.name), region.records_to(place.name), region.region_id('')
        self._arriving = Inbox(there, lambda: None, *prefixes, docs=True)
        self._taker = Taker(app, transport, own, self._arriving, place.name, other.name)
        self._results = ResultsAtHome(app, own)
        self._refused = set()
        self._outage = Outage(logging.getLogger(), '%s')
        self.begin()


class ModelLeader(RegionLeader):
    """A process that believes that it leads, with a link with one other region."""

    def __init__(self, place: Place, other: Place) -> None:
        lease: Any = SimpleNamespace(term=1, step=lambda: 1, next_in=1.0, renewal=1.0)
        super(RegionLeader, self).__init__(lease)
        app: Any = SimpleNamespace(
            backend=place.backend,
            control=SimpleNamespace(revoke=place.revoke),
            conf=SimpleNamespace(accept_content=['json']),
        )
        options = SimpleNamespace(region=place.name, regions=NAMES)
        transport: Any = SimpleNamespace(couchdb=place.broker, place=place, options=options)
        own: Any = place.regions
        broker: Any = place.broker
        self._name, self._others, self._broker, self._concurrency, self._client = place.name, [], broker, 1, own
        self._lead, self._links = SharedLead(lease, lambda: None), []
        self._looks: Any = ModelLooks()
        self._demand: Any = ModelLooks()  # `Place.want` writes the document
        self._home = Home(app, transport, own, lambda: None)
        self._lender = Lender(broker, own, place.name, 1.0, ['json'], self._home.note_lent)
        self._link_: Any = ModelLink(place, other, self._lead, app, transport)
        self._home.reset()

    def step(self) -> float:
        """Do all that is due, whatever paused it."""
        self._link_._outage.recovered()
        self._stale = False
        seconds = self._link_.work(stale=False)
        return min(seconds, self.work(stale=False))


def loads_of(broker: Database, concurrency: int) -> dict[str, Load]:
    """Return the load of the queue of a region."""
    waiting = [doc for doc in broker.live() if doc['type'] == 'WorkItem' and not doc['claimed']]
    return {'q': Load(1, len(waiting), 0, False)}


class Place:
    """A region: its databases, two leaders for each other region, its worker, and the tasks that ran."""

    def __init__(self, name: str, clock: SimpleNamespace) -> None:
        self.name, self.is_cut, self.is_bound = name, False, False
        self.broker, self.regions, self.results = (Database(f'{name}-{n}', clock) for n in ('broker', 'regions', 'r'))
        self.backend = ModelBackend(self.results)
        self.revoked = set[str]()
        self.links: dict[tuple[str, int], ModelLeader] = {}
        self._numbers, self._clock = itertools.count(), clock

    @property
    def databases(self) -> list[Database]:
        """All databases."""
        return [self.broker, self.regions, self.results]

    def revoke(self, task_id: str, **_: Any) -> None:
        """Tell the workers that a task is revoked."""
        self.revoked.add(task_id)

    def store_items(self, items: Sequence[Any]) -> list[WriteResult]:
        """Store new messages as `Store.publish_each` does."""
        return [result for result in self.broker.create_once(items) if not result.is_stored]

    def send(self, task_id: str, to: str, *, fallback: str | None, exchange: str, is_valid: bool) -> None:
        """Send a task to a region."""
        message: Any = {
            'body': '[[], {}, {"chord": null, "chain": null}]',
            'headers': {'task': 'add', 'id': task_id},
            'properties': {'delivery_tag': task_id, 'body_encoding': 'utf-8'},
            'content-type': 'application/json',
            'content-encoding': 'utf-8',
        }
        if to == region.ANY:
            message['properties']['region'] = to
            self.broker.put(workitem.new(task_id, 'q', message, 0.0), '1-first')
            return
        doc: Any = parcel.new(message, exchange, 'q', self._clock.now())
        doc['_id'] = region.record_id(to, task_id, f'tag-{task_id}')
        if not is_valid:
            doc['message'] = {**message, 'body': None}
        if fallback is not None:
            doc['fallback'], doc['fallback_at'] = fallback, self._clock.now() + 5
        self.regions.put(doc, '1-first')

    def want(self, count: int) -> None:
        """Write the Region document."""
        doc = {'_id': region.region_id(self.name), 'type': 'Region', 'want': {'q': count}, 'until': 1e9}
        self.regions.put(doc, f'{next(self._numbers)}-want')

    def waiting(self) -> list[Any]:
        """Return the messages that no worker has claimed."""
        return [doc for doc in self.broker.live() if doc['type'] == 'WorkItem' and workitem.is_waiting(doc)]

    def claimed(self) -> list[Any]:
        """Return the messages that the worker has claimed."""
        return [doc for doc in self.broker.live() if workitem.claimant(doc)]

    def end(self, item: Any, *, acknowledge: bool) -> str | None:
        """Store the result of a claimed message, and return the id of the task, or None if it was revoked.

        Without `acknowledge`, the worker is killed in between, and another one may run it.
        """
        headers = item['message']['headers']
        task_id, giver = headers['id'], Giver.of(headers)
        status = states.REVOKED if task_id in self.revoked else states.SUCCESS
        result = {'_id': self.backend.get_key_for_task(task_id), 'type': 'Result', 'status': status}
        result['delivery'] = [0, 0, item['attempts']]
        if giver is None:
            self.results.put({**result, 'date': self._clock.now()}, '1-own')
        else:
            tag = f'{self.name}-{next(self._numbers)}'
            doc = region.returned(giver.region, task_id, tag, result, giver.record, self._clock.now())
            self.regions.put(doc, f'1-{tag}')
        if acknowledge:
            self.broker.bulk([workitem.deleted(item)])
        else:
            self.broker.bulk([workitem.release(item)])
        return task_id if status == states.SUCCESS else None
