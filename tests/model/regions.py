"""Two regions in a model: ferries, the database of regions of each, and what may happen to parcels, in any order.

The code of `Lender`, `Fallbacks`, `Mover` and `RegionMover` runs as it is. Databases are dictionaries whose documents
have the histories of their revisions, as CouchDB's have. A crash is an error before or after any request of a ferry.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any, cast

from celery_couchdb.regions.lending import Lender, Looks
from celery_couchdb.regions.region_mover import Fallbacks, RegionMover
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.documents import workitem
from kombu_couchdb.documents.types import Document
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.parcels import parcel
from kombu_couchdb.regions import region

__all__ = ['Crash', 'Place', 'other']


class Crash(ServerUnavailable):
    """The ferry is killed here, or its request gets no response."""


class Database:
    """One database: for each document the winning revision, and all revisions that it ever had."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.docs: dict[str, Document] = {}
        self.history: dict[str, set[str]] = {}
        self.clock, self._numbers = clock, itertools.count()
        #: Called before and after each request; it may raise `Crash`.
        self.on_request: Callable[[], None] = lambda: None

    def live(self, pattern: str = '*') -> list[Document]:
        """Return the documents that are not deleted, in the order of their ids."""
        return [doc for doc_id, doc in sorted(self.docs.items()) if fnmatchcase(doc_id, pattern) and not _gone(doc)]

    def put(self, doc: Mapping[str, Any], rev: str) -> None:
        """Store a revision."""
        self.docs[doc['_id']] = {**doc, '_rev': rev}
        self.history.setdefault(doc['_id'], set()).add(rev)

    def replicate(self, source: Database, wanted: Callable[[str], bool]) -> None:
        """Replicate from another database. Of two leaves, one that is not deleted wins, as in CouchDB."""
        for doc_id, doc in source.docs.items():
            if wanted(doc_id):
                known, mine = self.history.setdefault(doc_id, set()), self.docs.get(doc_id)
                if doc['_rev'] in known:
                    continue
                is_newer = mine is None or mine['_rev'] in source.history[doc_id]
                known |= source.history[doc_id]
                if is_newer or (mine is not None and _gone(mine) and not _gone(doc)):
                    self.docs[doc_id] = doc

    # -- what the ferry calls, see `Client`

    def bulk(self, docs: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
        self.on_request()
        results = []
        for doc in docs:
            mine = self.docs.get(doc['_id'])
            if (mine is None or _gone(mine)) if '_rev' not in doc else (mine or {}).get('_rev') == doc['_rev']:
                rev = f'{next(self._numbers)}-{id(self)}'
                self.put(doc, rev)
                results.append(WriteResult(doc['_id'], WriteStatus.STORED, rev))
            else:
                results.append(WriteResult.conflict(doc['_id']))
        self.on_request()
        return results

    def create_once(self, docs: Sequence[Mapping[str, Any]]) -> list[WriteResult]:
        self.on_request()
        for doc in docs:
            if 'first' not in self.history.get(doc['_id'], ()):
                self.put(doc, 'first')
        self.on_request()
        return [WriteResult(doc['_id'], WriteStatus.STORED, 'first') for doc in docs]

    def fetch(self, ids: Sequence[str]) -> list[Document | None]:
        self.on_request()
        found = [self.docs.get(doc_id) for doc_id in ids]
        return [None if doc is None or _gone(doc) else doc for doc in found]

    find = fetch

    def get_or_none(self, doc_id: str) -> Document | None:
        return self.fetch([doc_id])[0]

    def fetch_leaves(self, ids: Sequence[str]) -> list[list[Document]]:
        return [[doc] if doc else [] for doc in self.fetch(ids)]

    def is_cluster(self) -> bool:
        return False

    def view(self, name: str, view: str, *_: Any, **arguments: Any) -> list[dict[str, Any]]:
        self.on_request()
        rows = [row for doc in self.live() for row in _VIEWS[view](doc)]
        if 'startkey' in arguments:
            start, first = arguments['startkey'], len(arguments['startkey'])
            rows = [row for row in rows if row['key'][:first] == start and _is_before(row['key'], arguments['endkey'])]
        return rows[: arguments.get('limit')]


def _gone(doc: Mapping[str, Any]) -> bool:
    return bool(doc.get('_deleted'))


def _is_before(key: list[Any], end: list[Any]) -> bool:
    return isinstance(end[-1], dict) or key[-1] <= end[-1]


def _traffic(doc: Document) -> list[dict[str, Any]]:
    to, origin = [*doc['_id'].split(':'), '', ''][1:3]
    is_parcel = doc['_id'].startswith('p:')
    return [{'id': doc['_id'], 'key': [0, to, origin, 0], 'value': [doc['_rev'], 1]}] if is_parcel else []


def _fallbacks(doc: Document) -> list[dict[str, Any]]:
    return [{'id': doc['_id'], 'key': [doc['_id'].split(':')[2], doc['fallback_at']]}] if 'fallback' in doc else []


def _lendable(doc: Document) -> list[dict[str, Any]]:
    if doc.get('type') == 'LentItem':
        return [{'id': doc['_id'], 'key': [None, doc['lent']]}]
    return [{'id': doc['_id'], 'key': ['q', 0]}] if doc.get('type') == 'WorkItem' and not doc['claimed'] else []


def _waiting(doc: Document) -> list[dict[str, Any]]:
    is_item = doc.get('type') == 'WorkItem' and not doc['claimed']
    return [{'id': doc['_id'], 'key': ['q', 9], 'value': 1}] if is_item else []


_VIEWS: dict[str, Callable[[Document], list[dict[str, Any]]]] = {
    'traffic': _traffic,
    'fallbacks': _fallbacks,
    'lendable': _lendable,
    'waiting': _waiting,
}


class ModelFerry(RegionMover):
    """A ferry whose messages are stored in the model; every process believes that it is the leader."""

    def __init__(self, place: Place) -> None:
        client: Any = place.regions
        broker: Any = place.broker
        others = [other(place.name)]
        self.region, self._client, self._receipts, self._deleted = place.name, client, None, set()
        self._wants = cast(Any, SimpleNamespace(note_arrived=lambda count: None))
        self._harmful = cast(Any, SimpleNamespace(replace=lambda: None))  # no view of the model fails
        looks = Looks(cast(Any, SimpleNamespace(watch=lambda: None, is_enough=False)))
        self.lender = self._lender = Lender(broker, client, place.name, others, 1.0, ['json'], looks)
        self._fallbacks = Fallbacks(client, place.name, others, self._move)
        self._transport = SimpleNamespace(store_items=lambda items, once: place.publish(items))

    def _items_of(self, doc: Document) -> list[Any]:
        message = {**doc['message'], 'properties': {'delivery_tag': parcel.moved_id(doc['_id'])}}
        return [workitem.new(parcel.moved_id(doc['_id']), 'q', message, 0.0)]

    def arrive(self) -> None:
        """Publish the parcels that are here."""
        self.do_batch()

    def lend(self) -> None:
        """Finish what was begun, and lend what the other region wants."""
        self._lender.read_wants()
        self._lender._finish_at, self._lender._looks.next_at = 0.0, time.monotonic() - 1
        self._lender.step()

    def fall_back(self) -> None:
        """Withdraw the parcels that are due."""
        self._fallbacks.read()
        self._fallbacks.step()


class Place:
    """A region: its two databases, two ferries, and the tasks that ran."""

    def __init__(self, name: str, clock: SimpleNamespace) -> None:
        self.name, self.broker, self.regions = name, Database(clock), Database(clock)
        self.ferries = [ModelFerry(self), ModelFerry(self)]

    def publish(self, items: Sequence[Any]) -> list[WriteResult]:
        """Store new messages as `Store.publish_once` does."""
        new = [item for item in items if item['_id'] not in self.broker.history]
        return [result for result in self.broker.create_once(new) if not result.is_stored]

    def restart(self, number: int) -> None:
        """Replace a ferry by another process."""
        self.ferries[number] = ModelFerry(self)

    def send(self, task_id: str, to: str, fallback: float | None) -> None:
        """Send a task to a region; `fallback` is the time at which it runs here instead."""
        message: Any = {
            'body': '[[], {}, {"chord": null, "chain": null}]',
            'headers': {'task': 'add', 'id': task_id},
            'properties': {'delivery_tag': task_id, 'body_encoding': 'utf-8'},
            'content-type': 'application/json',
            'content-encoding': 'utf-8',
        }
        if to in (region.ANY, self.name):
            if to == region.ANY:
                message['properties']['region'] = to
            self.broker.put(workitem.new(task_id, 'q', message, 0.0), 'first')
            return
        doc: Any = parcel.new(message, '', 'q', 0.0)
        doc['_id'] = region.parcel_id(to, self.name, task_id)
        if fallback is not None:
            doc['fallback'], doc['fallback_at'] = self.name, fallback
        self.regions.put(doc, 'first')

    def want(self, count: int) -> None:
        """Write the Region document."""
        doc = region.new(self.name, {'q': count}, 0.0)
        rev = self.regions.docs.get(doc['_id'], {}).get('_rev')
        self.regions.bulk([{**doc, '_rev': rev} if rev else cast(Any, doc)])

    def pull(self, source: Place) -> None:
        """Replicate from another region what travels between the two."""
        prefixes = (f'p:{self.name}:{source.name}:', f'p:{source.name}:{self.name}:', f'region:{source.name}')
        self.regions.replicate(source.regions, lambda doc_id: doc_id.startswith(prefixes))


def other(name: str) -> str:
    """Return the other region."""
    return {'us': 'eu', 'eu': 'us'}[name]
