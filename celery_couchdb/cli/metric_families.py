"""The metrics of `celery couchdb metrics`, made from a status. Imports prometheus_client, which is optional."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from kombu_couchdb.admin.status import Queue, Status
from kombu_couchdb.log import printable

__all__ = ['Reading', 'families', 'up']


class Reading(NamedTuple):
    """A status, and how many seconds the requests for it took."""

    status: Status
    seconds: float


def up(responds: bool) -> Metric:
    """Return the metric that says whether CouchDB responds. The others are missing if it does not."""
    return GaugeMetricFamily(
        'celery_couchdb_up', 'Whether CouchDB responds and the status can be read.', float(responds)
    )


def families(reading: Reading, queues: Collection[str] = ()) -> Iterator[Metric]:
    """Yield the metrics of a status.

    Only those of `queues` are exported, if there are any; otherwise those of all queues but temporary ones, whose names
    are new each time. Labels have control characters as escapes, as all output of the commands has.
    """
    found = reading.status
    server = found['server']
    yield InfoMetricFamily(
        'celery_couchdb_server',
        'The server of the broker.',
        {'version': printable(server['version']), 'vendor': printable(server['vendor'])},
    )
    yield GaugeMetricFamily(
        'celery_couchdb_reading_seconds', 'How long the requests for these metrics took.', reading.seconds
    )
    exported = {
        name: queue for name, queue in found['queues'].items() if (name in queues if queues else not queue['temporary'])
    }
    yield from _queues(exported, found)
    yield GaugeMetricFamily(
        'celery_couchdb_malformed_messages', 'Dead letters whose queue cannot be read.', found['malformed']
    )
    consumers = GaugeMetricFamily(
        'celery_couchdb_consumers',
        'Consumers with a current lease (alive), and those without a heartbeat in time (overdue).',
        labels=['state'],
    )
    alive = sum(one['alive'] for one in found['consumers'])
    consumers.add_metric(['alive'], alive)
    consumers.add_metric(['overdue'], len(found['consumers']) - alive)
    yield consumers
    leaders = GaugeMetricFamily(
        'celery_couchdb_leader_renewed_seconds',
        'How long ago the leader of a duty, such as beat, has renewed its lease.',
        labels=['duty'],
    )
    for leader in found['leaders']:
        if leader['renewed'] is not None:
            leaders.add_metric([printable(leader['duty'])], leader['renewed'])
    yield leaders
    yield from _databases(found)


def _queues(queues: dict[str, Queue], found: Status) -> Iterator[Metric]:
    messages = GaugeMetricFamily(
        'celery_couchdb_queue_messages',
        'Messages by state: ready now, scheduled for later, parked by a limit, held by a worker, or dead letters.',
        labels=['queue', 'state'],
    )
    oldest = GaugeMetricFamily(
        'celery_couchdb_queue_oldest_seconds',
        'How long the oldest ready message has been due; 0 without ready messages.',
        labels=['queue'],
    )
    rate = GaugeMetricFamily(
        'celery_couchdb_queue_acknowledged_per_second',
        'Messages acknowledged per second, between the last two heartbeats of each consumer.',
        labels=['queue'],
    )
    consumers = GaugeMetricFamily(
        'celery_couchdb_queue_consumers', 'Consumers of the queue with a current lease.', labels=['queue']
    )
    paused = GaugeMetricFamily('celery_couchdb_queue_paused', 'Whether the queue is paused: 1 or 0.', labels=['queue'])
    for name, queue in queues.items():
        label = printable(name)
        counts = {
            'ready': queue['ready'],
            'scheduled': queue['scheduled'],
            'parked': queue['parked'],
            'held': queue['held'],
            'dead': queue['dead'],
        }
        for state, count in counts.items():
            messages.add_metric([label, state], count)
        oldest.add_metric([label], queue['oldest'] or 0.0)
        rate.add_metric([label], queue['rate'])
        consumers.add_metric([label], sum(one['alive'] and name in one['queues'] for one in found['consumers']))
        paused.add_metric([label], float(queue['paused'] is not None))
    yield from (messages, oldest, rate, consumers, paused)


def _databases(found: Status) -> Iterator[Metric]:
    given = {'broker': found['database'], 'broadcasts': found['broadcasts'], 'results': found['results']}
    databases = {role: database for role, database in given.items() if database is not None}
    for name, text, member in (
        ('documents', 'Documents in the database.', 'documents'),
        ('tombstones', 'Deleted documents that CouchDB keeps a record of.', 'tombstones'),
        ('size_bytes', 'The size of the files of the database.', 'size'),
        ('active_bytes', 'The size of the data in the files of the database.', 'active'),
    ):
        family = GaugeMetricFamily(f'celery_couchdb_database_{name}', text, labels=['database', 'role'])
        for role, database in databases.items():
            value: Any = database.get(member)
            if value is not None:
                family.add_metric([printable(database['name']), role], value)
        yield family
