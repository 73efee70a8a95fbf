"""What only the nodes of a cluster do, played to a consumer on any server: they lag behind, and prove too little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection

from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteStatus
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.unique import ENQUEUED, MOVED, Outcome, told
from tests.conftest import wait_for
from tests.support import Inbox, items, leave_leaf, publish, replace_in_clients

#: The lease of a consumer, in seconds.
LEASE = 2.0


class Cluster:
    """Stands between the client of a consumer and its server, and alters what is answered to writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, database: str) -> None:
        #: Whether a write of this document is on too few nodes to prove anything.
        self.unproven: Callable[[Document], bool] = lambda doc: False
        #: Whether the answer to a request that writes this document is lost.
        self.lost: Callable[[Document], bool] = lambda doc: False
        bulk = Client.bulk

        def altered(client: Client, docs: Any, **options: Any) -> list[Document]:
            answers = bulk(client, docs, **options)
            if any(self.lost(doc) for doc in docs):
                raise ServerUnavailable('the answer was lost')
            return [
                answer._replace(status=WriteStatus.UNPROVEN) if answer.is_stored and self.unproven(doc) else answer
                for doc, answer in zip(docs, answers, strict=True)
            ]

        replace_in_clients(monkeypatch, database, 'bulk', altered)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, database: str) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch, database)
    yield cluster
    cluster.unproven = cluster.lost = lambda doc: False


def is_heartbeat(doc: Document) -> bool:
    return doc.get('type') == 'Consumer'


def lease_of(inbox: Inbox) -> Any:
    return inbox.connection.transport.consumer._cycle.lease


def lost_leases(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if 'lost its lease' in record.message]


@pytest.fixture
def a_cluster(monkeypatch: pytest.MonkeyPatch, database: str) -> None:
    """The server says that three nodes keep each document."""
    info = Client.info

    def told(self: Client, *shape: Any) -> Document:
        found = info(self, *shape)
        self.replicas = 3
        return found

    replace_in_clients(monkeypatch, database, 'info', told)


