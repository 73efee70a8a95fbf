"""Documents of which a cluster left several leaves: the workers find them, and make them one again, without losing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from kombu_couchdb.admin import dead
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import dead_letter, workitem
from kombu_couchdb.documents.ids import QUEUE
from tests.conftest import wait_for
from tests.support import Inbox, items, leave_leaf, publish

#: Revisions that are below and above any that CouchDB makes of the same generation.
LOW, HIGH = '0' * 32, 'f' * 32

#: A consumer that is gone without a trace.
GONE = 'broker:consumer:gone:1:00'


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long."""
    for name in (
        'couchdb.conflicts.SYNC',
        'couchdb.conflicts._SINGLE',
        'couchdb.conflicts._CLUSTER',
        'leases.unproven.SYNC',
    ):
        monkeypatch.setattr(f'kombu_couchdb.{name}', 0.5)


@pytest.fixture
def resolver(connect: Callable[..., Connection]) -> Inbox:
    """A consumer of another queue: it sweeps, and takes nothing."""
    return Inbox(connect(visibility_timeout=2.0), 'other')


@pytest.fixture
def item(connect: Callable[..., Connection], client: Client) -> Document:
    """A message in the queue q."""
    publish(connect(), 'hello')
    return wait_for(lambda: items(client), 'the message')[0]


def live(client: Client, doc_id: str) -> list[Document]:
    return [leaf for leaf in client.leaves(doc_id) if not leaf.get('_deleted')]


def is_one(client: Client, resolver: Inbox, doc_id: str) -> Document:
    """Return the document once it has one leaf."""
    wait_for(lambda: resolver.drain(0.05) or len(live(client, doc_id)) == 1, 'the document to be one')
    return live(client, doc_id)[0]


def leave(client: Client, doc: Document, rev: str) -> None:
    leave_leaf(client, doc['_id'], rev, **{name: value for name, value in doc.items() if name not in ('_id', '_rev')})


def claimed(item: Document, by: str) -> Document:
    return workitem.claim(item, by, 1.0)


def test_two_releases(client: Client, connect: Callable[..., Connection], item: Document, resolver: Inbox) -> None:
    leave(client, item, f'2-{LOW}')
    leave(client, item, f'2-{HIGH}')
    assert is_one(client, resolver, item['_id'])['_rev'] == f'2-{HIGH}'
    inbox = Inbox(connect())
    inbox.wait(1)
    wait_for(lambda: not items(client), 'the ack')
    inbox.stays(1, 1.0)


def test_two_claims_of_consumers_that_are_gone(
    client: Client, connect: Callable[..., Connection], item: Document, resolver: Inbox
) -> None:
    for rev, name in ((f'2-{LOW}', GONE), (f'2-{HIGH}', GONE + 'too')):
        leave(client, claimed(item, name), rev)
    found = is_one(client, resolver, item['_id'])
    wait_for(lambda: resolver.drain(0.05) or workitem.is_waiting(live(client, item['_id'])[0]), 'the release')
    assert found['attempts'] == 1
    inbox = Inbox(connect())
    assert inbox.wait(1) == ['hello']
    inbox.stays(1, 1.0)


