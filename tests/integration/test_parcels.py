"""Moving parcels: each one is moved exactly once, even if movers are killed or paused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.parcels.mover import Mover
from celery_couchdb.testing import Server
from kombu_couchdb.couchdb.client import Client
from kombu_couchdb.parcels import parcel
from tests.conftest import wait_for
from tests.parcels import kill_between_writes, store_nested
from tests.patience import PatientConnection
from tests.support import Inbox, items


@pytest.fixture
def app(mover_app: Celery) -> Celery:
    return mover_app


def bodies(client: Client) -> list[str]:
    return sorted(item['message']['headers']['id'] for item in items(client))


def put(parcels: Client, *names: str) -> None:
    answers = parcels.bulk([{'_id': name, 'task': 'add', 'args': [1, 2], 'id': name} for name in names])
    assert all(answer.is_stored for answer in answers)


def test_each_parcel_is_moved_once(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    put(parcels, *(f'{n:03}' for n in range(250)))
    mover().step()
    assert bodies(client) == [f'{n:03}' for n in range(250)]
    assert parcels.view(parcel.PARCELS, 'parcels', reduce=False) == []


def test_mover_killed_between_its_two_writes(
    mover: Callable[[], Mover], client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mover()
    put(parcels, 'a', 'b')
    kill_between_writes(first, monkeypatch)
    assert bodies(client) == ['a', 'b']
    client.bulk(
        [{'_id': item['_id'], '_rev': item['_rev'], '_deleted': True} for item in items(client)]
    )  # both writes are done
    first._leader.release()
    put(parcels, 'c')
    mover().step()
    assert bodies(client) == ['c']
    assert parcels.view(parcel.PARCELS, 'parcels', reduce=False) == []


def test_mover_paused_before_its_write(
    mover: Callable[[], Mover], app: Celery, client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The mover has checked that the message was not published, and resumes when the message is completed."""
    first, second = mover(), mover()
    put(parcels, 'a')
    store = first._transport.store
    look = store.unpublished

    def pause(docs: Any) -> Any:
        found = look(docs)
        first._leader.release()  # as if its lease had expired
        second.step()
        assert bodies(client) == ['a']
        with PatientConnection(url) as connection:
            Inbox(connection, 'celery').wait(1)
            wait_for(lambda: not items(client), 'the ack')
        return found

    monkeypatch.setattr(store, 'unpublished', pause)
    first.step()
    assert items(client) == []


