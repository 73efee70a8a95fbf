"""docs/development/documents.rst compared with the documents that are really written."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from celery import Celery, chord
from celery.app.task import Context
from kombu import Connection, Exchange, Queue

from celery_couchdb import audit
from celery_couchdb import design as results_design
from celery_couchdb.contrib.beat import CouchDBScheduler, Schedules
from celery_couchdb.contrib.beat.entries import Schedule, ScheduleState
from celery_couchdb.contrib.metrics.history import History, TenMinutes
from celery_couchdb.contrib.regions.lending import Demand
from celery_couchdb.results import documents
from kombu_couchdb import design
from kombu_couchdb.admin import jobs, queues
from kombu_couchdb.consumer import worker_hooks
from kombu_couchdb.consumer.worker_hooks import RunningTask
from kombu_couchdb.contrib.parcels import device_setup, parcel
from kombu_couchdb.contrib.parcels.parcel import refused
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.contrib.regions.other_regions import OtherRegions
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.documents import shared_documents, types, workitem
from kombu_couchdb.documents.idempotency import idempotent
from kombu_couchdb.leases import lease
from kombu_couchdb.leases.leader import LeaderLease
from kombu_couchdb.options import Options
from kombu_couchdb.queues.databases import BroadcastsDatabase
from kombu_couchdb.schema import Schema
from kombu_couchdb.unique import collect_outcomes
from tests.conftest import wait_for
from tests.support import Inbox, Request, eta, items, publish

from .conftest import Connect, kill_all

PAGE = (Path(__file__).parents[2] / 'docs/development/documents.rst').read_text('utf-8')
SECTIONS = dict(re.findall(r'^(\w+)\n-+\n(.*?)(?=^\w[\w ]*\n[-=]+\n)', PAGE, re.MULTILINE | re.DOTALL))

#: The types that declare the documents.
SCHEMAS = {
    **{kind.__name__: Schema.of(kind) for kind in (types.WorkItem, types.DoneItem, Schedule, ScheduleState)},
    **{
        name: Schema.of(getattr(shared_documents, name))
        for name in ('Consumer', 'Slot', 'Rate', 'Queue', 'Pause', 'Binding', 'Broadcast', 'Notice', 'Bell', 'Leader')
    },
    'Exchange': Schema.of(shared_documents.FanoutExchange),
    'History': Schema.of(TenMinutes),
    **{
        kind.__name__: Schema.of(kind) for kind in (documents.Result, documents.Group, documents.Value, documents.Chord)
    },
    'Part': Schema.of(documents.ChordPart),
}

#: Members whose own members are documented, too.
OPENED = ('claimed', 'message', 'parked', 'error', '_attachments')


def documented(kind: str) -> dict[str, str]:
    """Return the documented members of a type of document, each with `always` or `some`."""
    return dict(re.findall(r'^``([\w.-]+)``\s+(always|some)\s', SECTIONS[kind], re.MULTILINE))


def members(doc: Mapping[str, Any]) -> set[str]:
    """Return the names of a document's members; members of members are written with a dot."""
    own = {name for name in doc if not name.startswith('_')}
    if doc['type'] != 'WorkItem':
        return own
    inner = {f'{name}.{member}' for name in OPENED if isinstance(doc.get(name), dict) for member in doc[name]}
    return (own - {'message'}) | inner


def written(sent: list[Request]) -> dict[str, list[dict[str, Any]]]:
    """Return the written documents, by type."""
    docs = defaultdict(list)
    for request in sent:
        for doc in request.docs:
            if isinstance(doc.get('type'), str):
                docs[doc['type']].append(doc)
    return docs


def compare(kind: str, docs: Sequence[Mapping[str, Any]]) -> None:
    """Check that the page lists exactly the members of these documents, and correctly which are always present."""
    found = [members(doc) for doc in docs]
    page = documented(kind)
    assert set(page) == set().union(*found)
    assert {name for name, there in page.items() if there == 'always'} == set.intersection(*found)
    if schema := SCHEMAS.get(kind):
        assert schema.kinds.keys() == {name.partition('.')[0] for name in page} - {'_attachments'}
        assert schema.required <= {name.partition('.')[0] for name, there in page.items() if there == 'always'}
        assert not [problem for doc in docs if (problem := schema.problem('', doc))]