def test_what_a_node_that_lags_behind_did_not_show_is_found(
    connect: Callable[..., Connection], client: Client, database: str, a_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(connect(), 'there')
    shown: list[str] = []
    request = Client.request

    def behind(self: Client, method: str, path: str | None, *args: Any, **kwargs: Any) -> Any:
        answer = request(self, method, path, *args, **kwargs)
        lacks = str(path).endswith('/waiting/queries') and not shown
        return {'results': [{**result, 'rows': []} for result in answer['results']]} if lacks else answer

    replace_in_clients(monkeypatch, database, 'request', behind)
    monkeypatch.setattr('kombu_couchdb.consumer.cycle._CLUSTER_POLL_SECONDS', 1.0)
    inbox = Inbox(connect())
    inbox.stays(0, 1.0)
    shown.append('all')
    assert inbox.wait(1) == ['there']
    wait_for(lambda: not items(client), 'the acknowledgement')


# -- what is accepted on too few nodes


def is_item(doc: Document) -> bool:
    return doc.get('type') == 'WorkItem' or bool(doc.get('_deleted'))


def test_unproven_claim_is_not_run_and_given_back(
    connect: Callable[..., Connection], client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('kombu_couchdb.leases.unproven.SYNC', 0.5)
    publish(connect(), 'hello')
    claimed: list[Document] = []
    cluster.unproven = lambda doc: bool(doc.get('claimed')) and not claimed.append(doc)
    inbox = Inbox(connect())
    wait_for(lambda: inbox.drain(0.05) or len(claimed) >= 2, 'a second claim, of what was given back after the first')
    assert inbox.messages == []
    cluster.unproven = lambda doc: False
    assert inbox.wait(1) == ['hello']
    assert inbox.messages[0].delivery_info['redelivered'] is False  # it was never delivered before
    wait_for(lambda: not items(client), 'the ack')


def test_what_needs_no_proof_is_done_all_the_same(
    connect: Callable[..., Connection], client: Client, cluster: Cluster
) -> None:
    cluster.unproven = lambda doc: is_item(doc) and not doc.get('claimed')
    publish(connect(), 'hello')
    inbox = Inbox(connect(), ack=False)
    inbox.wait(1)
    inbox.messages[0].requeue()
    inbox.wait(2)
    inbox.messages[1].ack()
    wait_for(lambda: not items(client), 'the ack')
    inbox.stays(2, 1.0)


def test_what_is_pulled_without_acknowledgement_is_not_lost(
    connect: Callable[..., Connection], cluster: Cluster
) -> None:
    cluster.unproven = is_item
    publish(connect(), 'hello')
    assert connect().channel().basic_get('q', no_ack=True).decode() == 'hello'


def test_unproven_unique_job_makes_way_for_that_of_another(
    connect: Callable[..., Connection], client: Client, database: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(task: str, key: str) -> Outcome:
        with told() as outcomes:
            publish(connect(), task, headers={'id': task, 'task': 't', 'job_key': key})
        return outcomes[0]

    cluster.unproven = is_item
    assert send('a', 'x') == Outcome(ENQUEUED, 'a')  # the other nodes are down: there is nobody to make way for
    [job] = items(client)
    there = {**job, '_id': job['_id'].replace('"x"', '"y"'), 'key': 'y'}
    bulk = Client.bulk

    def elsewhere(self: Client, docs: Any, **options: Any) -> list[Document]:
        answers = bulk(self, docs, **options)
        if docs[0]['_id'] == there['_id'] and len(client.leaves(there['_id'])) == 1:
            leave_leaf(
                client, there['_id'], '1-ffffffffffffffffffffffffffffffff', **there
            )  # another node has had it first
        return answers

    replace_in_clients(monkeypatch, database, 'bulk', elsewhere)
    assert send('b', 'y') == Outcome(MOVED, 'a')
    left = [leaf['message']['headers']['id'] for leaf in client.leaves(there['_id']) if not leaf.get('_deleted')]
    assert left == ['a']


# -- the heartbeat


def test_heartbeat_whose_answer_was_lost_is_its_own(
    connect: Callable[..., Connection], client: Client, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), 'long')
    inbox = Inbox(connect(visibility_timeout=LEASE), ack=False)
    inbox.wait(1)
    lost: list[Document] = []
    cluster.lost = lambda doc: is_heartbeat(doc) and not lost and not lost.append(doc)
    wait_for(lambda: inbox.drain(0.05) or lost, 'a heartbeat whose answer is lost')
    beats = lease_of(inbox)._beats
    wait_for(lambda: inbox.drain(0.05) or lease_of(inbox)._beats > beats, 'the next heartbeat')
    inbox.messages[0].ack()
    wait_for(lambda: not items(client), 'the ack, of what is still held')
    assert lost_leases(caplog) == []


def test_unproven_heartbeat_does_not_prolong_the_lease(
    connect: Callable[..., Connection], client: Client, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), 'held')
    inbox = Inbox(connect(visibility_timeout=LEASE), ack=False)
    inbox.wait(1)
    cluster.unproven = is_heartbeat
    wait_for(lambda: inbox.drain(0.05) or not lease_of(inbox).valid, 'the end of the lease')
    publish(connect(), 'not to be handed over')
    inbox.stays(1, LEASE / 2)
    cluster.unproven = lambda doc: False
    assert inbox.wait(2) == ['held', 'not to be handed over']
    # Nobody had swept it, and so it still holds what it held.
    for message in inbox.messages:
        message.ack()
    wait_for(lambda: not items(client), 'the acks')
    assert lost_leases(caplog) == []


def test_who_was_swept_while_it_was_cut_off_learns_of_it(
    connect: Callable[..., Connection], client: Client, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    publish(connect(), 'held')
    inbox = Inbox(connect(visibility_timeout=LEASE), ack=False)
    inbox.wait(1)
    cluster.unproven = is_heartbeat
    name = lease_of(inbox).id
    wait_for(lambda: inbox.drain(0.05) or not lease_of(inbox).valid, 'the end of the lease')
    leave_leaf(client, name, '2-0123456789abcdef0123456789abcdef', _deleted=True)  # the nodes on the other side
    assert client.fetch([name])[0] is not None
    cluster.unproven = lambda doc: False
    wait_for(lambda: inbox.drain(0.05) or lost_leases(caplog), 'the log to say so')
    assert lease_of(inbox).id != name
    assert inbox.wait(2) == ['held', 'held']


def test_node_that_cannot_prove_a_heartbeat_is_left(
    connect: Callable[..., Connection], database: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[bool] = []
    replace_in_clients(monkeypatch, database, 'leave_node', lambda self: left.append(True))
    cluster.unproven = is_heartbeat
    inbox = Inbox(connect())
    wait_for(lambda: inbox.drain(0.05) or left, 'another node to be asked')
