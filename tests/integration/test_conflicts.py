"""Documents with conflicting leaf revisions: workers find them and resolve the conflicts without losing messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from kombu_couchdb.admin import dead
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import dead_letter, validation, workitem
from kombu_couchdb.documents.ids import QUEUE
from tests.conftest import wait_for
from tests.support import Inbox, items, leave_leaf, publish

from .conftest import Connect

#: Revisions that sort below and above all real revisions of the same generation.
LOW, HIGH = '0' * 32, 'f' * 32

#: The id of a consumer that has ended and has no heartbeat.
GONE = 'broker:consumer:gone:1:00'

NO_DELETED_LEAVES = 'views of the embedded server do not see deleted leaf revisions'


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses of the conflict resolver."""
    for name in (
        'couchdb.conflicts.SYNC',
        'couchdb.conflicts._SINGLE_NODE_SECONDS',
        'couchdb.conflicts._CLUSTER_SECONDS',
        'leases.sweeper.SYNC',
    ):
        monkeypatch.setattr(f'kombu_couchdb.{name}', 0.5)


@pytest.fixture
def resolver(connect: Connect) -> Inbox:
    """A consumer of another queue, which sweeps and receives no messages."""
    return Inbox(connect(visibility_timeout=2.0), 'other')


@pytest.fixture
def item(connect: Connect, client: Client) -> Document:
    """A message in the queue q."""
    publish(connect(), 'hello')
    return wait_for(lambda: items(client), 'the message')[0]


def live(client: Client, doc_id: str) -> list[Document]:
    return [leaf for leaf in client.leaves(doc_id) if not leaf.get('_deleted')]


def is_one(client: Client, resolver: Inbox, doc_id: str) -> Document:
    """Wait until the document has one leaf revision, and return it."""
    resolver.drain_until(lambda: len(live(client, doc_id)) == 1, 'the conflict to be resolved')
    return live(client, doc_id)[0]


def leave(client: Client, doc: Document, rev: str) -> None:
    leave_leaf(client, doc['_id'], rev, **{name: value for name, value in doc.items() if name not in ('_id', '_rev')})


def claimed(item: Document, by: str) -> Document:
    return {**workitem.claim(validation.checked(item), by, 1.0)}


def test_conflict_of_two_releases(client: Client, connect: Connect, item: Document, resolver: Inbox) -> None:
    leave(client, item, f'2-{LOW}')
    leave(client, item, f'2-{HIGH}')
    assert is_one(client, resolver, item['_id'])['_rev'] == f'2-{HIGH}'
    inbox = Inbox(connect())
    inbox.wait(1)
    wait_for(lambda: not items(client), 'the ack')
    inbox.stays(1, 1.0)


def test_deletion_wins_over_an_update(apache_couchdb: bool, client: Client, item: Document, resolver: Inbox) -> None:
    if not apache_couchdb:
        pytest.skip(NO_DELETED_LEAVES)
    parent = item['_rev'].partition('-')[2]  # it must not be a leaf, too: then the conflict would have two live ones
    for text, doc in ((LOW, {'_id': item['_id'], '_deleted': True}), (HIGH, item)):
        leave(client, {**doc, '_revisions': {'start': 2, 'ids': [text, parent]}}, f'2-{text}')
    resolver.drain_until(lambda: not live(client, item['_id']), 'the deletion to win')