def test_all_types_of_documents_are_documented() -> None:
    types = 'WorkItem DoneItem LentItem Consumer Queue Pause Binding Exchange Broadcast Notice Bell Leader Schedule '
    types += 'Audit History ScheduleState Rate Slot Device Parcel Region Returned Receipt Result Group Value Chord Part'
    assert set(SECTIONS) == set(types.split())


def test_rows_of_views() -> None:
    found = set(re.findall(r'^``([\w-]+)``\s+``(\w+)``', PAGE, re.MULTILINE))
    designs = [*design.documents(), *parcel.design_documents(), results_design.document()]
    assert found == {(doc['_id'].removeprefix('_design/'), view) for doc in designs for view in doc['views']}


def test_documents_of_messages(connect: Connect, client: Client, sent: list[Request]) -> None:
    connection = connect()
    publish(connection, 'planned', headers=eta(3600))
    publish(connection, 'expires', 'other', expiration=3600)
    publish(connection, 'x' * 150_000, 'other')
    reply = Queue('reply', Exchange('replies', type='direct'), routing_key='k', auto_delete=True)
    connection.Producer().publish('x', exchange='replies', routing_key='k', declare=[reply])
    publish(connection, 'x' * 150_000, 'other', headers={'id': 'large', 'task': 'report', 'job_key': 'large'})
    job = {'id': 'a', 'task': 'report', 'job_key': 'k'}
    publish(connection, 'job', 'jobs', headers=job)
    publish(connection, 'job', 'jobs', headers={**eta(3600), **job, 'id': 'b'})
    publish(connection, 'job', 'jobs', headers={**job, 'id': 'c'})
    worker = Inbox(connect(), 'jobs', ack=False)
    worker.wait(1)
    with collect_outcomes() as outcomes:
        publish(connection, 'job', 'jobs', headers={**job, 'id': 'd'})
    assert outcomes[0].what == 'again'
    worker.messages[0].requeue()
    worker.wait(2)
    worker.messages[1].ack()
    worker.wait(3)
    with idempotent('a schedule'):
        publish(connection, 'job', 'jobs', headers={**job, 'id': 'e'})
    jobs.remove(client, [worker.messages[2].headers['id']])  # the worker holds it
    limited = Inbox(connect(), 'limited', ack=False)
    for body in ('first', 'second'):
        publish(connection, body, 'limited', headers={'concurrency_key': 'k', 'concurrency_limit': 1})
    limited.drain_until(lambda: any(doc.get('parked') for doc in items(client)))
    compare('Slot', written(sent)['Slot'])
    publish(connection, 'rated', 'limited', headers={'rate_key': 'k', 'rate': '5/h'})
    limited.wait(2)
    compare('Rate', written(sent)['Rate'])
    publish(connection, 'failed', 'failing')
    failing = Inbox(connect(), 'failing', ack=False)
    failing.wait(1)
    error = {'type': 'ValueError', 'text': 'no', 'traceback': 'lines', 'worker': 'w@1', 'retries': 0}
    failing.messages[0].fail(error, acknowledged=False)
    failing.messages[0].ack()
    wait_for(lambda: any(doc.get('error') for doc in items(client)), 'the failure')
    publish(connection, 'refused')
    kill_all(Inbox(connect(), ack=False), client, 1)
    compare('WorkItem', written(sent)['WorkItem'] + items(client))


