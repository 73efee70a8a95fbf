"""Status of queues, consumers, databases and the server, as plain numbers that JSON can hold.

Durations are seconds, sizes bytes. The numbers are read by a handful of requests, one after the other, while work goes on: they
need not add up exactly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, TypedDict

from .. import design
from ..couchdb.client import LAST, Client, Document
from ..couchdb.shapes import exactly, maybe, members, number, text
from ..design.rows import ClaimCount, QueueCount
from ..documents.ids import CONSUMER, QUEUE
from ..errors import DatabaseMissing, NotFound
from ..queues import waiting

__all__ = ['Consumer', 'Database', 'Queue', 'Server', 'Status', 'status']


#: The rows of the views, as they are read here.
_COUNT = members(value=number)
_COUNTED = members(key=exactly(lambda queue: True, number), value=number)
_DEAD = members(key=exactly(lambda queue: True), value=number)
_CLAIMED = members(key=exactly(text, text, lambda queue: True), value=members(count=number))
_WAITING = members(key=exactly(text, number, number))
#: What a database says of itself.
_INFO = members(
    doc_count=number, doc_del_count=maybe(number), sizes=maybe(members(file=maybe(number), active=maybe(number)))
)


class Queue(TypedDict):
    """How many messages a queue has, since when its oldest ready one has been due, and what is acknowledged a second.

    `held` is what consumers have claimed and not acknowledged, begun or not: what has begun is not in the database.
    `running` is the same number under its earlier name.
    """

    ready: int
    scheduled: int
    held: int
    running: int
    dead: int
    oldest: float | None
    rate: float


class Consumer(TypedDict):
    """A heartbeat document; `heartbeat` is how long ago it was written, None where an older version does not say so."""

    id: str
    host: str
    pid: int | None
    queues: list[str]
    heartbeat: float | None
    rate: float
    alive: bool


class Database(TypedDict):
    """A database. `size` is that of its files, `active` that of what they hold; the embedded server tells neither."""

    name: str
    documents: int
    tombstones: int | None
    size: int | None
    active: int | None


class Server(TypedDict):
    """Where the broker's database is, without user and password, and what answers there."""

    url: str
    version: str
    vendor: str
    embedded: bool


class Status(TypedDict):
    """All of it. `spoilt` counts the messages whose queue cannot be read, `results` is None where there are none of ours."""

    server: Server
    queues: dict[str, Queue]
    spoilt: int
    consumers: list[Consumer]
    database: Database
    results: Database | None


def status(client: Client, results: Client | None = None, *, temporary: bool = False) -> Status:
    """Return how things stand in the broker's database and, if there is one, in the one of `results`.

    Queues that go with their consumer (for replies, events and remote control) are left out while they are empty, and are not
    named as queues of consumers, unless `temporary` is true. About ten requests, however many queues there are.
    *Raises* `DatabaseMissing` if the broker's database is not set up.
    """
    greeting = client.welcome()
    try:
        database = _database(client)
        declared = {doc['name']: doc for doc in _documents(client, QUEUE, 'Queue') if isinstance(doc.get('name'), str)}
        heartbeats = _documents(client, CONSUMER, 'Consumer')
        hidden = {name for name, doc in declared.items() if doc.get('auto_delete') and not temporary}
        queues, spoilt = _queues(client, declared.keys() - hidden)
    except (DatabaseMissing, NotFound) as exc:
        raise DatabaseMissing(
            f'{client.address.url}: the database is not set up; run "celery -A your_app couchdb setup"'
        ) from exc
    now = client.clock.now()
    consumers = [_consumer(doc, now) for doc in heartbeats]
    for doc, consumer in zip(heartbeats, consumers, strict=True):
        consumer['queues'] = [name for name in consumer['queues'] if name not in hidden]
        for name, rate in _rates(doc).items():
            if consumer['alive'] and name in queues:
                queues[name]['rate'] = round(queues[name]['rate'] + rate, 3)
    return {
        'server': _server(client, greeting),
        'queues': queues,
        'spoilt': spoilt,
        'consumers': consumers,
        'database': database,
        'results': _results(results),
    }


# -- queues


