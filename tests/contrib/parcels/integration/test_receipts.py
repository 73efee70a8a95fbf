"""Receipts of parcels: they say how tasks ended, whoever is killed, and whatever publishers write into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_couchdb.contrib.parcels import receipts
from celery_couchdb.contrib.parcels.mover import Mover
from celery_couchdb.contrib.parcels.room import PARCEL
from kombu_couchdb.couchdb.bulk import deletion
from kombu_couchdb.couchdb.client import Client, Document
from kombu_couchdb.documents import dead_letter
from kombu_couchdb.documents.dead_letter import rejected
from kombu_couchdb.errors import ServerUnavailable
from kombu_couchdb.queues.store import Store
from tests.conftest import PATIENCE, wait_for
from tests.parcels import kill_between_writes, receipt_of, settle, waiting_in
from tests.support import items


@pytest.fixture
def app(mover_app: Celery) -> Celery:
    return mover_app


def put(parcels: Client, *names: str, **members: Any) -> None:
    answers = parcels.bulk([{'_id': name, 'task': 'add', 'args': [1, 2], **members} for name in names])
    assert all(answer.is_stored for answer in answers)


def end(app: Celery, item: Document, value: Any = 3, state: str = 'SUCCESS') -> None:
    """Store a result as the worker does that has run the task of a message."""
    headers = item['message']['headers']
    request = Context({**headers, 'headers': {}, 'delivery_info': {}})
    app.backend.store_result(headers['id'], value, state, request=request)


def item_of(client: Client, parcel_id: str) -> Document:
    [found] = [item for item in items(client) if item['message']['headers'][PARCEL][1] == parcel_id]
    return found


def run(mover: Mover, parcels: Client, doc_id: str) -> Document:
    """Step until a receipt tells how its task ended, and return the receipt."""

    def stepped() -> Document:
        mover.step()
        return receipt_of(parcels, doc_id)

    return wait_for(stepped, 'the receipt')


@pytest.fixture
def one(mover: Callable[[], Mover], parcels: Client) -> Mover:
    """A mover that has moved the parcels `a` and `b`."""
    put(parcels, 'a', 'b')
    one = mover()
    settle(one)
    return one


def test_receipt_tells_what_the_task_returned(
    app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    put(parcels, 'a', customer='Zoë')
    one = mover()
    settle(one)
    receipt = parcels.get('a')
    item = item_of(client, 'a')
    assert (receipt['type'], receipt['state'], receipt['customer']) == ('Receipt', 'PENDING', 'Zoë')
    assert receipt['id'] == item['message']['headers']['id']
    end(app, item)
    assert run(one, parcels, 'a')['result'] == 3


def test_no_leader_is_needed_for_the_end(app: Celery, one: Mover, client: Client, parcels: Client) -> None:
    one.close()
    end(app, item_of(client, 'a'), ValueError('sold out'), 'FAILURE')
    assert receipt_of(parcels, 'a')['error'] == 'ValueError: sold out'


def test_task_of_another_parcel_does_not_end_a_receipt(
    app: Celery, one: Mover, client: Client, parcels: Client
) -> None:
    """A publisher writes into its receipt the id of another task."""
    parcels.put({**parcels.get('a'), 'id': parcels.get('b')['id']})
    end(app, item_of(client, 'b'))
    assert receipt_of(parcels, 'b')['state'] == 'SUCCESS'
    assert parcels.get('a')['state'] == 'PENDING'
    end(app, item_of(client, 'a'), 4)
    assert receipt_of(parcels, 'a')['result'] == 4
    assert receipt_of(parcels, 'a')['id'] == item_of(client, 'a')['message']['headers']['id']


def test_mover_killed_between_its_two_writes_while_the_task_ends(
    app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = mover()
    put(parcels, 'a', customer='Zoë')
    kill_between_writes(first, monkeypatch)
    first._leader.release()
    end(app, item_of(client, 'a'))
    settle(mover())
    receipt = receipt_of(parcels, 'a')
    assert (receipt['result'], receipt['customer'], len(items(client))) == (3, 'Zoë', 1)
    assert receipt['moved'] <= receipt['done']


def test_first_end_counts(app: Celery, one: Mover, client: Client, parcels: Client) -> None:
    """The message is delivered twice, or a request comes late."""
    for value in (3, 4):
        end(app, item_of(client, 'a'), value)
    end(app, item_of(client, 'a'), ValueError('late'), 'FAILURE')
    assert receipt_of(parcels, 'a')['result'] == 3


def test_states_before_the_end_are_no_end(app: Celery, one: Mover, client: Client, parcels: Client) -> None:
    for state in ('STARTED', 'RETRY', 'MINE'):
        end(app, item_of(client, 'a'), None, state)
    assert parcels.get('a')['state'] == 'PENDING'


def test_publisher_changes_the_receipt_meanwhile(
    app: Celery, one: Mover, client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher writes between the reading and the writing of the worker."""
    find, changed = Client.find, list[int]()

    def find_and_change(self: Client, ids: Any, *args: Any, **options: Any) -> Any:
        docs = find(self, ids, *args, **options)
        if self.address.database == parcels.address.database and len(changed) < 2:
            changed.append(len(changed))
            parcels.put({**parcels.get('a'), 'note': len(changed)})
        return docs

    monkeypatch.setattr(Client, 'find', find_and_change)
    end(app, item_of(client, 'a'))
    receipt = receipt_of(parcels, 'a')
    assert (receipt['result'], receipt['note']) == (3, 2)