def test_documents_of_completed_messages(
    connect: Connect, client: Client, sent: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, inbox = connect(), Inbox(connect(keep_done=60))
    for count, headers, name in ((1, {'job_key': 'k'}, None), (2, {}, 'worker@host')):
        monkeypatch.setattr(lease._Process, 'worker', name)
        publish(connection, 'hello', headers={'id': 'a', 'task': 'report', **headers})
        inbox.wait(count)
        wait_for(lambda: not items(client), 'the acknowledgement')
    compare('DoneItem', written(sent)['DoneItem'])


def test_other_documents_of_the_broker(
    connect: Connect,
    client: Client,
    sent: list[Request],
    sent_broadcasts: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection, channel = connect(), connect().channel()
    for kind in ('direct', 'topic', 'fanout'):
        exchange = Exchange(f'to {kind}', kind)
        Queue(f'of {kind}', exchange, 'a.b', expires=60)(channel).declare()
        connection.Producer().publish('hello', exchange=exchange, routing_key='a.b', declare=[exchange])
    Queue('permanent', Exchange('to direct', 'direct'), 'c')(channel).declare()
    Queue('by headers', Exchange('to headers', 'headers'), binding_arguments={'a': 1})(channel).declare()
    monkeypatch.setattr(lease._Process, 'worker', None)  # a worker of an earlier test may have set it
    Inbox(connect(), 'of direct').wait(1)
    monkeypatch.setattr(lease._Process, 'worker', 'worker@host')
    running = RunningTask('1', 'report', 'of direct', 0.0, True)
    monkeypatch.setattr(worker_hooks, '_hooks', {'running': lambda queues: [running]})
    pool = {'name': 'solo', 'processes': 1, 'since': 1.0, 'versions': []}
    members = {'tasks': lambda: {'since': 1.0, 'counts': {}}, 'pool': lambda: pool}
    monkeypatch.setattr(worker_hooks, '_members', members)
    Inbox(connect(), 'of direct').drain_until(lambda: any('worker' in doc for doc in written(sent)['Consumer']))
    message = {'body': 'x', 'headers': {}, 'properties': {}}
    connection.transport.broadcaster.send('to fanout', '', message, reply={'exchange': 'replies'})
    bells = BroadcastsDatabase(client)
    bells.notify()
    bells.ring('q')
    for kind in ('Broadcast', 'Notice', 'Bell'):
        compare(kind, written(sent_broadcasts)[kind])
    docs = written(sent)
    for kind in ('Consumer', 'Queue', 'Binding', 'Exchange'):
        compare(kind, docs[kind])


def test_documents_of_a_pause_of_a_leader_and_of_an_action(client: Client, sent: list[Request]) -> None:
    queues.pause(client, 'q')
    queues.pause(client, 'refusing', refuse=True)
    audit.record(client, 'ann', 'pause queue', ['q'], 'q: paused.', None)
    audit.record(client, 'ann', 'edit schedule', ['a'], 'a: changed.', None, {'a': {'args': ['[1]', None]}})
    one = LeaderLease(client, 'job', 'beat@host')
    one.step()
    one.release()
    for kind in ('Pause', 'Leader', 'Audit'):
        compare(kind, written(sent)[kind])


def test_documents_of_the_history(client: Client, connection: Connection, sent: list[Request]) -> None:
    for name in ('one', 'two'):
        publish(connection, name, name)
        history = History(client)
        history.step()
        before = client.clock.now()
        with mock.patch.object(client.clock, 'now', lambda before=before: before + 600):
            history.work(stale=True)
        history.close()
    compare('History', written(sent)['History'])


def test_documents_of_beat(made: Callable[..., Celery], client: Client, sent: list[Request]) -> None:
    options = {'missed': 'skip', 'grace': 5}
    app = made(
        beat_schedule={'a': {'task': 't', 'schedule': 5, 'args': ({1},), 'options': options}}, result_expires=None
    )
    beat = CouchDBScheduler(app)
    wait_for(lambda: [beat.tick(), written(sent)['ScheduleState']][1], 'a state')
    app.conf.beat_schedule = {}
    beat.close()
    beat = CouchDBScheduler(app)
    wait_for(lambda: [beat.tick(), client.get('beat:entry:a').get('removed')][1], 'the removal')
    beat.close()
    Schedules(app).add('b', 't', 5, args=[], until='2099-01-01', times=5)
    client.put({'_id': 'beat:entry:c', 'type': 'Schedule', 'task': 't', 'schedule': {'every': 5}})
    compare('Schedule', [*written(sent)['Schedule'], client.get('beat:entry:c')])
    compare('ScheduleState', written(sent)['ScheduleState'])


def test_documents_of_parcels(connect: Connect, client: Client, sent: list[Request]) -> None:
    client.put(parcel.design_documents()[0])
    for task_id, body in (('a', 'small'), ('b', 'x' * 150_000)):
        publish(connect(), body, headers={'id': task_id, 'task': 'report'})
    docs = written(sent)['Parcel']
    message = docs[0]['message']
    message['properties'].update(region='eu', fallback='us')
    options = Options.of({'region': 'us', 'regions': dict.fromkeys(('eu', 'us'), 'couchdb://host/regions')})
    _, abroad = OtherRegions(options, client).documents(message, '', 'q')
    given = region.lent_parcel(workitem.new('a', 'q', message, 5.0), 'us', 'eu', None, 6.0)
    taken, elsewhere = region.there(abroad[0], 'server', 7.0), region.withdrawn(abroad[0], 'us')
    cancelled = {**given, 'cancelled': 8.0, 'terminate': True, 'delayed': 'a reason'}
    told = {**refused(docs[0], 'a reason', 5.0), 'told': True}
    compare('Parcel', [*docs, told, *abroad, given, taken, elsewhere, cancelled])
    compare(
        'LentItem',
        [
            region.lent(workitem.new('a', 'q', {**message, 'properties': {'expiration': '5'}}, 5.0), 'eu', 6.0),
            region.lent(workitem.new('a', 'q', message, 5.0), 'eu', 6.0),
        ],
    )
    returned = [region.returned('us', 'a', 'b', {'status': 'SUCCESS'}, record, 5.0) for record in (None, given['_id'])]
    compare('Returned', [*returned, {'type': 'Returned', 'together': returned}])
    Demand(client, 'eu').close({})
    compare('Region', written(sent)['Region'])


def test_document_of_a_device(client: Client, sent: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_setup, 'user_exists', lambda client, name: True)
    [*_, register] = device_setup.device_plan(client, 'parcels', None, 'alice')[1]
    assert register.do
    register.do()
    compare('Device', written(sent)['Device'])


def test_documents_of_receipts() -> None:
    first = parcel.receipt_of({'_id': 'a', 'task': 'add'}, 'b', None, 1.0, 2.0)
    ends = [parcel.result_outcome(5), parcel.error_outcome('ValueError'), parcel.result_outcome('x' * 100_000)]
    compare('Receipt', [first, *(parcel.ended(first, parcel.end_of('SUCCESS', end, 3.0, 5.0)) for end in ends)])


@pytest.fixture
def made(url: str, client: Client) -> Iterator[Callable[..., Celery]]:
    """A function that returns an app which stores messages and results in the test's database."""
    apps: list[Celery] = []

    def make(**conf: Any) -> Celery:
        app = Celery('test', set_as_current=False, broker=url, backend=url)
        app.conf.update(conf)
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.pool.force_close_all()
        app.close()


def test_documents_of_results(made: Callable[..., Celery], sent: list[Request]) -> None:
    for conf in ({}, {'result_expires': None}, {'result_serializer': 'pickle'}):
        backend = made(**conf).backend
        backend.store_result(f'of {conf}', 1, 'SUCCESS')
        backend.save_group(f'of {conf}', backend.app.GroupResult('c', []))
    backend.store_result('of a failure', ValueError('no'), 'FAILURE')
    backend.store_result('of a run', 1, 'SUCCESS', request=Context(id='of a run', delivery_info={'redelivered': False}))
    part = Context(id='of a part', group='group', group_index=0, chord={'task': 'body'})
    backend.store_result('of a part', 'x' * 5000, 'SUCCESS', request=part)
    backend.set('text', 'mine')
    backend.set('bytes', b'mine')
    made().backend.set('object', '{"whose": "mine"}')
    docs = written(sent)
    docs['Result'].append({**docs['Result'][0], 'region': 'eu'})  # it returned from another region
    for kind in ('Result', 'Group', 'Value'):
        compare(kind, docs[kind])


def test_documents_of_chords(made: Callable[..., Celery], sent: list[Request]) -> None:
    for app in (made(), made(result_expires=None)):
        result = chord([app.signature('part', task_id=name) for name in 'ab'], app=app)(app.signature('body'))
        group_id = result.parent.id
        chords = app.backend.chords
        chords.add(group_id, 'c')
        chords.store_part(chords.new_part(group_id, 0, 'a', 'SUCCESS', None, None))
        chords.store_part(chords.new_part(group_id, None, 'c', 'SUCCESS', {'value': {}}, {'value': {}}))
        chords.store_part(chords.new_part(group_id, 1, 'b', 'SUCCESS', None, None))
        claimed = chords.claim(group_id, ordered=True)
        chords.renew({**claimed.chord, 'errbacks': 1})
        chords.add(f'unprepared {group_id}', 'd')
    docs = written(sent)
    compare('Chord', docs['Chord'])
    compare('Part', docs['Part'])
