"""Tasks for other regions: records leave in one region, and each task is published once in the other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chain, signals
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.exceptions import Ignore

from celery_couchdb.contrib.parcels import ends
from celery_couchdb.contrib.parcels.messages import ParcelMessages
from celery_couchdb.failures import Failures
from celery_couchdb.resources.failure_actions import FAILURES
from celery_couchdb.testing import Server
from kombu_couchdb import design
from kombu_couchdb.admin.setup import Wanted, plan
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.documents import workitem
from kombu_couchdb.errors import ConfigurationError, ServerUnavailable, Unstorable
from kombu_couchdb.queues.store import Store
from tests.conftest import PATIENCE, wait_for
from tests.regions import Region, Regions, new_link, regions_on
from tests.support import items, record_requests


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us') as regions:
        yield regions


def test_task_for_another_region_is_published_there_once(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    us.app.send_task('add', (1, 2), task_id='one', region='eu')
    us.app.send_task('add', ('x' * 40_000, 'y'), task_id='two', headers={'x-region': 'eu'}, queue='large')
    us.app.send_task('add', (1, 2), task_id='three', region='us')
    assert us.tasks() == ['three']
    assert sorted(doc['id'] for doc in us.records('eu')) == ['one', 'two']
    regions.work()
    assert eu.tasks() == ['one', 'two']
    assert {item['queue'] for item in items(eu.broker)} == {'celery', 'large'}
    for item in items(eu.broker):
        headers = item['message']['headers']
        assert headers['x-from-region'] == 'us'
        giver = region.Giver.of(headers)
        assert giver is not None
        assert (giver.own, giver.region, giver.task_id) == ('eu', 'us', headers['id'])
        assert 'region' not in item['message']['properties']
        assert 'x-region' not in headers
    eu.broker.bulk([{**doc, '_deleted': True} for doc in items(eu.broker)])  # they were done
    regions.work()
    assert eu.tasks() == []
    assert len(us.records()) == 2, 'until their results return'


def test_route_names_a_region(regions: Regions) -> None:
    app = regions['us'].app
    app.conf.task_routes = {'tasks.far': {'region': 'eu', 'queue': 'distant'}}
    app.send_task('tasks.far', ())
    [doc] = regions['us'].records('eu')
    assert doc['routing_key'] == 'distant'


def test_unknown_region_is_an_error_when_the_task_is_sent(regions: Regions) -> None:
    names: list[Any] = ['asia', ['eu'], {'eu': 1}, 7]
    for name in names:
        with pytest.raises(ConfigurationError, match=r'region .* is unknown; transport option regions has: eu, us'):
            regions['us'].app.send_task('add', (1, 2), region=name)
        with pytest.raises(ConfigurationError, match=r'region .* is unknown'):
            regions['us'].app.send_task('add', (1, 2), headers={'x-region': name})
    assert regions['us'].records() == []


def test_body_that_is_too_large_is_an_error_when_the_task_is_sent(regions: Regions) -> None:
    with pytest.raises(Unstorable, match='too many for another region'):
        regions['us'].app.send_task('add', ('x' * 65_000_000,), region='eu')
    assert regions['us'].records() == []


def test_publisher_that_retries_stores_one_record(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    us = regions['us']
    publish, calls = Store.publish, list[Any]()

    def lost(self: Store, docs: Any, **again: bool) -> None:
        publish(self, docs, **again)
        calls.append(docs)
        if len(calls) == 1:
            raise ServerUnavailable('the response is lost')

    monkeypatch.setattr(Store, 'publish', lost)
    us.app.send_task('add', (1, 2), region='eu')
    assert len(calls) == 2
    assert len(us.records()) == 1


def test_malformed_records_are_refused_and_the_sender_learns_why(regions: Regions) -> None:
    us = regions['us']
    malformed: list[dict[str, Any]] = [{}, {'message': 'x'}, {'type': 'Other', 'task': 'add'}]
    us.regions.bulk([{'_id': region.record_id('eu', str(n), 'tag'), **doc} for n, doc in enumerate(malformed)])
    result = us.app.send_task('add', (1, 2), region='eu')
    [doc] = [doc for doc in us.records() if doc.get('id') == result.id]
    us.regions.bulk([{**doc, 'exchange': 7}])
    regions.work('eu')
    assert [doc.get('status') for doc in us.records()] == ['refused'] * 4
    regions.work('us')
    assert result.state == 'FAILURE'
    assert 'region eu has refused the task' in str(result.result)


def test_task_without_a_queue_waits_for_it(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    us.app.send_task('add', (1, 2), task_id='one', region='eu', exchange='news', routing_key='news.today')
    regions.work()
    [doc] = us.records()
    assert "exchange 'news' has no queue" in doc['delayed']
    with eu.app.connection_for_write() as connection:
        channel = connection.channel()
        channel.exchange_declare('news', 'topic')
        channel.queue_declare('readers')
        channel.queue_bind('readers', 'news', 'news.*')
    regions.work('eu')
    assert eu.tasks() == ['one']


def test_task_that_was_taken_is_said_to_be_there(regions: Regions) -> None:
    us = regions['us']
    us.app.send_task('add', (1, 2), region='eu')
    regions.work('eu')
    [doc] = us.records()
    assert region.state_of(doc) == 'there'


def test_two_servers_with_one_name_run_each_task_once(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody starts a copy of eu: what one of them has taken, the other one leaves, and both say so."""
    us, eu = regions['us'], regions['eu']
    us.app.send_task('add', (1, 2), task_id='one', region='eu')
    regions.work('eu')
    assert eu.tasks() == ['one']
    eu.broker.delete()
    eu.broker.create()
    for step in plan(Wanted(eu.broker, design.documents())):
        if step.do:
            step.do()
    monkeypatch.setattr(region, 'identity', lambda broker: 'the copy')
    with new_link(eu.app, 'us') as copy:
        while not copy.step():
            pass
    assert eu.tasks() == []
    assert 'another server is called region eu' in eu.regions.get('region:eu')['errors']['us']
    us.app.send_task('add', (1, 2), task_id='two', region='eu')
    with new_link(eu.app, 'us') as copy:
        while not copy.step():
            pass
    assert eu.tasks() == ['two']