def _queues(client: Client, declared: Iterable[str]) -> tuple[dict[str, Queue], int]:
    """Return the queues that have messages or are declared, by name, and how many messages have none that can be read."""
    found, dead, held = Counter[str](), Counter[str](), Counter[str]()
    places: dict[str, list[int]] = defaultdict(list)  # of the view: the ranks, and that of what is planned
    spoilt = 0
    for row in map(QueueCount.of, client.view(design.NAME, 'waiting', _COUNTED, group_level=2)):
        if row.queue is not None:
            found[row.queue] += row.total
            places[row.queue].append(row.rank)
    for row in map(QueueCount.of, client.view(design.NAME, 'dead', _DEAD, group_level=1)):
        if row.queue is not None:
            dead[row.queue] += row.total
        else:
            spoilt += row.total
    claims = client.view(design.NAME, 'leases', _CLAIMED, group_level=3, startkey=['claim'], endkey=['claim', LAST])
    for claim in map(ClaimCount.of, claims):
        if claim.queue is not None:
            held[claim.queue] += claim.total
    now = client.clock.now()
    scheduled = _scheduled(client, [name for name, its in places.items() if design.PLANNED in its], now)
    oldest = _oldest(client, places, now)
    return {
        name: {
            'ready': max(0, found[name] - scheduled.get(name, 0)),
            'scheduled': scheduled.get(name, 0),
            'held': held[name],
            'running': held[name],
            'dead': dead[name],
            'oldest': oldest.get(name),
            'rate': 0.0,
        }
        for name in sorted({*declared, *found, *dead, *held})
    }, spoilt


def _scheduled(client: Client, names: list[str], now: float) -> dict[str, int]:
    """Return how many messages of each queue are planned for later than `now`."""
    answers = waiting.query(client, [design.rows_of(name, design.PLANNED, now) for name in names], _COUNT)
    return {name: rows[0]['value'] for name, rows in zip(names, answers, strict=True) if rows}


def _oldest(client: Client, places: dict[str, list[int]], now: float) -> dict[str, float]:
    """Return how long the oldest message of each queue has been due, of those that are; `places` says where the view has some."""
    pairs = [(name, place) for name, its in places.items() for place in its]
    # The date of a spoilt message is 0 in the view.
    answers = waiting.query(
        client,
        [
            {'startkey': [key, place, 1], 'endkey': [key, place, now], 'limit': 1, 'reduce': False}
            for key, place in ((design.key_of(name), place) for name, place in pairs)
        ],
        _WAITING,
    )
    oldest: dict[str, float] = {}
    for (name, _), rows in zip(pairs, answers, strict=True):
        for row in rows:
            oldest[name] = max(round(now - row['key'][2], 3), oldest.get(name, 0.0))
    return oldest


# -- consumers


def _consumer(doc: Document, now: float) -> Consumer:
    queues, pid = doc.get('queues'), doc.get('pid')
    written = _number(doc.get('date'))
    return {
        'id': doc['_id'].removeprefix(CONSUMER),
        'host': str(doc.get('host')),
        'pid': pid if isinstance(pid, int) else None,
        'queues': [name for name in queues if isinstance(name, str)] if isinstance(queues, list) else [],
        'heartbeat': None if written is None else round(max(0.0, now - written), 3),
        'rate': round(sum(_rates(doc).values()), 3),
        'alive': (_number(doc.get('expires')) or 0.0) > now,
    }


def _rates(doc: Document) -> dict[str, float]:
    """Return how many messages a second a consumer acknowledged lately, by queue."""
    rates = doc.get('rates')
    found = {name: _number(rate) for name, rate in rates.items()} if isinstance(rates, dict) else {}
    return {name: rate for name, rate in found.items() if rate}


# -- databases and server


def _database(client: Client) -> Database:
    info = client.info(_INFO)
    sizes = info.get('sizes') or {}
    return {
        'name': client.address.database,
        'documents': info['doc_count'],
        'tombstones': info.get('doc_del_count'),
        'size': sizes.get('file'),
        'active': sizes.get('active'),
    }


def _results(client: Client | None) -> Database | None:
    """Return the database of results, None if there is none: it is created with the first result, where the user may do so."""
    try:
        return _database(client) if client else None
    except DatabaseMissing:
        return None


def _server(client: Client, greeting: Document) -> Server:
    embedded = 'couchdb' not in greeting
    return {
        'url': client.address.server,
        'version': str(greeting.get('version')),
        'vendor': 'PouchDB' if embedded else _vendor(greeting),
        'embedded': embedded,
    }


def _vendor(greeting: Document) -> str:
    vendor = greeting.get('vendor')
    return str(vendor.get('name') if isinstance(vendor, dict) else vendor)


def _documents(client: Client, prefix: str, kind: str) -> list[Document]:
    """Return the documents whose ids begin with `prefix`, of one type."""
    return [row['doc'] for row in client.id_range(prefix, docs=True) if (row.get('doc') or {}).get('type') == kind]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
