"""Moving parcels: each one is moved exactly once, even if movers are killed or paused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_couchdb.contrib.parcels.mover import Mover
from kombu_couchdb.couchdb.client import Client
from tests.conftest import wait_for
from tests.parcels import kill_between_writes, settle, store_nested, waiting_in
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
    put(parcels, *(f'{n:03}' for n in range(120)))
    settle(mover())
    assert bodies(client) == [f'{n:03}' for n in range(120)]
    assert waiting_in(parcels) == []


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
    settle(mover())
    assert bodies(client) == ['c']
    assert waiting_in(parcels) == []


def test_mover_paused_before_its_write(
    mover: Callable[[], Mover], app: Celery, client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """The mover is about to publish the message, and resumes when another one has moved it and it is completed."""
    first, second = mover(), mover()
    put(parcels, 'a')
    store = first._messages._transport.store
    publish = store.publish_each

    def pause(docs: Any) -> Any:
        first._leader.release()  # as if its lease had expired
        settle(second)
        assert bodies(client) == ['a']
        with PatientConnection(url) as connection:
            Inbox(connection, 'celery').wait(1)
            wait_for(lambda: not items(client), 'the ack')
        return publish(docs)

    monkeypatch.setattr(store, 'publish_each', pause)
    settle(first)
    assert items(client) == []


def test_arguments_cannot_forge_lines_of_the_log(mover: Callable[[], Mover], client: Client, parcels: Client) -> None:
    """Celery prints `argsrepr` and `kwargsrepr` as they are."""
    parcels.put({'_id': 'a', 'task': 'add', 'args': ['a\n[forged]'], 'kwargs': {'y': '\x1b[2J'}})
    settle(mover())
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
    settle(mover())
    assert bodies(client) == ['a']
    assert parcels.raw('deep').count(b'"reason"') == 1
    assert waiting_in(parcels) == []


def test_parcels_of_the_maximum_size_stop_no_others(
    mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    for task in ('add', 'subtract'):
        members = {'task': task, 'published': -1, 'x': ''}
        members['x'] = 'x' * (7_999_998 - len(json.dumps(members, separators=(',', ':'))))
        parcels.put({'_id': task, **members})
    put(parcels, 'good')
    settle(mover())
    assert 'good' in bodies(client)
    assert waiting_in(parcels) == []
    moved, refused = parcels.get('add'), parcels.get('subtract')
    assert (moved.get('type'), moved.get('status')) == ('Receipt', None)
    assert (refused.get('type'), refused.get('status')) == (None, 'refused')


def test_parcel_for_another_region_is_refused(
    mover_app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client, url: str
) -> None:
    mover_app.conf.broker_transport_options |= {'region': 'eu', 'regions': {'eu': url, 'us': url}}
    mover_app.conf.task_routes = {'add': {'region': 'us'}}
    put(parcels, 'a')
    settle(mover())
    assert parcels.get('a')['reason'] == 'its task belongs to another region, and parcels are for tasks of this one'
    assert client.id_range('p:') == []  # the database of regions
    assert items(client) == []


@pytest.mark.parametrize('own', [{'type': 'order'}, {'type': ''}, {'status': 'open'}])
def test_parcel_with_a_member_that_only_we_may_set_is_refused(
    mover: Callable[[], Mover], parcels: Client, own: dict[str, str]
) -> None:
    """Programs on PouchDB often give each document a type."""
    parcels.bulk([{'_id': 'a', 'task': 'add', 'args': [1, 2], **own}, {'_id': 'note', 'text': 'not for us', **own}])
    settle(mover())
    doc = parcels.get('a')
    [name] = own
    assert doc['reason'] == f'a parcel has no member {name!r} of its program: give it another name'
    assert (doc['status'], doc.get('type')) == ('refused', None)
    if own != {'type': ''}:
        assert 'reason' not in parcels.get('note')


def test_malformed_parcels_are_refused_while_the_leader_waits(mover: Callable[[], Mover], parcels: Client) -> None:
    one = mover()
    settle(one)
    malformed: dict[str, dict[str, Any]] = {'a': {'args': [1]}, 'b': {'type': 'Parcel', 'args': [1]}, 'c': {'task': 5}}
    for name, members in malformed.items():
        parcels.put({'_id': name, **members})

    def are_refused() -> bool:
        settle(one)
        return all(parcels.get(name).get('status') == 'refused' for name in 'abc')

    wait_for(are_refused, 'the refusal')
