"""Tasks for other regions: records leave in one region, and each task is published once in the other one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.errors import ConfigurationError, ServerUnavailable, Unstorable
from kombu_couchdb.queues.store import Store
from tests.regions import Regions, new_link, regions_on
from tests.support import items


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
    assert [doc.get('status') for doc in us.records()] == ['fail'] * 4
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


def test_task_that_lasts_is_said_to_be_there(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    us = regions['us']
    us.app.send_task('add', (1, 2), region='eu')
    monkeypatch.setattr(region, 'THERE_SECONDS', 0.0)
    regions.work('eu')
    [doc] = us.records()
    assert region.state_of(doc) == 'there'


def test_record_of_a_task_without_a_result_ends_when_the_task_is_taken(regions: Regions) -> None:
    regions['us'].app.send_task('add', (1, 2), task_id='one', region='eu', ignore_result=True)
    regions.work()
    assert regions['eu'].tasks() == ['one']
    assert regions['us'].records() == []


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
