"""The status of queues, consumers, databases and the server, as dictionaries for JSON.

Durations are seconds, sizes are bytes, dates are seconds since the epoch. The numbers come from several requests, one
after the other, while workers run, so they may not add up exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any, TypedDict

from .. import design
from ..couchdb.client import Client, Document
from ..couchdb.shapes import exactly, items, maybe, members, number, text
from ..design.rows import QueueCount
from ..documents.ids import CONSUMER, LEADER, PAUSE, QUEUE
from ..documents.queue import is_internal
from ..documents.shared_documents import Consumer, Leader, Queue, ReportedTask
from ..errors import AccessDenied, DatabaseMissing, NotFound
from ..leases.leader import LEASE_SECONDS
from ..leases.lease import ends_at, queues_of
from ..leases.worker_load import WorkerLoad, reported
from ..queues.backlog import EMPTY, Backlog, backlog
from ..queues.databases import broadcasts_of
from ..queues.store import Store
from ..schema import Schema
from .claimants import host_and_process, name_of
from .queues import Paused, paused_in

#: What is read of these documents.
_QUEUE, _CONSUMER, _LEADER = Schema.of(Queue, 'type', 'name'), Schema.of(Consumer), Schema.of(Leader)

#: The shapes of the rows that are read here. The key of a malformed item can be anything.
_DEAD = members(key=exactly(lambda queue: True), value=number)
#: The shape of the response about a database.
_INFO = members(
    doc_count=number, doc_del_count=maybe(number), sizes=maybe(members(file=maybe(number), active=maybe(number)))
)


#: The shape of what a heartbeat says of a worker's pool.
_POOL = members(name=text, processes=number, since=number, versions=items(text))


class QueueStatus(Backlog):
    """The messages in one queue."""

    #: Messages that a worker has claimed, and has not reported as running.
    prefetched: int
    #: Tasks that workers report as running, also those whose messages are acknowledged.
    running: int
    #: Dead letters.
    dead: int
    #: Messages acknowledged per second, by consumers with a current lease.
    rate: float
    #: Since when, by whom and why the queue is paused; None if it is not paused.
    paused: Paused | None
    #: Whether the queue is deleted with its last consumer, as those for replies, events and remote control are.
    temporary: bool


class HeartbeatStatus(TypedDict):
    """One consumer, from its heartbeat document."""

    id: str
    #: The node name of the Celery worker that it is, such as `w1@host`; otherwise host and process id.
    name: str
    host: str
    pid: int | None
    queues: list[str]
    #: The age of the last heartbeat in seconds; None if the date is malformed.
    heartbeat: float | None
    #: Messages acknowledged per second.
    rate: float
    #: Whether the consumer's lease is current. It lasts for longer if the consumer holds nothing.
    alive: bool
    #: The tasks that it reports as running, the longest running first; at most 100.
    running: list[ReportedTask]
    #: What the optional room `metrics` counts of its tasks, as the document has it; empty without it.
    tasks: dict[str, Any]
    #: Its pool: `name`, number of `processes`, `since` when it runs (seconds since the epoch) and `versions`; empty if
    #: it is no Celery worker.
    pool: dict[str, Any]


class ConsumerStatus(HeartbeatStatus):
    """One consumer, with what it has claimed and leads."""

    #: Messages that it has claimed, and has not reported as running.
    prefetched: int
    #: The duties that its process leads.
    leads: list[str]


class LeaderStatus(TypedDict):
    """The process that does a duty which only one may do at a time, such as beat, as its document says."""

    #: `beat:`, `parcels:` or `region:`, and a name.
    duty: str
    #: The node name of the leader, such as `w1@host` or `beat@host`, or else its host and process id; None if the last
    #: leader has stopped and no other has taken over.
    name: str | None
    #: Host, process id and a random number; None as above.
    holder: str | None
    #: How long ago the leader has renewed its lease, in seconds; None if the date is malformed.
    renewed: float | None
    #: Whether its lease is current.
    alive: bool


class DatabaseStatus(TypedDict):
    """One database. The embedded server does not know `tombstones`, `size` and `active`: they are None."""

    name: str
    documents: int
    tombstones: int | None
    #: The size of the files, in bytes.
    size: int | None
    #: The size of the data in the files, in bytes.
    active: int | None


class ServerStatus(TypedDict):
    """The server of the broker's database. The URL has no user and no password."""

    url: str
    version: str
    vendor: str
    embedded: bool


