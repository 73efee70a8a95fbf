"""Results that return to other regions: in which databases a worker stores them, also if one of them refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from kombu.exceptions import EncodeError

import celery_couchdb.design
from celery_couchdb.backend import CouchDBBackend
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.contrib.regions.region import results_in
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.couchdb.write_result import WriteResult
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ServerUnavailable
from tests.conftest import PATIENT, PATIENT_BROKER
from tests.support import end

#: The id of the record of the task `given`, which region `us` has given to this region, `eu`.
RECORD = 'p:eu:given:tag'


@pytest.fixture
def regions(server: Server) -> Iterator[Client]:
    """The database of regions of this region."""
    with server.fresh_database() as name:
        client = server.client(name)
        client.create()
        yield client
        client.close()


@pytest.fixture
def backend(app: Celery) -> CouchDBBackend:
    return app.backend


@pytest.fixture(params=['handed over', 'stored by the task'])
def is_handed_over(request: pytest.FixtureRequest, backend: CouchDBBackend) -> Iterator[bool]:
    """Whether tasks hand over their results, as those of workers do without the option `confirm_results`."""
    if request.param == 'handed over':
        backend.handover.open(serve_children=False)
    yield request.param == 'handed over'
    backend.handover.close()


def run(regions: Client, task_id: str, sent_in: str | None = 'us', **members: Any) -> Context:
    """Return the request of a task that ran because region `us` gave the task `given` to this one."""
    headers = {'x-giver': ['eu', regions.address.database, 'us', 'given', RECORD], 'x-from-region': sent_in}
    return Context({'id': task_id, 'task': 'add', 'delivery_info': {}, 'headers': headers, **members})


def settle(backend: CouchDBBackend) -> None:
    """Wait for the results that were handed over, and for those that take their place."""
    for _ in range(2):
        backend.handover.queue.wait()


def returned(regions: Client) -> list[Document]:
    """Return the results that are to return to other regions, those of one document one by one."""
    return [doc for row in regions.id_range('r:', docs=True) for doc in results_in(row['doc'])]


def homes(regions: Client) -> list[tuple[str, str, str | None]]:
    """Return the region to which each result returns, the id of its task, and the id of its record."""
    return [(*doc['_id'].split(':')[1:3], doc.get('record')) for doc in returned(regions)]


def is_here(backend: CouchDBBackend, task_id: str) -> bool:
    return backend.store.read(backend.get_key_for_task(task_id)) is not None


@pytest.mark.parametrize(
    ('task_id', 'sent_in', 'stored_here', 'returns_to'),
    [
        ('given', 'us', False, {'us': RECORD}),
        ('given', 'asia', False, {'asia': None, 'us': RECORD}),
        ('given', 'eu', True, {'us': RECORD}),
        ('given', None, False, {'us': RECORD}),
        ('given', ['us'], False, {'us': RECORD}),
        ('next', 'us', True, {'us': None}),
        ('next', 'asia', True, {'asia': None}),
        ('next', 'eu', True, {}),
    ],
)
@pytest.mark.usefixtures('is_handed_over')
def test_where_a_result_is_stored(
    backend: CouchDBBackend,
    regions: Client,
    task_id: str,
    sent_in: Any,
    stored_here: bool,
    returns_to: dict[str, str | None],
) -> None:
    request = run(regions, task_id, sent_in)
    backend.store_result(task_id, {}, 'STARTED', request=request)
    backend.mark_as_done(task_id, 3, request=request)
    settle(backend)
    docs = returned(regions)
    last = [doc for doc in docs if doc['result']['status'] == 'SUCCESS']
    assert {doc['_id'].split(':')[1]: doc.get('record') for doc in last} == returns_to
    assert all(doc['result']['value']['result'] == 3 and 'expires' not in doc['result'] for doc in last)
    assert len(docs) == 2 * len(last)
    assert is_here(backend, task_id) == stored_here


@pytest.mark.parametrize('giver', [None, 'eu', ['eu'], ['eu', 'regions', 'us', 'given', 5], {}])
@pytest.mark.usefixtures('is_handed_over')
def test_result_of_a_task_without_a_giver_stays_here(backend: CouchDBBackend, regions: Client, giver: Any) -> None:
    """`x-from-region` alone does not say in which database a result returns."""
    headers = {'x-from-region': 'us', 'x-giver': giver}
    backend.mark_as_done('given', 3, request=Context({'id': 'given', 'delivery_info': {}, 'headers': headers}))
    settle(backend)
    assert returned(regions) == []
    assert is_here(backend, 'given')


# -- tasks that have not run


@pytest.mark.usefixtures('is_handed_over')
def test_failure_of_later_steps_of_a_chain_returns(backend: CouchDBBackend, regions: Client) -> None:
    steps = [backend.app.signature('add', (1,), task_id=name) for name in ('last', 'next')]
    request = run(regions, 'given', chain=steps)
    backend.mark_as_failure('given', ValueError('no'), request=request)
    settle(backend)
    assert sorted(homes(regions)) == [('us', 'given', RECORD), ('us', 'last', None), ('us', 'next', None)]
    assert [is_here(backend, name) for name in ('given', 'last', 'next')] == [False, True, True]


@pytest.mark.usefixtures('is_handed_over')
def test_failure_of_the_body_of_a_chord_returns(backend: CouchDBBackend, regions: Client) -> None:
    body = backend.app.signature('total', task_id='body').set(headers=run(regions, 'given').headers)
    backend.apply_chord(('group', []), body)
    backend.set_chord_size('group', 1)
    part = run(regions, 'part', group='group', group_index=0, chord=dict(body))
    backend.mark_as_failure('part', ValueError('no'), request=part)
    settle(backend)
    assert sorted(homes(regions)) == [('us', 'body', None), ('us', 'part', None)]
    assert [is_here(backend, name) for name in ('part', 'body')] == [True, True]


def test_part_of_a_chord_is_always_stored_here(backend: CouchDBBackend, regions: Client, is_handed_over: bool) -> None:
    """It is counted together with its result."""
    backend.apply_chord(('group', []), backend.app.signature('total', task_id='body'))
    backend.set_chord_size('group', 2)
    request = run(regions, 'given', group='group', group_index=0, chord={'task': 'total', 'options': {}})
    backend.mark_as_done('given', 3, request=request)
    settle(backend)
    assert homes(regions) == [('us', 'given', RECORD)]
    assert is_here(backend, 'given')
    assert [part['task_id'] for part in backend.chords.parts('group', ordered=True)] == ['given']


# -- databases that refuse, and outages


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, regions: Client) -> None:
    """Let CouchDB refuse documents of more than 2,000 bytes outside the database of results."""
    create = Client.create_once

    def limited(self: Client, docs: Sequence[Document], *, texts: Sequence[bytes] | None = None) -> list[WriteResult]:
        if texts is None:
            return create(self, docs)
        return [
            create(self, [doc], texts=[text])[0]
            if len(text) < 2000
            else WriteResult.refused(doc['_id'], 'document_too_large', 'too large')
            for doc, text in zip(docs, texts, strict=True)
        ]

    monkeypatch.setattr(Client, 'create_once', limited)


@pytest.mark.usefixtures('small')
def test_success_that_is_too_large_returns_as_a_failure(
    backend: CouchDBBackend, regions: Client, is_handed_over: bool
) -> None:
    request = run(regions, 'given')
    if is_handed_over:
        backend.mark_as_done('given', 'x' * 3000, request=request)
    else:
        with pytest.raises(EncodeError, match='too large') as caught:  # Celery stores it as the failure of the task
            backend.mark_as_done('given', 'x' * 3000, request=request)
        backend.mark_as_failure('given', caught.value, request=request)
    settle(backend)
    [doc] = returned(regions)
    assert (doc['record'], doc['result']['status']) == (RECORD, 'FAILURE')
    assert 'the result of add cannot be stored' in str(doc['result']['value']['result']['exc_message'])
    assert not is_here(backend, 'given')


@pytest.mark.usefixtures('small')
def test_failure_of_a_step_that_cannot_be_sent_returns(backend: CouchDBBackend, regions: Client) -> None:
    backend.handover.open(serve_children=False)
    broker = backend.handover.queue.broker
    assert broker is not None
    content: Any = {
        'body': 'x' * 3000,
        'headers': {**run(regions, 'given').headers, 'id': 'next', 'task': 'add'},
        'properties': {'delivery_tag': 'tag', 'priority': 0},
    }
    now = broker.clock.now()
    item = workitem.new(workitem.new_id(now), 'celery', content, now)
    assert backend.handover.take_next_tasks(broker.address, [item]) == []
    settle(backend)
    [doc] = returned(regions)
    assert (doc['_id'].split(':')[:3], doc['result']['status']) == (['r', 'us', 'next'], 'FAILURE')
    assert is_here(backend, 'next')
    backend.handover.close()


@pytest.mark.usefixtures('is_handed_over')
def test_result_stays_here_if_its_database_does_not_exist(
    backend: CouchDBBackend, regions: Client, caplog: pytest.LogCaptureFixture
) -> None:
    regions.delete()
    for task_id in ('given', 'next'):
        backend.mark_as_done(task_id, 3, request=run(regions, task_id))
    settle(backend)
    assert [backend.get_result(task_id) for task_id in ('given', 'next')] == [3, 3]
    expected = f'(SUCCESS) cannot be stored in {regions.address.database}, and is stored here: '
    assert [message for message in caplog.messages if expected in message] == caplog.messages
    assert len(caplog.messages) == 2


@pytest.mark.parametrize('confirm', [False, True])
def test_result_waits_in_the_database_of_the_broker_if_its_own_cannot_be_written(
    server: Server,
    app: Celery,
    client: Client,
    regions: Client,
    member: dict[str, str],
    confirm: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    results: Client = app.backend.client
    for wanted in (
        Wanted(client, design.documents(), [member['user']]),
        Wanted(results, [celery_couchdb.design.document()], [member['user']]),
    ):
        for step in plan(wanted):
            if step.do:
                step.do()
    urls = [server.couchdb_url(each.address.database, **member) for each in (client, results)]
    other = Celery('other', set_as_current=False, broker=urls[0], backend=urls[1])
    other.conf.update(
        broker_transport_options=PATIENT_BROKER,
        result_backend_transport_options={**PATIENT, 'confirm_results': confirm},
    )
    backend = other.backend
    backend.handover.open(serve_children=False)
    backend.mark_as_done('given', 3, request=run(regions, 'given'))
    settle(backend)
    backend.handover.close()
    assert returned(regions) == []
    assert homes(client) == [('us', 'given', RECORD)]
    assert not is_here(backend, 'given')
    [message] = caplog.messages
    assert message.endswith('refuses the result of add, which waits in the database of the broker')
    assert member['password'] not in message
    end(other)


def test_result_returns_once_after_an_outage(
    backend: CouchDBBackend, regions: Client, is_handed_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response to the first of two writes is lost, and meanwhile the other region has stored that result."""
    create, lost = Client.create_once, list[str]()

    def unlucky(self: Client, docs: Any, **how: Any) -> list[WriteResult]:
        if self.address.database != regions.address.database or len(lost) > 1 or not docs:
            return create(self, docs, **how)
        lost.append(docs[0]['_id'])
        if len(lost) == 1:
            create(self, docs, **how)
            regions.bulk([deletion(doc) for doc in returned(regions)])
        raise ServerUnavailable('the response is lost')

    monkeypatch.setattr(Client, 'create_once', unlucky)
    backend.mark_as_done('given', 3, request=run(regions, 'given'))
    settle(backend)
    assert returned(regions) == []
    backend.mark_as_done('next', 4, request=run(regions, 'next'))
    settle(backend)
    assert homes(regions) == [('us', 'next', None)]


def test_results_for_one_region_share_a_document(
    backend: CouchDBBackend, regions: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, sizes = Client.create_once, list[int]()

    def counted(self: Client, docs: Any, **how: Any) -> list[WriteResult]:
        if self.address.database == regions.address.database:
            sizes.append(len(docs))
            if len(sizes) == 1:  # those below gather meanwhile
                raise ServerUnavailable('an outage')
        return create(self, docs, **how)

    monkeypatch.setattr(Client, 'create_once', counted)
    backend.handover.open(serve_children=False)
    names = [f'task {number}' for number in range(20)]
    for name in names:
        backend.mark_as_done(name, 3, request=run(regions, name))
    settle(backend)
    backend.handover.close()
    assert sorted(name for _, name, _ in homes(regions)) == sorted(names)
    assert sum(sizes) <= 6, 'results of one region share a document'