def test_receipt_that_was_deleted_stays_deleted(app: Celery, one: Mover, client: Client, parcels: Client) -> None:
    parcels.bulk([deletion(parcels.get('a'))])
    end(app, item_of(client, 'a'))
    settle(one)
    assert parcels.get_or_none('a') is None
    assert len(items(client)) == 2


def test_broken_database_of_parcels_keeps_no_result_from_being_stored(
    app: Celery, one: Mover, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A design document that does not compile, for example: CouchDB responds to each write with 500."""

    def fails(*args: Any) -> None:
        raise ServerUnavailable('compilation_error')

    monkeypatch.setattr(receipts, 'complete', fails)
    item = item_of(client, 'a')
    end(app, item)
    assert app.AsyncResult(item['message']['headers']['id']).get(timeout=PATIENCE) == 3


def test_late_end_does_not_end_a_new_parcel_with_the_same_id(
    app: Celery, one: Mover, client: Client, parcels: Client
) -> None:
    item = item_of(client, 'a')
    parcels.bulk([deletion(parcels.get('a'))])
    put(parcels, 'a')
    end(app, item)
    assert 'done' not in parcels.get('a')


@pytest.mark.parametrize('named', ['no_such_database', 'No Database', '_users/..', ''])
def test_database_that_was_removed_loses_no_result(app: Celery, one: Mover, client: Client, named: str) -> None:
    item = item_of(client, 'a')
    item['message']['headers'][PARCEL][0] = named
    end(app, item)
    assert app.AsyncResult(item['message']['headers']['id']).get(timeout=1) == 3


@pytest.mark.parametrize(
    ('state', 'error', 'text'),
    [('SUCCESS', None, 'ignores it'), ('IGNORED', None, 'ignores it'), ('FAILURE', ValueError('no'), 'ValueError: no')],
)
def test_task_that_ends_without_a_result(
    app: Celery, one: Mover, client: Client, parcels: Client, state: str, error: Exception | None, text: str
) -> None:
    item = item_of(client, 'a')
    headers = item['message']['headers']
    request = Context({**headers, 'headers': {}, 'delivery_info': {}})
    app.backend.handover.store_end(headers['id'], request, state, error)
    receipt = receipt_of(parcels, 'a')
    assert receipt['state'] == state
    assert text in receipt['error' if error else 'left_out']
    assert app.AsyncResult(headers['id']).state == 'PENDING'


@pytest.mark.parametrize('forged', [{'type': None, 'done': None}, {'state': 'SUCCESS', 'done': 1, 'result': 'forged'}])
def test_edited_receipt_runs_nothing(
    app: Celery, one: Mover, client: Client, parcels: Client, forged: Document
) -> None:
    end(app, item_of(client, 'a'))
    run(one, parcels, 'a')
    doc = {**parcels.get('a'), 'args': [50, 60], **forged}
    parcels.put({name: value for name, value in doc.items() if value is not None})
    one._stale = True
    settle(one)
    assert len(items(client)) == 2
    if 'result' not in forged:  # it looked like a parcel: it is a receipt again, without the end that was removed
        assert parcels.get('a')['state'] == 'PENDING'


def test_receipt_of_somebody_elses_task_stays_empty(app: Celery, one: Mover, client: Client, parcels: Client) -> None:
    item = item_of(client, 'a')
    parcels.put({'_id': 'spy', 'type': 'Receipt', 'task': 'add', 'id': item['message']['headers']['id']})
    end(app, item)
    settle(one)
    assert 'done' not in parcels.get('spy')


def look_up(mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step as if so much time had passed that the messages of open receipts are looked up."""
    settle(mover)
    mover._stale = True
    monkeypatch.setattr('celery_couchdb.contrib.parcels.look_ups._FIRST_SECONDS', 0.0)
    mover.step()
    mover.step()


def test_messages_that_end_without_a_result(
    mover: Callable[[], Mover], client: Client, parcels: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(parcels, 'refused', 'purged')
    one = mover()
    settle(one)
    client.bulk([dead_letter.made_of(item_of(client, 'refused'), rejected('no such customer'), 5.0)])
    assert Store(client).purge('celery') == 1
    put(parcels, 'waits')
    one._stale = True
    look_up(one, monkeypatch)
    assert 'done' not in parcels.get('waits')
    for name, state, error in (
        ('purged', 'REVOKED', 'expired, or was deleted'),
        ('refused', 'FAILURE', 'is a dead letter: rejected: no such customer'),
    ):
        receipt = parcels.get(name)
        assert (receipt['state'], 'result' in receipt, 'done' in receipt) == (state, False, True)
        assert error in receipt['error']


def test_two_tasks_with_the_same_id_have_a_receipt_each(
    app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    """Of two results with one id the first success stays."""
    put(parcels, 'a', 'b', id='order-1')
    settle(mover())
    for name, value in (('a', 3), ('b', 4)):
        end(app, item_of(client, name), value)
    assert [receipt_of(parcels, name)['result'] for name in 'ab'] == [3, 4]


def test_forged_receipt_is_deleted_in_time(one: Mover, parcels: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the broker's database belongs to it. Otherwise each leader would look up its message for ever."""
    scheduled = parcels.get('a')['kept_until'] + 1e9
    parcels.put({**parcels.get('a'), 'kept_until': scheduled})
    parcels.put({'_id': 'forged', 'type': 'Receipt', 'task': 'add', 'id': 'nobody', 'kept_until': 1e300})
    one._stale = True
    look_up(one, monkeypatch)
    until = parcels.get('forged')['kept_until']
    assert 0 < until - parcels.clock.now() <= one._keep
    assert parcels.get('a')['kept_until'] == scheduled


def test_expired_receipts_are_deleted_with_their_conflicts(
    app: Celery, mover: Callable[[], Mover], client: Client, parcels: Client
) -> None:
    leaves = [{'_id': 'a', '_rev': f'1-{digit * 32}', 'task': 'add', 'args': [digit]} for digit in 'abc']
    parcels.request('POST', '/_bulk_docs', body={'docs': leaves, 'new_edits': False})
    put(parcels, 'b')
    one = mover()
    settle(one)
    assert len(items(client)) == 2
    end(app, item_of(client, 'b'))
    run(one, parcels, 'b')
    for doc_id in ('a', 'b'):
        parcels.put({**parcels.get(doc_id), 'kept_until': 0})

    def gone() -> bool:
        settle(one)
        return not parcels.get_or_none('a') and not parcels.get_or_none('b')

    wait_for(gone, 'the deletion of the receipts')
    one._stale = True
    settle(one)
    assert len(items(client)) == 2
    assert waiting_in(parcels) == []