@pytest.mark.parametrize('other', ['waiting', 'claimed'])
def test_deletion_beside_an_update(
    other: str, apache_couchdb: bool, client: Client, item: Document, resolver: Inbox
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server shows no view that a deleted leaf is there')
    leave(client, {'_id': item['_id'], '_deleted': True}, f'2-{LOW}')
    leave(client, claimed(item, GONE) if other == 'claimed' else item, f'2-{HIGH}')
    wait_for(lambda: resolver.drain(0.05) or not live(client, item['_id']), 'what is done to win')


def test_dead_letter_beside_an_update(client: Client, item: Document, resolver: Inbox) -> None:
    leave(client, dead_letter.made_of(claimed(item, GONE), 'refused', 1.0), f'2-{LOW}')
    leave(client, item, f'2-{HIGH}')
    assert is_one(client, resolver, item['_id'])['reason'] == 'refused'
    wait_for(lambda: dead.count(client) == 1, 'the dead letter to be seen')


def test_held_beside_a_claim_of_one_that_is_gone(
    apache_couchdb: bool,
    client: Client,
    connect: Callable[..., Connection],
    item: Document,
    resolver: Inbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server shows no view that a deleted leaf is there')
    database = client.address.database
    replicas = property(lambda self: 3 if self.address.database == database else 1, lambda self, replicas: None)
    monkeypatch.setattr(Client, 'replicas', replicas, raising=False)
    holder = Inbox(connect(visibility_timeout=2.0), ack=False)
    holder.wait(1)
    leave(client, claimed(item, GONE), f'2-{HIGH}')  # this is the one that readers see
    other = Inbox(connect(visibility_timeout=2.0))
    other.stays(0, 5.0)
    holder.messages[0].ack()
    wait_for(lambda: other.drain(0.05) or not live(client, item['_id']), 'all leaves to be gone')
    assert (len(holder.messages), other.messages) == (1, [])


def test_unique_jobs_sent_on_two_sides_of_a_net_both_run(
    client: Client, connect: Callable[..., Connection], resolver: Inbox
) -> None:
    def sent(task: str) -> Document:
        publish(connect(), task, headers={'id': task, 'task': 't', 'job_key': 'k'})
        return wait_for(lambda: items(client), 'the message')[0]

    job = sent('a')
    message = {
        **job['message'],
        'headers': {**job['message']['headers'], 'id': 'b'},
        'properties': {**job['message']['properties'], 'delivery_tag': 'tag-b'},
    }
    leave(client, {**job, 'message': message, 'published': job['published'] + 1}, f'1-{HIGH}')
    merged = is_one(client, resolver, job['_id'])
    assert [entry['message']['headers']['id'] for entry in (merged, *merged['next'])] == ['b', 'a']
    inbox = Inbox(connect())
    inbox.wait(2)
    assert [message.headers['id'] for message in inbox.messages] == ['b', 'a']
    wait_for(lambda: not items(client), 'the acks')


def test_queue_and_binding(client: Client, connect: Callable[..., Connection], resolver: Inbox) -> None:
    channel = connect().channel()
    channel.queue_declare('limited', arguments={'x-max-length': 3})
    channel.exchange_declare('things', 'topic')
    channel.queue_bind('limited', 'things', 'a.#')
    for doc in client.fetch([QUEUE + 'limited', *(row['id'] for row in client.id_range('broker:binding:'))]):
        assert doc is not None
        leave(client, doc, f'1-{HIGH}')
        assert len(live(client, doc['_id'])) == 2
        healed: Any = is_one(client, resolver, doc['_id'])
        assert {**healed, '_rev': ''} == {**doc, '_rev': ''}


def test_documents_of_other_people_are_left_alone(client: Client, item: Document, resolver: Inbox) -> None:
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


def heal_results(backend: Any, doc_id: str) -> None:
    wait_for(lambda: backend.cleanup() or len(live(backend.client, doc_id)) == 1, 'the document to be one')


@pytest.mark.parametrize(('high', 'low'), [('STARTED', 'SUCCESS'), ('SUCCESS', 'STARTED'), ('RETRY', 'FAILURE')])
def test_final_result_stays(backend: Any, high: str, low: str) -> None:
    leave(backend.client, result(low, 'low'), f'2-{LOW}')
    leave(backend.client, result(high, 'high'), f'2-{HIGH}')
    heal_results(backend, 'celery-task-meta-x')
    assert live(backend.client, 'celery-task-meta-x')[0]['status'] == ({'SUCCESS', 'FAILURE'} & {high, low}).pop()


def test_who_waits_for_a_result_is_told_when_it_is_healed(backend: Any) -> None:
    leave(backend.client, result('SUCCESS', 'done'), f'2-{LOW}')
    leave(backend.client, result('STARTED', None), f'2-{HIGH}')
    heard: list[Any] = []
    backend.app.AsyncResult('x').then(lambda done: heard.append(done.result))
    wait_for(lambda: backend.cleanup() or heard == ['done'], 'the result')


def test_chord_that_was_sent_stays(backend: Any) -> None:
    chord = {
        '_id': 'chord-unlock-x',
        'type': 'Chord',
        'size': 2,
        'added': [],
        'body': None,
        'date': 1.0,
        'expires': 9e9,
    }
    leave(backend.client, {**chord, 'claimed': 'me', 'sent': True}, f'3-{LOW}')
    leave(backend.client, {**chord, 'claimed': None, 'sent': False, 'added': ['one']}, f'3-{HIGH}')
    heal_results(backend, 'chord-unlock-x')
    assert live(backend.client, 'chord-unlock-x')[0]['sent'] is True