class Status(TypedDict):
    """The result of `status`."""

    server: ServerStatus
    queues: dict[str, QueueStatus]
    #: The number of messages whose queue is not text. They are dead letters.
    malformed: int
    consumers: list[ConsumerStatus]
    #: One for each duty that only one process may do at a time, such as beat.
    leaders: list[LeaderStatus]
    database: DatabaseStatus
    #: None if it is missing, or the user may not read it: then every consumer follows the broker's database.
    broadcasts: DatabaseStatus | None
    #: None if the result backend is not CouchDB, or if its database does not exist yet.
    results: DatabaseStatus | None


def status(
    client: Client,
    results: Client | None = None,
    *,
    temporary: bool = False,
    earlier: Status | None = None,
    max_ages: float = inf,
) -> Status:
    """Return the status of the broker's database, and of the database of `results` if given.

    Unless `temporary` is true, queues for replies, events and remote control are hidden, and so are other auto-delete
    queues, in `queues` while they are empty, in a consumer's `queues` always. Server and databases are those of an
    `earlier` status, if it is given. Six requests then, and otherwise up to ten, for any number of queues. For
    `max_ages` see `backlog`. *Raises* `DatabaseMissing` if the broker's database is not set up.
    """
    try:
        stores = earlier or _stores(client, results)
        # Before the heartbeats: an idle consumer writes one with its first claim.
        claimed = Store(client).claim_counts()
        pauses_and_consumers = _documents(client, PAUSE, CONSUMER)
        heartbeats = [doc for doc in pauses_and_consumers if doc.get('type') == 'Consumer']
        pauses = paused_in(pauses_and_consumers)
        load = WorkerLoad(claimed, heartbeats, client.clock.now())
        leaders_and_queues = _documents(client, LEADER, QUEUE)
        declared = {doc['name']: doc for doc in leaders_and_queues if _is_queue(doc)}
        auto_delete = {name for name, doc in declared.items() if doc.get('auto_delete')}
        hidden = set() if temporary else auto_delete
        names = {*(declared.keys() - hidden), *pauses}
        queues, malformed = _queues(client, backlog(client, max_ages), names, auto_delete, pauses, load)
    except (DatabaseMissing, NotFound) as exc:
        raise DatabaseMissing(
            f'{client.address.url}: the database is not set up; run "celery -A your_app couchdb setup"'
        ) from exc
    if not temporary:
        internal = {name for name, doc in declared.items() if is_internal(doc)}
        queues = {name: queue for name, queue in queues.items() if name not in internal}
    now = client.clock.now()
    led = [_leader(doc, now) for doc in leaders_and_queues if doc.get('type') == 'Leader']
    serving = {(doc.get('host'), doc.get('pid')) for doc in heartbeats if queues_of(doc) - hidden}
    found = list[ConsumerStatus]()
    for doc in heartbeats:
        heartbeat = _heartbeat(doc, now, alive=doc['_id'] in load.alive)
        heartbeat['queues'] = [name for name in heartbeat['queues'] if name not in hidden]
        is_served = (heartbeat['host'], heartbeat['pid']) in serving
        if not heartbeat['queues'] and (is_served or _only_receives_replies(doc)):
            continue  # the connection of a worker for remote control alone, or one that only receives replies
        own = f'{heartbeat["host"]}:{heartbeat["pid"]}:'
        leads = [lead['duty'] for lead in led if lead['alive'] and str(lead['holder']).startswith(own)]
        found.append({**heartbeat, 'prefetched': load.of_consumers[doc['_id']], 'leads': leads})
        for name, rate in _CONSUMER.clean(doc).get('rates', {}).items():
            if heartbeat['alive'] and name in queues:
                queues[name]['rate'] = round(queues[name]['rate'] + rate, 3)
    return {
        'server': stores['server'],
        'queues': queues,
        'malformed': malformed,
        'consumers': found,
        'leaders': led,
        'database': stores['database'],
        'broadcasts': stores['broadcasts'],
        'results': stores['results'],
    }


# -- queues


def _is_queue(doc: Document) -> bool:
    return _QUEUE.accepts(doc)


