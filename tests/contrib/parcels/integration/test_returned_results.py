"""Results that return from another region: stored at home by the rules of all results, and their records deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import states

from celery_couchdb.contrib.regions.outcomes import ResultsAtHome
from celery_couchdb.testing import Server
from kombu_couchdb.contrib.regions import region
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Document
from kombu_couchdb.errors import AccessDenied
from tests.conftest import wait_for
from tests.regions import Regions, killed_after, new_link, regions_on


@pytest.fixture
def regions(server: Server) -> Iterator[Regions]:
    with regions_on(server, 'eu', 'us') as regions:
        yield regions


def back(regions: Regions, task_id: str, state: str, value: Any, tag: str = '1', **members: Any) -> Document:
    """Let the region eu return a result to us, as a worker does it."""
    eu, us = regions['eu'], regions['us']
    backend: Any = eu.app.backend
    meta = {'status': state, 'result': value, 'traceback': None, 'children': [], 'date_done': None}
    result = {**backend.result_document(task_id, 'add', meta), **members}
    record = next((doc['_id'] for doc in us.records('eu') if doc['id'] == task_id), None)
    doc = region.returned('us', task_id, tag, result, record, float(tag))
    eu.regions.bulk([doc])
    return doc


def test_result_is_stored_at_home_and_its_record_ends(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    result = us.app.send_task('add', (1, 2), region='eu')
    regions.work('eu')
    back(regions, result.id, states.STARTED, None)
    regions.work('us')
    assert (result.state, len(us.records())) == ('STARTED', 1)
    back(regions, result.id, states.SUCCESS, 3, '2')
    regions.work('us')
    assert result.get(timeout=1) == 3
    assert us.records() == eu.returning() == []
    [doc] = us.results.find([us.app.backend.get_key_for_task(result.id)])
    assert doc is not None
    assert doc['expires'] > us.results.clock.now() + 3600, 'it expires from now on'


def test_late_state_does_not_replace_a_success(regions: Regions) -> None:
    """A region that was cut off sends what it knew; meanwhile the task has succeeded."""
    result = regions['us'].app.send_task('add', (1, 2), region='eu')
    back(regions, result.id, states.SUCCESS, 3)
    regions.work('us')
    for tag, state in enumerate((states.RETRY, states.FAILURE, states.STARTED, states.REVOKED), 2):
        error = {'exc_type': 'ValueError', 'exc_message': ['late'], 'exc_module': 'builtins'}
        back(regions, result.id, state, error, str(tag), delivery=[0, 9, 9])
    regions.work('us')
    assert (result.state, result.get(timeout=1)) == ('SUCCESS', 3)
    assert regions['eu'].returning() == []


@pytest.mark.parametrize('tags', ['21', '12'])  # also the dates: a worker's server may have a wrong clock
def test_states_that_arrive_together_are_stored_in_their_order(regions: Regions, tags: str) -> None:
    result = regions['us'].app.send_task('add', (1, 2), region='eu')
    back(regions, result.id, states.SUCCESS, 3, tags[0], delivery=[0, 1, 0])
    back(regions, result.id, states.RETRY, None, tags[1], delivery=[0, 0, 0])
    regions.work('us')
    assert result.get(timeout=1) == 3


def test_results_in_one_document(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    results = [us.app.send_task('add', (n, 1), region='eu') for n in range(3)]
    for n, result in enumerate(results):
        back(regions, result.id, states.SUCCESS, n + 1)
    docs = eu.returning()
    eu.regions.bulk([{**doc, '_deleted': True} for doc in docs])
    eu.regions.bulk([{'_id': 'r:us:3:together', 'type': 'Returned', 'together': [*docs, None, 'x']}])
    regions.work('us')
    assert [result.get(timeout=1) for result in results] == [1, 2, 3]
    assert us.records() == eu.returning() == []


def test_leader_killed_at_each_write(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    us, eu = regions['us'], regions['eu']
    for kill_at in range(4):
        result = us.app.send_task('add', (1, 2), region='eu')
        back(regions, result.id, states.SUCCESS, kill_at)
        with new_link(us.app, 'eu') as link, killed_after(kill_at, monkeypatch):
            link.step()
        regions.work('us')
        assert result.get(timeout=1) == kill_at
        assert us.records() == eu.returning() == []


def test_record_ends_although_its_region_was_renamed_meanwhile(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    result = us.app.send_task('add', (1, 2), region='eu')
    regions.work('eu')
    back(regions, result.id, states.SUCCESS, 3)
    us.know([us])
    us.options['regions']['asia'] = eu.url()
    with new_link(us.app, 'asia') as link:
        while not link.step():
            pass
    assert result.get(timeout=1) == 3
    assert us.records() == eu.returning() == []


def test_result_that_home_refuses_stays_until_home_accepts_it(regions: Regions, apache_couchdb: bool) -> None:
    """Somebody makes a database read-only for a while; the next result of the same region is stored meanwhile."""
    if not apache_couchdb:
        pytest.skip('the embedded server does not call validate_doc_update')
    us, eu = regions['us'], regions['eu']
    first, second = (us.app.send_task('add', (1, 2), region='eu') for _ in range(2))
    rule = f"function (doc) {{ if (doc._id.indexOf('{first.id}') > 0) throw({{forbidden: 'read-only'}}); }}"
    us.results.put({'_id': '_design/refusal', 'validate_doc_update': rule})
    back(regions, first.id, states.SUCCESS, 3)
    back(regions, second.id, states.SUCCESS, 4)
    regions.work('us')
    assert second.get(timeout=1) == 4
    assert [doc['id'] for doc in us.records()] == [first.id]
    assert len(eu.returning()) == 1
    us.results.bulk([{**us.results.get('_design/refusal'), '_deleted': True}])
    regions.work('us')
    assert first.get(timeout=1) == 3
    assert us.records() == eu.returning() == []


def test_regions_have_their_own_prefixes_of_keys(regions: Regions) -> None:
    result = regions['us'].app.send_task('add', (1, 2), region='eu')
    back(regions, result.id, states.SUCCESS, 3, _id=f'eu-celery-task-meta-{result.id}')
    regions.work('us')
    assert result.get(timeout=1) == 3


def test_error_of_home_is_not_blamed_on_the_other_region(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    result = regions['us'].app.send_task('add', (1, 2), region='eu')
    back(regions, result.id, states.SUCCESS, 3)
    link = regions.link('us', 'eu')

    def refuse(self: ResultsAtHome, *_: Any) -> Any:
        raise AccessDenied('home refuses the user')

    with monkeypatch.context() as patch:
        patch.setattr(ResultsAtHome, 'take', refuse)
        with pytest.raises(AccessDenied):
            link.step()
    assert not link._lead.errors
    link.step()
    assert result.get(timeout=1) == 3


def test_documents_that_are_no_results_are_deleted(regions: Regions) -> None:
    us, eu = regions['us'], regions['eu']
    result = us.app.send_task('add', (1, 2), region='eu')
    wrong: list[Any] = [None, 7, {}, {'_id': 'x', 'type': 'Result', 'status': 'SUCCESS'}, {'type': 'Result'}]
    eu.regions.bulk([{'_id': f'r:us:{n}:t', 'type': 'Returned', 'result': one} for n, one in enumerate(wrong)])
    back(regions, result.id, states.SUCCESS, 3)
    regions.work('us')
    assert result.get(timeout=1) == 3
    assert eu.returning() == []
    assert us.results.find(['x']) == [None]


def test_result_that_waits_in_the_database_of_the_broker_returns(regions: Regions) -> None:
    """The database of regions has refused it before, and accepts it now."""
    us, eu = regions['us'], regions['eu']
    result = us.app.send_task('add', (1, 2), region='eu')
    doc = back(regions, result.id, states.SUCCESS, 3)
    eu.regions.bulk([deletion(found) for found in eu.returning()])
    eu.broker.bulk([{**doc, '_id': f'{doc["_id"]}2'}])
    regions.work('eu')
    assert eu.broker.id_range('r:') == []
    regions.work('us')
    assert result.get(timeout=1) == 3
    assert us.records() == eu.returning() == []


@pytest.mark.parametrize('where', ['us', 'eu'])
def test_what_cannot_be_deleted_now_is_deleted_later(
    regions: Regions, apache_couchdb: bool, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Neither the record at home nor what has returned stays for ever if a database refuses once to delete it."""
    if not apache_couchdb:
        pytest.skip('the embedded server does not call validate_doc_update')
    us, eu = regions['us'], regions['eu']
    result = us.app.send_task('add', (1, 2), region='eu')
    rule = "function (doc) { if (doc._deleted) throw({forbidden: 'read-only'}); }"
    regions[where].regions.put({'_id': '_design/refusal', 'validate_doc_update': rule})
    back(regions, result.id, states.SUCCESS, 3)
    monkeypatch.setattr('celery_couchdb.contrib.regions.link.DELAY_SECONDS', 0.0)
    link = regions.link('us', 'eu')
    link.begin()
    link.step()
    link.step()
    assert result.get(timeout=1) == 3
    assert len(us.records()) + len(eu.returning()) == (2 if where == 'us' else 1)
    regions[where].regions.bulk([{**regions[where].regions.get('_design/refusal'), '_deleted': True}])
    wait_for(lambda: link.step() and not us.records() and not eu.returning(), 'the deletion')