def test_claim_of_a_running_consumer_wins_over_one_of_an_ended_consumer(
    apache_couchdb: bool,
    database: str,
    client: Client,
    connect: Connect,
    item: Document,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not apache_couchdb:
        pytest.skip(NO_DELETED_LEAVES)
    replicas = property(lambda self: 3 if self.address.database == database else 1, lambda self, replicas: None)
    monkeypatch.setattr(Client, 'replicas', replicas, raising=False)
    holder = Inbox(connect(visibility_timeout=2.0), ack=False)
    holder.wait(1)
    leave(client, claimed(item, GONE), f'2-{HIGH}')  # this is the winning revision
    other = Inbox(connect(visibility_timeout=2.0))
    other.stays(0, 5.0)
    holder.messages[0].ack()
    other.drain_until(lambda: not live(client, item['_id']), 'all leaf revisions to be deleted')
    assert (len(holder.messages), other.messages) == (1, [])


def test_living_consumers_that_do_not_know_of_their_claims_do_not_block_a_message(
    database: str, client: Client, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both claimed it on different nodes, and got no response. Their leases do not end: each holds another message."""
    replicas = property(lambda self: 3 if self.address.database == database else 1, lambda self, replicas: None)
    monkeypatch.setattr(Client, 'replicas', replicas, raising=False)
    both = []
    for name in ('first', 'second'):
        publish(connect(), name, name)
        both.append(Inbox(connect(visibility_timeout=2.0), 'q', name, ack=False, prefetch=2))
        both[-1].wait(1)
    publish(connect(), 'hello', 'elsewhere')
    [found] = [item for item in items(client) if item['queue'] == 'elsewhere']
    for text, inbox in ((LOW, both[0]), (HIGH, both[1])):
        by = inbox.messages[0].delivery_info
        holder = next(item['claimed']['by'] for item in items(client) if item['queue'] == by['routing_key'])
        history = {'start': 2, 'ids': [text, 'e' * 32]}
        leave(client, {**claimed(found, holder), '_id': 'x', 'queue': 'q', '_revisions': history}, f'2-{text}')
    client.bulk([{**found, '_deleted': True}])
    wait_for(lambda: 'hello' in [body for inbox in both for body in inbox.drain(0.1).bodies], 'the message')
    for inbox in both:
        for message in inbox.messages:
            message.ack()
    wait_for(lambda: not [both[0].drain(0.1), both[1].drain(0.1), *items(client), *live(client, 'x')][2:], 'the acks')
    assert sorted(body for inbox in both for body in inbox.bodies) == ['first', 'hello', 'second']


def test_dead_letter_wins_over_an_update(client: Client, item: Document, resolver: Inbox) -> None:
    leave(client, dead_letter.made_of(claimed(item, GONE), 'refused', 1.0), f'2-{LOW}')
    leave(client, item, f'2-{HIGH}')
    assert is_one(client, resolver, item['_id'])['reason'] == 'refused'
    wait_for(lambda: dead.count(client) == 1, 'the dead letter')


def test_conflicts_of_queues_and_bindings(client: Client, connect: Connect, resolver: Inbox) -> None:
    channel = connect().channel()
    channel.queue_declare('limited', arguments={'x-max-length': 3})
    channel.exchange_declare('things', 'topic')
    channel.queue_bind('limited', 'things', 'a.#')
    for doc in client.fetch([QUEUE + 'limited', *(row['id'] for row in client.id_range('broker:binding:'))]):
        assert doc is not None
        leave(client, doc, f'1-{HIGH}')
        assert len(live(client, doc['_id'])) == 2
        resolved: Any = is_one(client, resolver, doc['_id'])
        assert {**resolved, '_rev': ''} == {**doc, '_rev': ''}


def test_foreign_documents_are_not_changed(client: Client, item: Document, resolver: Inbox) -> None:
    for doc in ({'_id': 'invoice', 'type': 'Invoice'}, {'_id': 'note'}):
        leave(client, doc, f'1-{LOW}')
        leave(client, doc, f'1-{HIGH}')
    leave(client, item, f'2-{LOW}')
    leave(client, item, f'2-{HIGH}')
    is_one(client, resolver, item['_id'])
    assert len(live(client, 'invoice')) == len(live(client, 'note')) == 2


# -- results


def result(state: str, value: Any) -> Document:
    return {
        '_id': 'celery-task-meta-x',
        'type': 'Result',
        'status': state,
        'date': 1.0,
        'value': {'task_id': 'x', 'status': state, 'result': value, 'traceback': None},
    }


@pytest.fixture
def backend(url: str, client: Client) -> Iterator[Any]:
    app = Celery('test', set_as_current=False, broker='memory://', backend=url)
    yield app.backend
    app.close()


def resolve_results(backend: Any, doc_id: str) -> None:
    wait_for(lambda: backend.cleanup() or len(live(backend.client, doc_id)) == 1, 'the conflict to be resolved')


@pytest.mark.parametrize(('high', 'low'), [('STARTED', 'SUCCESS'), ('SUCCESS', 'STARTED'), ('RETRY', 'FAILURE')])
def test_final_result_wins(backend: Any, high: str, low: str) -> None:
    leave(backend.client, result(low, 'low'), f'2-{LOW}')
    leave(backend.client, result(high, 'high'), f'2-{HIGH}')
    resolve_results(backend, 'celery-task-meta-x')
    assert live(backend.client, 'celery-task-meta-x')[0]['status'] in ('SUCCESS', 'FAILURE')


def test_waiting_caller_gets_a_result_when_its_conflict_is_resolved(backend: Any) -> None:
    leave(backend.client, result('SUCCESS', 'done'), f'2-{LOW}')
    leave(backend.client, result('STARTED', None), f'2-{HIGH}')
    heard: list[Any] = []
    backend.app.AsyncResult('x').then(lambda done: heard.append(done.result))
    wait_for(lambda: backend.cleanup() or heard == ['done'], 'the result')


def test_chord_whose_body_was_sent_wins(backend: Any) -> None:
    chord = {'_id': 'chord-unlock-x', 'type': 'Chord', 'size': 2, 'body': None, 'date': 1.0, 'expires': 9e9}
    leave(backend.client, {**chord, 'added': [], 'claimed': 'me', 'sent': True}, f'3-{LOW}')
    leave(backend.client, {**chord, 'added': ['one'], 'claimed': None, 'sent': False}, f'3-{HIGH}')
    resolve_results(backend, 'chord-unlock-x')
    assert live(backend.client, 'chord-unlock-x')[0]['sent'] is True