def test_parcel_with_a_reused_id_is_not_moved_again(
    app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    app.conf.broker_transport_options['receipts_retention'] = 0
    one = mover()
    put(parcels, 'a')
    one.step()
    put(parcels, 'a', 'b')
    one._stale = True
    one.step()
    assert bodies(client) == ['a', 'b']
    assert parcels.view(parcel.PARCELS, 'parcels', reduce=False) == []


def test_arguments_cannot_forge_lines_of_the_log(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    """Celery prints `argsrepr` and `kwargsrepr` as they are."""
    parcels.put({'_id': 'a', 'task': 'add', 'args': ['a\n[forged]'], 'kwargs': {'y': '\x1b[2J'}})
    mover().step()
    [item] = items(client)
    headers = item['message']['headers']
    assert (headers['argsrepr'], headers['kwargsrepr']) == ("['a\\n[forged]']", "{'y': '\\x1b[2J'}")
    assert json.loads(item['message']['body'])[:2] == [['a\n[forged]'], {'y': '\x1b[2J'}]


@pytest.mark.parametrize('levels', [700, 1_500])
def test_deeply_nested_parcel_is_refused(
    mover: Callable[[], Mover], client: Client, parcels: Client, apache_couchdb: bool, levels: int
) -> None:
    if not apache_couchdb:
        pytest.skip('the embedded server refuses such documents')
    store_nested(parcels, 'deep', levels)
    put(parcels, 'a')
    mover().step()
    assert bodies(client) == ['a']
    assert parcels.raw('deep').count(b'"reason"') == 1
    assert parcels.view(parcel.PARCELS, 'parcels', reduce=False, key=[0, 0]) == []


def test_hostile_parcels_stop_no_others(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    huge = 'x' * 3_000_000
    wrong: list[dict[str, Any]] = [
        {'task': ['add']},
        {'task': 'add', 'kwargs': [1]},
        {'task': 'add', 'args': [{'x-parcel': ['good', 'good']}], 'state': 'SUCCESS', 'done': 1},
        {'task': 'add', 'headers': {'x-parcel': ['good', 'good']}, 'id': {'a': 1}},
        {'task': 'add', 'type': 'Parcel', 'message': []},
        {'task': 'add', 'priority': True, 'date': [5]},
    ]
    parcels.bulk([{'_id': f'{number}', **doc} for number, doc in enumerate(wrong)])
    parcels.put({'_id': 'huge', 'task': 'add', 'args': [huge, huge[:10]], 'id': 'huge'})
    put(parcels, 'good')
    mover().step()
    assert {'good', 'huge'} <= set(bodies(client))
    assert parcels.view(parcel.PARCELS, 'parcels', reduce=False, startkey=[0], endkey=[0, {}]) == []
    refused = {row['id'] for row in parcels.view(parcel.PARCELS, 'parcels', reduce=False, startkey=[1])}
    assert refused == {'0', '1', '3', '4', '5'}


@pytest.mark.parametrize('task', ['add', 'subtract'])
def test_parcel_of_the_maximum_size_stops_no_others(
    mover: Callable[[], Mover], client: Client, parcels: Client, task: str
) -> None:
    members = {'task': task, 'published': -1, 'x': ''}
    parcels.put({'_id': 'largest', **members, 'x': 'x' * (7_999_998 - len(json.dumps(members, separators=(',', ':'))))})
    put(parcels, 'good')
    mover().step()
    assert 'good' in bodies(client)
    assert parcels.view(parcel.PARCELS, 'parcels', reduce=False, startkey=[0], endkey=[0, {}]) == []
    doc = parcels.get('largest')
    assert (doc.get('type'), doc.get('status')) == (('Receipt', None) if task == 'add' else (None, 'fail'))


def test_bodies_in_a_batch_are_limited(
    server: Server, mover: Callable[[], Mover], client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('celery_couchdb.parcels.mover._BATCH_BODY_BYTES', 50_000)
    with Celery('web', set_as_current=False, broker=server.couchdb_url(parcels.address.database)) as web:
        for n in range(5):
            web.send_task('add', ['x' * 20_000, 'y'], task_id=f'{n}')
    one = mover()
    sizes, move = list[int](), one._move

    def counted(docs: Any) -> int:
        sizes.append(len(docs))
        return move(docs)

    monkeypatch.setattr(one, '_move', counted)
    one.step()
    assert sizes == [2, 2, 1, 0]
    assert bodies(client) == [f'{n}' for n in range(5)]


def test_parcel_for_another_region_is_refused(
    mover_app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client, url: str
) -> None:
    mover_app.conf.broker_transport_options |= {'region': 'eu', 'regions': {'eu': url, 'us': url}}
    mover_app.conf.task_routes = {'add': {'region': 'us'}}
    put(parcels, 'a')
    mover().step()
    assert parcels.get('a')['reason'] == 'its task belongs to another region, and parcels are for tasks of this one'
    assert client.id_range('p:') == []  # the database of regions
    assert items(client) == []


@pytest.mark.parametrize('members', [{'args': [1]}, {'type': 'Parcel', 'args': [1]}, {'task': 5}])
def test_malformed_parcel_is_refused_while_the_leader_waits(
    mover: Callable[[], Mover], parcels: Client, members: dict[str, Any]
) -> None:
    one = mover()
    one.step()
    parcels.put({'_id': 'a', **members})

    def is_refused() -> bool:
        one.step()
        return bool(parcels.get('a').get('status') == 'fail')

    wait_for(is_refused, 'the refusal')


def test_deletion_of_a_parcel_does_not_wake_the_leader(mover: Callable[[], Mover], parcels: Client) -> None:
    one = mover()
    one.step()
    put(parcels, 'a')
    parcels.put({**parcels.get('a'), '_deleted': True})
    seen = parcels.changes(0, {'selector': one._selector}, 10)
    assert [row['id'] for row in seen['results'] if not row['id'].startswith('_design/')] == []
