"""Simulated behaviour of cluster nodes, on any server: lagging nodes and unproven writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteResult, WriteStatus
from kombu_couchdb.unique import ENQUEUED, MOVED, Outcome, collect_outcomes
from tests.conftest import wait_for
from tests.support import Inbox, items, leave_leaf, publish, replace_in_clients

from .conftest import Connect

#: The lease of a consumer in seconds.
LEASE = 2.0


class Cluster:
    """Reports writes of all clients of a database as unproven."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
        #: Returns whether the write of a document is unproven.
        self.unproven: Callable[[Document], bool] = lambda doc: False
        bulk = Client.bulk

        def altered(client: Client, docs: Any, **options: Any) -> list[WriteResult]:
            return [
                answer._replace(status=WriteStatus.UNPROVEN) if answer.is_stored and self.unproven(doc) else answer
                for doc, answer in zip(docs, bulk(client, docs, **options), strict=True)
            ]

        replace_in_clients(monkeypatch, database, 'bulk', altered)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, database: str) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch, database)
    yield cluster
    cluster.unproven = lambda doc: False


def is_heartbeat(doc: Document) -> bool:
    return doc.get('type') == 'Consumer'


def lease_of(inbox: Inbox) -> Any:
    return inbox.connection.transport.consumer._cycle.lease


def lost_leases(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if 'lost its lease' in record.message]