def test_identity_is_that_of_the_database(regions: Regions, apache_couchdb: bool) -> None:
    eu = regions['eu'].broker
    assert region.identity(eu) == region.identity(eu.beside(eu.address.database))
    assert bool(region.identity(eu)) is apache_couchdb


def run(regions: Regions, how: Callable[..., Any], **options: Any) -> None:
    """Let a task of us run in eu, as a worker runs it."""
    regions['us'].app.send_task('add', (), task_id='first', region='eu', **options)
    regions.work('eu')
    run_in(regions['eu'], how)


def run_in(place: Region, how: Callable[..., Any], end: Callable[[Any], Any] = deletion, *, delivery: int = 0) -> None:
    """Let the only message of a region run there, as a worker runs it, and become what `end` returns."""
    place.app.tasks.pop('add', None)
    place.app.task(how, bind=True, name='add', max_retries=3, shared=False)
    [item] = items(place.broker)
    headers = item['message']['headers']
    request = {
        **headers,
        'delivery_info': {'delivery': delivery},
        'headers': headers,
        'hostname': 'w',
        'called_directly': False,
    }
    ends.connect()
    build_tracer('add', place.app.tasks['add'], app=place.app)('first', (), {}, request)
    place.broker.bulk([end(item)])


def returns(self: Any) -> int:
    return 3


def raises(error: BaseException) -> Callable[..., Any]:
    def body(self: Any) -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ('how', 'options'),
    [
        (raises(Ignore()), {}),
        (returns, {'ignore_result': True}),
        (raises(ValueError()), {'ignore_result': True}),
    ],
    ids=['Ignore', 'success', 'failure'],
)
def test_record_of_a_task_without_a_result_ends_when_the_task_has_ended(
    regions: Regions, how: Callable[..., Any], options: Any
) -> None:
    us = regions['us']
    run(regions, how, **options)
    assert len(us.records()) == 1
    regions.work('us')
    assert us.records() == regions['eu'].returning() == []
    assert us.app.AsyncResult('first').state == 'PENDING'


@pytest.mark.parametrize('how', ['retry', 'replace', 'chain'])
def test_task_that_goes_on_has_not_ended(regions: Regions, how: str) -> None:
    us = regions['us']

    def body(self: Any) -> None:
        if how == 'retry':
            raise self.retry(countdown=0)
        add = self.app.signature('add')
        self.replace(chain(add, add, app=self.app) if how == 'chain' else add)

    run(regions, body, ignore_result=True)
    regions.work('us')
    assert len(us.records()) == 1
    assert regions['eu'].tasks() == ['first']


