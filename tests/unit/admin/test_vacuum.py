"""Decisions of the vacuum, without a server: which tombstones it purges and when, batch sizes, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kombu_couchdb.admin.cluster import Cluster, Refused
from kombu_couchdb.admin.vacuum import DeletedDocument, Marks, batches, is_ours
from kombu_couchdb.contrib.parcels.parcel import moved_id
from kombu_couchdb.contrib.regions.region import record_id, returned
from kombu_couchdb.couchdb.address import Address
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import idempotency, workitem
from kombu_couchdb.documents.ids import job_id

#: The id of a message.
MESSAGE = '065bfeda25e000000abcdef0123456'


OURS = [
    MESSAGE,
    f'{MESSAGE}-2',
    workitem.new_id(1_790_000_000.0),
    job_id('q', 'shop.add', 'customer 42'),
    'broker:binding:["a","b","c"]',
    'celery-task-meta-5',
    'shop\n_celery-taskset-meta-5',
    'chord-unlock-5:part:0',
    moved_id('celery_parcels', 'order-17'),
    f'p:{MESSAGE}',
    record_id('eu-west', 'some task', MESSAGE),
    returned('us', 'some task', 'a', {}, None, 0.0)['_id'],
]
FOREIGN = ['invoice-5', '', 'jobs', '_design/celery-v1', 'x' * 30, MESSAGE[:-1], MESSAGE.upper(), 'p:order-17']


def test_documents_of_these_packages_are_recognized_by_id() -> None:
    with idempotency.idempotent('chord-unlock-5'):
        once = str(idempotency.fixed_id({'headers': {'id': 'some task'}}))
    assert [doc_id for doc_id in [*OURS, once] if not is_ours(doc_id)] == []
    # CouchDB generates ids such as the last one for documents without an id.
    assert [doc_id for doc_id in [*FOREIGN, f'{MESSAGE}-x', once.rpartition(':')[2]] if is_ours(doc_id)] == []


def test_purge_requests_fit_the_limits_of_couchdb() -> None:
    many = [DeletedDocument(f'a{number}', ('1-a',)) for number in range(250)]
    torn = [
        DeletedDocument('b', tuple(f'2-{number}' for number in range(2500))),
        DeletedDocument('c', tuple(f'2-{number}' for number in range(400))),
        DeletedDocument('d', ('2-a',) * 400),
    ]
    found = list(batches([*many, *torn]))
    assert all(0 < len(batch) <= 100 and sum(map(len, batch.values())) <= 1000 for batch in found)
    purged = [(doc_id, rev) for batch in found for doc_id, revs in batch.items() for rev in revs]
    assert sorted(purged) == sorted((tombstone.id, rev) for tombstone in [*many, *torn] for rev in tombstone.revs)
    assert list(batches([])) == []


def cluster(monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], welcome: str = 'couchdb') -> Cluster:
    """Return a cluster whose server sends the given responses."""
    found = Cluster(Client(Address(user='me', password='secret-word')))

    def request(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        answer = answers.get(path, {'purged': {}})
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(found.client, 'welcome', lambda: {welcome: 'Welcome'})
    monkeypatch.setattr(found.client, 'request', request)
    return found


def test_nothing_is_purged_while_a_node_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match=r'node b@host is down.*start it, or take it out of the cluster$'):
        cluster(monkeypatch, {'/_membership': {'all_nodes': ['a@host'], 'cluster_nodes': ['a@host', 'b@host']}}).check()


NODES = {'all_nodes': ['a@host', 'b@host', 'c@host'], 'cluster_nodes': ['a@host', 'b@host']}


def systems(**second: Any) -> dict[str, Any]:
    """Return the responses of a cluster whose second node reports this state."""
    good = {'uptime': 1000, 'internal_replication_jobs': 0}
    return {'/_membership': NODES, '/_node/a%40host/_system': good, '/_node/b%40host/_system': {**good, **second}}


def test_node_that_may_have_missed_deletions_stops_the_vacuum(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, systems()).synchronise(300)
    with pytest.raises(Refused, match=r'node b@host was started 20 s ago'):
        cluster(monkeypatch, systems(uptime=20)).synchronise(300)
    monkeypatch.setattr('kombu_couchdb.admin.cluster._REPLICATION_SECONDS', 0.0)
    with pytest.raises(Refused, match='still sends'):
        cluster(monkeypatch, systems(internal_replication_jobs=3)).synchronise(300)


def test_vacuum_does_not_wait_for_work_on_other_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(**task: Any) -> bool:
        return cluster(monkeypatch, {'/_active_tasks': [task]}).busy('indexer', 'view_compaction')

    part = 'shards/00000000-7fffffff/celery.1795274911'
    assert busy(type='indexer', database=part)
    assert not busy(type='replication', database=part)
    assert not busy(type='indexer', database='shards/00000000-7fffffff/celery2.1795274911')
    assert not busy(type='indexer', database='shards/00000000-7fffffff/my/celery.1795274911')
    assert not busy(type='replication')


def test_only_our_documents_are_written_again() -> None:
    """Members can write the list of ids that were being purged."""
    ours = ['broker:queue:q', 'celery-task-meta-1']
    client: Any = SimpleNamespace(get=lambda doc_id: {'purging': ['invoice', *ours, '_design/x']})
    assert Marks(client).purging() == ours
