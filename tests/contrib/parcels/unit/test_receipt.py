"""Receipts: how a task ended, as a document that CouchDB can store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.task import Context

from celery_couchdb.contrib.parcels.room import PARCEL, Origin, ParcelsRoom
from kombu_couchdb.contrib.parcels import parcel
from kombu_couchdb.documents.validation import check_value

OPEN = parcel.receipt_of(
    {'_id': 'order-17', 'task': 'shop.order', 'customer': 'Zoë', 'error': 'x'}, 'a', None, 5.0, 60.0
)

#: A list in 150 lists.
DEEP: list[Any] = []
for _ in range(150):
    DEEP = [DEEP]

UNSTORABLE = ['\udc80', ['\ud800'], 'x' * 64_001, float('nan'), {1: {2: float('inf')}}, 1e-320, DEEP]


def closed(result: Any = None, error: str | None = None) -> dict[str, Any]:
    """Return the receipt of a task that has ended."""
    outcome = parcel.error_outcome(error) if error else parcel.result_outcome(result)
    found = parcel.ended(OPEN, parcel.end_of('SUCCESS', outcome, 6.0, 60.0))
    check_value('the receipt', found)
    return found


def test_receipt_is_kept_from_the_end_of_the_task_on() -> None:
    assert parcel.is_open(OPEN)
    assert not parcel.is_open(closed())
    assert (OPEN['kept_until'], closed()['kept_until']) == (65.0, 66.0)
    assert parcel.receipt_of({'_id': 'a', 'task': 't'}, 'a', 100.0, 5.0, 60.0)['kept_until'] == 160.0


@pytest.mark.parametrize('result', UNSTORABLE)
def test_result_that_cannot_be_stored_is_left_out(result: Any) -> None:
    assert 'result' not in closed(result)
    assert closed(result)['left_out']


def test_error_is_cut_and_can_be_stored() -> None:
    assert closed(error='a file \udc80 is missing')['error'] == 'a file \\udc80 is missing'
    assert len(closed(error='x' * 10_000)['error']) == 2_000


def test_members_of_an_end_that_a_publisher_wrote_are_replaced() -> None:
    forged = {'error': 'forged', 'left_out': 'forged', 'done': 1.0}
    found = parcel.ended({**OPEN, **forged}, parcel.end_of('SUCCESS', {'result': 1}, 6.0, 60.0))
    assert (found.get('error'), found.get('left_out'), found['done'], found['result']) == (None, None, 6.0, 1)
    assert parcel.is_open(parcel.receipt_of({'_id': 'a', 'task': 't', **forged}, 'a', None, 5.0, 60.0))


def test_documents_with_the_same_id_in_two_databases_have_a_receipt_each() -> None:
    """They may be written together: a device chooses its ids."""
    backend = SimpleNamespace(decode=lambda payload: {'result': 3})
    result = {'_id': 'r', 'status': 'SUCCESS', 'task': 'add', 'date': 5.0, 'value': {}}
    ends = dict[str, Any]()
    for name in ('alice', 'bob'):
        request = Context(id='a', headers={PARCEL: [*Origin(name, 'order-17', 'a', '1-x', 4.0, 60.0)]})
        [(database, doc)], is_here = ParcelsRoom().on_result(backend, request, 'a', result, is_result=True)
        assert (database, doc['parcel'], is_here) == (name, 'order-17', True)
        ends[doc['_id']] = doc['end']
    assert len(ends) == 2
    assert ends.popitem()[1] == {
        'id': 'a',
        'moved': 4.0,
        'state': 'SUCCESS',
        'done': 5.0,
        'result': 3,
        'kept_until': 65.0,
    }