@pytest.fixture
def a_cluster(monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """Make the server report three copies of each document."""
    info = Client.info

    def told(self: Client, *shape: Any) -> Document:
        return {**info(self, *shape), 'cluster': {'n': 3}}

    replace_in_clients(monkeypatch, database, 'info', told)


def test_message_missing_on_a_lagging_node_is_found_later(
    connect: Connect, client: Client, database: str, a_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(connect(), 'there')
    shown: list[str] = []
    request = Client.request

    def behind(self: Client, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        answer = request(self, method, path, *args, **kwargs)
        lacks = str(path).endswith('/waiting/queries') and not shown
        return {'results': [{**result, 'rows': []} for result in answer['results']]} if lacks else answer

    replace_in_clients(monkeypatch, database, 'request', behind)
    monkeypatch.setattr('kombu_couchdb.consumer.cycle._CLUSTER_POLL_SECONDS', 1.0)
    inbox = Inbox(connect())
    inbox.stays(0, 1.0)
    shown.append('all')
    assert inbox.wait(1) == ['there']
    wait_for(lambda: not items(client), 'the ack')


# -- unproven writes


def is_item(doc: Document) -> bool:
    return doc.get('type') == 'WorkItem' or bool(doc.get('_deleted'))


def test_message_with_an_unproven_claim_is_released_without_delivery(
    connect: Connect, client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('kombu_couchdb.leases.sweeper.SYNC', 0.5)
    publish(connect(), 'hello')
    claimed: list[Document] = []

    def claims(doc: Document) -> bool:
        if doc.get('claimed'):
            claimed.append(doc)
        return bool(doc.get('claimed'))

    cluster.unproven = claims
    inbox = Inbox(connect())
    inbox.drain_until(lambda: len(claimed) >= 2, 'a second claim of the released message')
    assert inbox.messages == []
    cluster.unproven = lambda doc: False
    assert inbox.wait(1) == ['hello']
    assert inbox.messages[0].delivery_info['redelivered'] is False  # it was not delivered before
    wait_for(lambda: not items(client), 'the ack')


def test_consumer_with_an_undecided_claim_keeps_its_lease(
    connect: Connect, client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others count the claim, and it holds nothing else."""
    monkeypatch.setattr('kombu_couchdb.leases.sweeper.SYNC', 1000.0)
    cluster.unproven = lambda doc: bool(doc.get('claimed'))
    other = Inbox(connect(visibility_timeout=6.0), 'other')
    publish(connect(), 'hello')
    inbox = Inbox(connect(visibility_timeout=6.0))
    [item] = inbox.drain_until(lambda: [item for item in items(client) if item.get('claimed')], 'the claim')
    by = item['claimed']['by']

    def beats() -> int:
        other.drain(0.1)
        doc = client.fetch([by])[0]
        assert doc is not None, 'its lease was ended'
        return int(doc['beats'])

    inbox.drain_until(lambda: beats() >= 4, 'heartbeats')


def test_unproven_publish_and_ack_succeed(connect: Connect, client: Client, cluster: Cluster) -> None:
    cluster.unproven = lambda doc: is_item(doc) and not doc.get('claimed')
    publish(connect(), 'hello')
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.messages[0].requeue()
    inbox.wait(2)
    inbox.messages[1].ack()
    wait_for(lambda: not items(client), 'the ack')
    inbox.stays(2, 1.0)


def test_unproven_unique_job_gives_way_to_another(
    connect: Connect, client: Client, database: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(task: str, key: str) -> Outcome:
        with collect_outcomes() as outcomes:
            publish(connect(), task, headers={'id': task, 'task': 't', 'job_key': key})
        return outcomes[0]

    cluster.unproven = is_item
    assert send('a', 'x') == Outcome(ENQUEUED, 'a')  # the other nodes are down, so that there is no other job
    [job] = items(client)
    there = {**job, '_id': job['_id'].replace('"x"', '"y"'), 'key': 'y'}
    bulk = Client.bulk

    def elsewhere(self: Client, docs: Any, **options: Any) -> list[WriteResult]:
        answers = bulk(self, docs, **options)
        if docs[0]['_id'] == there['_id'] and len(client.leaves(there['_id'])) == 1:
            # Another node has stored a job with this key before.
            history = {'start': 2, 'ids': ['f' * 32, docs[0]['_rev'].partition('-')[2]]}
            leave_leaf(client, there['_id'], f'2-{"f" * 32}', **{**there, '_revisions': history})
        return answers

    replace_in_clients(monkeypatch, database, 'bulk', elsewhere)
    assert send('b', 'y') == Outcome(MOVED, 'a')
    left = [leaf['message']['headers']['id'] for leaf in client.leaves(there['_id']) if not leaf.get('_deleted')]
    assert left == ['a']


# -- the heartbeat


@pytest.fixture
def expired(connect: Connect, cluster: Cluster) -> Inbox:
    """A consumer that holds a message, and whose lease expired because its heartbeats are unproven."""
    publish(connect(), 'held')
    inbox = Inbox(connect(visibility_timeout=LEASE), ack=False)
    inbox.wait(1)
    cluster.unproven = is_heartbeat
    inbox.drain_until(lambda: not lease_of(inbox).valid, 'the lease to expire')
    return inbox


def test_unproven_heartbeat_does_not_renew_the_lease(
    connect: Connect, client: Client, cluster: Cluster, expired: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), 'not to be delivered')
    expired.stays(1, LEASE / 2)
    cluster.unproven = lambda doc: False
    assert expired.wait(2) == ['held', 'not to be delivered']
    # No sweep has ended the lease, so that the consumer still holds its messages.
    for message in expired.messages:
        message.ack()
    wait_for(lambda: not items(client), 'the acks')
    assert lost_leases(caplog) == []


def test_partitioned_consumer_learns_that_its_lease_was_ended(
    client: Client, cluster: Cluster, expired: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    name = lease_of(expired).id
    # The other side of the network partition has ended the lease.
    leave_leaf(client, name, '2-0123456789abcdef0123456789abcdef', _deleted=True)
    assert client.fetch([name])[0] is not None
    cluster.unproven = lambda doc: False
    expired.drain_until(lambda: lost_leases(caplog), 'the log line about the lost lease')
    assert lease_of(expired).id != name
    assert expired.wait(2) == ['held', 'held']


def test_consumer_leaves_a_node_that_cannot_prove_heartbeats(
    connect: Connect, database: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[bool] = []
    replace_in_clients(monkeypatch, database, 'switch_node', lambda self: left.append(True))
    cluster.unproven = is_heartbeat
    inbox = Inbox(connect())
    inbox.drain_until(lambda: left, 'another node to be asked')