def test_revoked_task_without_a_result_ends(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    us.app.send_task('add', (), task_id='first', region='eu', ignore_result=True)
    regions.work('eu')
    [item] = items(eu.broker)
    headers = item['message']['headers']
    ends.connect()
    request = Context({**headers, 'headers': headers})
    signals.task_revoked.send(
        eu.app.task(returns, bind=True, name='add', shared=False)._get_current_object(), request=request
    )
    regions.work('us')
    assert us.records() == []


def test_retry_that_is_routed_to_a_third_region_ends_all_records(server: Server) -> None:
    with regions_on(server, 'eu', 'us', 'asia') as regions:
        us, eu, asia = (regions[name] for name in ('us', 'eu', 'asia'))
        eu.app.conf.task_routes = {'add': {'region': 'asia'}}

        def body(self: Any) -> None:
            raise self.retry(countdown=0)

        run(regions, body)
        regions.work('asia', 'eu')
        run_in(asia, returns)
        assert len(us.records('eu')) == len(eu.records('asia')) == 1
        regions.work('eu', 'asia')
        regions.work('us')
        assert us.records() == eu.records() == []
        assert us.app.AsyncResult('first').get(timeout=PATIENCE) == 3


def test_task_that_failed_elsewhere_is_retried_there(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']

    def dead(item: Any) -> Any:
        return {**item, 'status': 'fail', 'reason': 'failed: x', 'failed': 1.0}

    us.app.send_task('add', (), task_id='first', region='eu')
    regions.work('eu')
    run_in(eu, raises(ValueError('x')), dead)
    regions.work('us')
    assert us.app.AsyncResult('first').state == 'FAILURE'
    failures, (retry, drop) = Failures(us.app), FAILURES.actions
    assert FAILURES.find(failures, ['first'], False) == ['first']
    with pytest.raises(ConfigurationError, match="no failure 'other'"):
        FAILURES.find(failures, ['other'], False)
    *_, refused = retry.act(failures, ['first'], new_args=[2])
    assert refused.refused == {'first': 'it failed in another place: change or drop it there'}
    assert [part.refused for part in drop.act(failures, ['first'])] == [refused.refused]
    assert us.records() == []
    assert [part.done for part in retry.act(failures, ['first'])] == [{'retried': 1}, {'retried': 0}]
    assert [item['status'] for item in items(eu.broker)] == ['fail']
    regions.work('eu')
    assert ['status' in item for item in items(eu.broker)] == [False]
    assert us.records() == []
    run_in(eu, returns, delivery=1)
    regions.work('us')
    assert us.app.AsyncResult('first').get(timeout=PATIENCE) == 3


def test_failure_tells_where_the_task_ran(regions: Regions) -> None:
    us = regions['us']
    run(regions, raises(ValueError('x')))
    regions.work('us')
    result = us.results.get(us.app.backend.get_key_for_task('first'))
    assert (result['status'], result['region']) == ('FAILURE', 'eu')
    with pytest.raises(ConfigurationError, match="no failure 'first'; it failed in region eu, which keeps it"):
        Failures(us.app).find(['first'])
    us.results.put({**result, 'region': 'asia'})
    with pytest.raises(ConfigurationError, match='failed in region asia, which is not in the transport option'):
        FAILURES.find(Failures(us.app), ['first'], False)


def test_behind_a_refused_task_the_chain_fails_and_errbacks_are_called_once(regions: Regions) -> None:
    us = regions['us']
    add = us.app.signature('add', (1,))
    first = add.clone().set(region='eu', task_id='first')
    chain(first, add.clone().set(task_id='last'), app=us.app).apply_async(link_error=us.app.signature('tell'))
    [doc] = us.records()
    us.regions.bulk([{**doc, 'exchange': 7}])
    for _ in range(2):  # as a new leader
        regions.work()
    assert us.app.AsyncResult('first').state == us.app.AsyncResult('last').state == 'FAILURE'
    assert [item['message']['headers']['task'] for item in items(us.broker)] == ['tell']
    assert region.state_of(us.records()[0]) == 'refused'


def test_cut_link_goes_on_where_it_was(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken before is neither read nor published again."""
    us, eu = regions['us'], regions['eu']
    us.app.send_task('add', (1, 2), task_id='one', region='eu')
    link = regions.link('eu', 'us')
    wait_for(lambda: link.step() > 0 and eu.tasks() == ['one'], 'the task')
    us.road.refuse()
    wait_for(lambda: link.step() >= 0 and link._lead.errors, 'the outage')
    us.road.restore()
    published = list[Any]()
    make = ParcelMessages.make

    def counted(self: ParcelMessages, source: str, docs: Any, publish: Any) -> Any:
        published.extend(docs)
        return make(self, source, docs, publish)

    monkeypatch.setattr(ParcelMessages, 'make', counted)
    us.app.send_task('add', (1, 2), task_id='two', region='eu')
    wait_for(lambda: link.step() >= 0 and len(eu.tasks()) == 2, 'the next task')
    assert [doc['id'] for doc in published] == ['two']


def test_task_that_is_elsewhere_runs_once_although_its_region_is_renamed(server: Server) -> None:
    with regions_on(server, 'eu', 'us') as regions:
        us, eu = regions['us'], regions['eu']
        us.app.send_task('add', (1, 2), task_id='one', region='eu')
        regions.work()
        assert eu.tasks() == ['one']
        eu.know([eu])
        eu.options['regions']['asia'] = us.url()
        with new_link(eu.app, 'asia') as link:
            while not link.step():
                pass
        assert eu.tasks() == ['one']


def test_records_of_tasks_that_wait_are_not_read_again(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the region's own database is asked whether their messages have ended."""
    monkeypatch.setattr('celery_couchdb.contrib.parcels.look_ups._FIRST_SECONDS', 0.01)
    us, eu = regions['us'], regions['eu']
    for name in ('one', 'two'):
        us.app.send_task('add', (1, 2), task_id=name, region='eu')
    regions.work('eu', 'us')
    link = regions.link('eu', 'us')
    while not link.step():
        pass
    there = record_requests(monkeypatch, us.regions.address.database)
    here = record_requests(monkeypatch, eu.broker.address.database)
    wait_for(lambda: link.step() and here, 'a look at the messages')
    assert not [request for request in there if '_bulk_get' in request.path or region.RECORD in request.path]
    eu.broker.bulk([workitem.dropped(items(eu.broker)[0], eu.broker.clock.now())])
    wait_for(lambda: link.step() and eu.returning(), 'the end of the task')