def _queues(
    client: Client,
    found: Mapping[str, Backlog],
    declared: Iterable[str],
    auto_delete: Collection[str],
    pauses: Mapping[str, Paused],
    load: WorkerLoad,
) -> tuple[dict[str, QueueStatus], int]:
    """Return the declared queues and those with messages, by name, and the number of messages without a valid queue."""
    dead = Counter[str]()
    malformed = 0
    for row in map(QueueCount.from_row, client.view(design.NAME, 'dead', _DEAD, group_level=1)):
        if row.queue is not None:
            dead[row.queue] += row.total
        else:
            malformed += row.total
    return {
        name: {
            **found.get(name, EMPTY),
            'prefetched': load.prefetched[name],
            'running': load.running[name],
            'dead': dead[name],
            'rate': 0.0,
            'paused': pauses.get(name),
            'temporary': name in auto_delete,
        }
        for name in sorted({*declared, *found, *dead, *load.prefetched, *load.running})
    }, malformed


# -- consumers


def _only_receives_replies(doc: Document) -> bool:
    """Tell whether a heartbeat, which may be malformed, without a queue to show is not of a worker."""
    return isinstance(doc.get('queues'), list) and not isinstance(doc.get('worker'), str)


def consumers(client: Client, prefix: str = '') -> list[HeartbeatStatus]:
    """Return the consumers whose ids begin with `prefix`, which may be a host's name and a colon; one request.

    It does not read who holds messages, so each is alive for as long as if it held none.
    """
    docs, now = _documents(client, CONSUMER + prefix, CONSUMER + prefix), client.clock.now()
    return [_heartbeat(doc, now, alive=ends_at(doc) > now) for doc in docs if doc.get('type') == 'Consumer']


def _heartbeat(doc: Document, now: float, *, alive: bool) -> HeartbeatStatus:
    doc = _CONSUMER.clean(doc)
    written = doc.get('date')
    return {
        'id': doc['_id'].removeprefix(CONSUMER),
        'name': name_of(doc),
        'host': str(doc.get('host')),
        'pid': doc.get('pid'),
        'queues': doc.get('queues', []),
        'heartbeat': None if written is None else round(max(0.0, now - written), 3),
        'rate': round(sum(doc.get('rates', {}).values()), 3),
        'alive': alive,
        'running': reported(doc),
        'tasks': doc.get('tasks', {}),
        'pool': doc['pool'] if _POOL(doc.get('pool')) else {},
    }


# -- leaders


def leaders(client: Client) -> list[LeaderStatus]:
    """Return the leader of each duty; one request."""
    docs, now = _documents(client, LEADER, LEADER), client.clock.now()
    return [_leader(doc, now) for doc in docs if doc.get('type') == 'Leader']


def _leader(doc: Document, now: float) -> LeaderStatus:
    doc = _LEADER.clean(doc)
    holder = doc.get('holder')
    renewed = round(max(0.0, now - doc['date']), 3) if 'date' in doc else None
    lease = doc.get('lease', LEASE_SECONDS)
    return {
        'duty': doc['_id'].removeprefix(LEADER),
        'name': holder and (doc.get('node') or host_and_process(holder)),
        'holder': holder,
        'renewed': renewed,
        'alive': holder is not None and renewed is not None and renewed < lease,
    }


# -- databases and server


class _Stores(TypedDict):
    server: ServerStatus
    database: DatabaseStatus
    broadcasts: DatabaseStatus | None
    results: DatabaseStatus | None


def _stores(client: Client, results: Client | None) -> _Stores:
    greeting = client.welcome()
    return {
        'server': _server(client, greeting),
        'database': _database(client),
        'broadcasts': _optional(broadcasts_of(client)),
        'results': _optional(results),
    }


def _database(client: Client) -> DatabaseStatus:
    info = client.info(_INFO)
    sizes = info.get('sizes') or {}
    return {
        'name': client.address.database,
        'documents': info['doc_count'],
        'tombstones': info.get('doc_del_count'),
        'size': sizes.get('file'),
        'active': sizes.get('active'),
    }


def _optional(client: Client | None) -> DatabaseStatus | None:
    """Return a database; None if it does not exist (its first use creates it if the user may), or may not be read."""
    try:
        return _database(client) if client else None
    except (DatabaseMissing, AccessDenied):
        return None


def _server(client: Client, greeting: Document) -> ServerStatus:
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


def _documents(client: Client, first: str, last: str) -> list[Document]:
    """Return the documents whose ids begin with `first`, with `last`, or sort between them; one request."""
    return [row['doc'] for row in client.id_range(first, to=last, docs=True)]
